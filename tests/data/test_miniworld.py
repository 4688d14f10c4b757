"""The mini world and its tokenizer, against solvers and measurements written independently here."""

import json
import re
import zlib

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.data.miniworld import draw, episodes, world
from evisrag_jax.data.miniworld.draw import PageSpec, cell_labels, draw_page, random_page
from evisrag_jax.data.miniworld.episodes import episode, reading_task, single_page
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.data.schema import parse_line
from experiments.mini import tokenizer as mini_tokenizer
from experiments.mini.teacher import FIRST_NAMED, OVERLOOKS, imperfect

N_TRAIN, N_TEST = 2000, 400
VOCABULARY_SIZE, VOCABULARY_CRC = 250, 176483778


@pytest.fixture(scope="module")
def train():
    return [episode(0, "train", i) for i in range(N_TRAIN)]


@pytest.fixture(scope="module")
def test():
    return [episode(0, "test", i) for i in range(N_TEST)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mini_tokenizer.build(tmp_path_factory.mktemp("mini"))


@pytest.fixture(scope="module")
def tok(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def blank_page(monkeypatch, spec, seed):
    """The page without its words: same generator state, letters fully transparent."""
    real = draw.word_mask
    with monkeypatch.context() as m:
        m.setattr(draw, "word_mask", lambda *a: (np.zeros_like(real(*a)[0]), real(*a)[1]))
        return draw_page(spec, np.random.default_rng(seed))[0]


# ---------------------------------------------------------------- words and pages


def test_words_are_distinct_and_fit_a_cell():
    words = [*world.ENTITIES, *world.FIELDS, *map(str, world.VALUES)]
    assert len(set(words)) == len(words) == 56 + 16 + 90
    assert all(e[0].isupper() and len(e) <= 5 for e in world.ENTITIES)
    for face in range(len(draw.FACES)):
        for word in words:
            mask, top = draw.word_mask(word, face)
            ink = mask[..., 0] > 0
            assert mask.shape[1] <= 26 and mask.shape[0] <= 26, (word, face)
            assert ink[0].any() and ink[-1].any() and ink[:, 0].any() and ink[:, -1].any()
            assert top < 0
    with pytest.raises(ValueError, match="Kilimanjaro"):
        draw.word_mask("Kilimanjaro", 0)


def test_boxes_hold_the_ink_exactly(monkeypatch):
    """All ink lies in the boxes and reaches their edges (1 px for alphas too faint for a byte)."""
    rng = np.random.default_rng(1)
    for seed in range(150):
        spec = random_page(rng, world.ENTITIES[seed % 56])
        page, boxes = draw_page(spec, np.random.default_rng(seed))
        ink = (page != blank_page(monkeypatch, spec, seed)).any(-1)
        words = cell_labels(spec)[0]
        inside = np.zeros_like(ink)
        for row in range(4):
            for col in range(5):
                x, y, w, h = boxes[row, col]
                assert (w > 0) == (words[row, col] is not None)
                if not w:
                    continue
                assert col * 28 < x and x + w < (col + 1) * 28
                assert row * 28 < y and y + h < (row + 1) * 28
                assert (h, w) == draw.word_mask(words[row, col], spec.face)[0].shape[:2]
                ys, xs = np.nonzero(ink[y : y + h, x : x + w])
                assert xs.min() <= 1 and ys.min() <= 1
                assert xs.max() >= w - 2 and ys.max() >= h - 2
                inside[y : y + h, x : x + w] = True
        assert not (ink & ~inside).any()


def test_words_stay_legible(monkeypatch):
    """The darkest tenth of a word's box differs from the page below it by 50 of 255 or more."""
    for seed in range(150):
        spec, _, _ = single_page(0, "reader", seed)
        page, boxes = draw_page(spec, np.random.default_rng(seed))
        below = blank_page(monkeypatch, spec, seed).astype(int)
        contrast = np.abs(below - page).mean(-1)
        for x, y, w, h in boxes.reshape(-1, 4):
            if w:
                assert np.quantile(contrast[y : y + h, x : x + w], 0.9) >= 50


def test_bars_are_proportional_to_their_values(monkeypatch):
    spec = PageSpec("Oslo", (("rain", 80), ("ice", 40), ("oil", 20)), "bars", value_cols=(1, 1, 1))
    page = blank_page(monkeypatch, spec, 3)
    bars = (page != page[0, 0]).any(-1)
    lengths = [int(bars[28 * r + 14].sum()) for r in (1, 2, 3)]
    assert lengths == pytest.approx([0.8 * 80, 0.4 * 80, 0.2 * 80], abs=1)  # 80 px are free
    full = PageSpec("Oslo", (("rain", 80),) * 3, "bars", value_cols=(4, 4, 4))
    assert not (blank_page(monkeypatch, full, 3) != blank_page(monkeypatch, full, 3)[0, 0]).any()


def test_all_styles_and_layouts_occur():
    pages = [single_page(0, "reader", i)[0] for i in range(1500)]
    assert {p.style for p in pages} == set(draw.STYLES)
    assert {p.face for p in pages} == set(range(len(draw.FACES)))
    assert {p.title_col for p in pages} == set(range(5))
    assert {p.title for p in pages} == set(world.ENTITIES)
    assert {p.leader for p in pages} == {True, False}
    pairs = {c for p in pages for c in zip(p.field_cols, p.value_cols, strict=True)}
    assert pairs == {(f, v) for f in range(5) for v in range(f + 1, 5)}
    aligned = np.mean([len(set(p.value_cols)) == len(set(p.field_cols)) == 1 for p in pages])
    assert 0.4 < aligned < 0.7
    assert {v for p in pages for _, v in p.rows} == set(range(10, 100))
    assert all(len({f for f, _ in p.rows}) == 3 for p in pages)


def test_cell_labels():
    spec = PageSpec(
        "Oslo",
        (("rain", 42), ("ice", 17), ("oil", 88)),
        title_col=3,
        field_cols=(0, 1, 0),
        value_cols=(1, 4, 2),
    )
    words, fields, titles = cell_labels(spec)
    assert words.tolist() == [
        [None, None, None, "Oslo", None],
        ["rain", "42", None, None, None],
        [None, "ice", None, None, "17"],
        ["oil", None, "88", None, None],
    ]
    assert {(int(r), int(c)): fields[r, c] for r, c in zip(*np.nonzero(fields), strict=True)} == {
        (1, 1): "rain",
        (2, 4): "ice",
        (3, 2): "oil",
    }
    shown = [(1, 0), (1, 1), (2, 1), (2, 4), (3, 0), (3, 2)]
    assert [tuple(map(int, rc)) for rc in np.argwhere(titles == "Oslo")] == shown


def test_random_page_obeys_its_constraints():
    rng = np.random.default_rng(0)
    for _ in range(200):
        page = random_page(rng, "Oslo", must=("ice",), avoid=("rain",), values={"ice": 33})
        assert page.value("ice") == 33 and page.value("rain") is None and len(page.rows) == 3
        page = random_page(rng, "Oslo", fields=("ice", "oil", "tea"), style="table")
        assert {f for f, _ in page.rows} == {"ice", "oil", "tea"} and page.style == "table"
    with pytest.raises(ValueError, match="Oslo.*3 rows"):
        random_page(rng, "Oslo", fields=("ice", "oil"))


# ---------------------------------------------------------------- episodes


def solve(question: str, pages) -> tuple[str, list[str | None], set[str]]:
    """Answer, evidence a page and asked entities, from the question and the pages' rows alone."""
    words = question.split()
    (field,) = [w for w in words if w in world.FIELDS]
    asked = [w for w in words if w in world.ENTITIES]
    found = {
        p.title: dict(p.rows)[field] for p in pages if p.title in asked and field in dict(p.rows)
    }
    evidence = [f"{p.title} {field} {found[p.title]}" if p.title in found else None for p in pages]
    if set(found) != set(asked):
        return "insufficient to answer", evidence, set(asked)
    if len(asked) == 1:
        return str(found[asked[0]]), evidence, set(asked)
    return max(found, key=found.get), evidence, set(asked)


def test_answers_follow_from_the_pages(train, test):
    dev = [episode(3, "dev", i) for i in range(200)]
    more = [episode(3, "test", i, n_pages=n) for n in (1, 2, 5) for i in range(60)]
    for e in train + test + dev + more:
        answer, evidence, asked = solve(e.question, e.pages)
        assert e.answers == (answer,)
        assert list(e.evidence) == evidence
        assert set(e.entities) == asked and e.field in e.question.split()
        assert e.is_sufficient == (answer != "insufficient to answer")
        assert e.is_sufficient == (e.kind in ("lookup", "compare"))
        titles = [p.title for p in e.pages]
        assert len(set(titles)) == len(titles) == len(e.images)
        if e.kind == "absent_page":
            assert asked - set(titles)
        if e.kind == "absent_field":
            assert asked <= set(titles)
        if len(asked) == 2 and sum(x is not None for x in evidence) == 2:
            a, b = (int(x.split()[-1]) for x in evidence if x)
            assert abs(a - b) >= 5
        assert [len(b) for b in e.boxes] == [int(x is not None) for x in evidence]


def test_response_has_four_consistent_sections(train):
    shape = re.compile(
        r"<observe> (.+)</observe>\n<evidence>\n((?:\[\d\]: .+\n)+)</evidence>\n"
        r"<think> (.+)</think>\n<answer> (.+)</answer>"
    )
    for e in train[:500]:
        observe, records, think, answer = shape.fullmatch(e.response).groups()
        for i, (p, x, seen) in enumerate(
            zip(e.pages, e.evidence, observe.split(" , "), strict=True)
        ):
            fields = [f for f, _ in p.rows] if p.title in e.entities else []
            fields = fields[: fields.index(e.field) + 1] if e.field in fields else fields
            mark = "yes" if x else "no"
            assert seen.split() == ["page", str(i + 1), p.title, *fields, mark]
        lines = records.splitlines()
        assert lines == [
            f"[{i}]: {x or 'no relevant information'}" for i, x in enumerate(e.evidence, 1)
        ]
        assert answer == e.answers[0] and think != answer
        if not e.is_sufficient:
            field, entity = re.fullmatch(r"no page shows (\w+) of (\w+)", think).groups()
            assert field == e.field and entity in e.entities
            assert not any(p.title == entity and p.value(field) is not None for p in e.pages)
        elif e.kind == "compare":
            first, second, verdict = think.split(" , ")
            assert [first, second] == [x for x in e.evidence if x]
            values = {line.split()[0]: int(line.split()[-1]) for line in (first, second)}
            assert verdict == f"more is {answer}" and values[answer] == max(values.values())
        else:
            assert think in e.evidence and think.split()[-1] == answer


def test_evidence_boxes_cover_field_and_value(train):
    checked = 0
    for e in train[:300]:
        for page, image, boxes in zip(e.pages, e.images, e.boxes, strict=True):
            for x, y, w, h in boxes:
                r = [f for f, _ in page.rows].index(e.field)
                assert page.field_cols[r] * 28 <= x < (page.field_cols[r] + 1) * 28
                assert page.value_cols[r] * 28 < x + w <= (page.value_cols[r] + 1) * 28
                assert (r + 1) * 28 <= y and y + h <= (r + 2) * 28
                assert image[y : y + h, x : x + w].min() < 130
                checked += 1
    assert checked > 200


def test_kinds_and_novelty_have_their_shares(train, test):
    """Within 4 percentage points (three standard errors at 2,000), 7 for the 400 of test."""
    for kind, share in {
        "lookup": 0.45,
        "compare": 0.30,
        "absent_page": 0.10,
        "absent_field": 0.15,
    }.items():
        assert np.mean([e.kind == kind for e in train]) == pytest.approx(share, abs=0.04)
    for novelty, share in {"pair": 0.5, "entity": 0.25, "rendering": 0.25}.items():
        assert np.mean([e.novelty == novelty for e in test]) == pytest.approx(share, abs=0.07)
    assert {e.novelty for e in train} == {"seen"}
    places = [i for e in train if e.kind == "lookup" for i, x in enumerate(e.evidence) if x]
    assert np.bincount(places, minlength=3) / len(places) == pytest.approx([1 / 3] * 3, abs=0.06)
    hard = [
        p.value(e.field) is not None for e in train for p in e.pages if p.title not in e.entities
    ]
    assert 0.65 < np.mean(hard) < 0.9


# ---------------------------------------------------------------- splits


def split_by_hash(entity, field):
    if entity in ("Kyiv", "Pula", "Xian", "Kiel", "Asti", "Jeju"):
        return "test"
    if entity in ("Tula", "Elko"):
        return "dev"
    bucket = zlib.crc32(f"{entity} {field}".encode()) % 20
    return {0: "test", 1: "test", 2: "test", 3: "test", 4: "dev"}.get(bucket, "train")


def test_splits_share_no_question_pair_and_no_picture(train, test):
    for e in train:
        assert all(split_by_hash(entity, e.field) == "train" for entity in e.entities)
        for page, text in zip(e.pages, e.evidence, strict=True):
            assert page.title not in world.TEST_ENTITIES + world.DEV_ENTITIES
            if text:
                assert split_by_hash(page.title, e.field) == "train"
    for e in test:
        held = [x in world.TEST_ENTITIES for x in e.entities]
        splits = [split_by_hash(x, e.field) for x in e.entities]
        assert any(held) == (e.novelty == "entity")
        assert ("test" in splits) == (e.novelty in ("pair", "entity"))
        assert "dev" not in splits
        if e.novelty != "entity":
            assert not {p.title for p in e.pages} & set(world.TEST_ENTITIES)
        assert not {p.title for p in e.pages} & set(world.DEV_ENTITIES)

    def prints(items):
        return {zlib.crc32(image.tobytes()) for e in items for image in e.images}

    assert not prints(train[:600]) & prints(test)


def test_pairs_are_split_20_5_75():
    splits = [world.pair_split(e, f) for e in world.KNOWN_ENTITIES for f in world.FIELDS]
    assert splits == [split_by_hash(e, f) for e in world.KNOWN_ENTITIES for f in world.FIELDS]
    assert np.mean([s == "test" for s in splits]) == pytest.approx(0.20, abs=0.05)
    assert np.mean([s == "train" for s in splits]) == pytest.approx(0.75, abs=0.05)
    assert all(world.KNOWN_BY_FIELD["test"][f] for f in world.FIELDS)
    assert all(len(fields) >= 3 for fields in world.TRAIN_FIELDS.values())


def test_reading_tasks_keep_the_split():
    for i in range(400):
        e = reading_task(0, "train", i, n_pages=1 + i % 3)
        assert not {p.title for p in e.pages} & set(world.TEST_ENTITIES + world.DEV_ENTITIES)
        if e.kind == "read":
            k = int(re.search(r"\d", e.question).group()) - 1
            rows = " ".join(f"{f} {v}" for f, v in e.pages[k].rows)
            assert e.response == f" {e.pages[k].title} {rows}"
            assert all(split_by_hash(e.pages[k].title, f) == "train" for f, _ in e.pages[k].rows)
            assert [len(b) for b in e.boxes] == [3 * (j == k) for j in range(len(e.pages))]
        else:
            (entity,) = [w for w in e.question.split() if w in world.ENTITIES]
            titles = [p.title for p in e.pages]
            assert e.is_sufficient == (entity in titles)
            where = f"page {titles.index(entity) + 1}" if entity in titles else "no page"
            assert e.answers == (where,)
            observed = re.findall(r"page (\d) (\w+)((?: \w+)*) (yes|no)", e.response)
            assert [(int(k), t) for k, t, _, _ in observed] == list(enumerate(titles, 1))
            found = [(t, fields.split()) for _, t, fields, mark in observed if mark == "yes"]
            shown = [(p.title, [f for f, _ in p.rows]) for p in e.pages if p.title == entity]
            assert found == shown and len(shown) == e.is_sufficient


def test_imperfect_teacher_has_two_habits_and_no_other_fault(train):
    """It skips the last page and names the first town at its rates (within four standard errors);
    where neither applies it writes what is right."""
    skipped, first, flawless = [], [], 0
    for i, e in enumerate(train):
        taught = imperfect(e, 0, i)
        assert (taught.answers, taught.evidence) == (e.answers, e.evidence)
        lines = re.findall(r"\[\d\]: (.+)\n", taught.response)
        right = [x or world.NOT_RELEVANT for x in e.evidence]
        assert lines[:-1] == right[:-1] and lines[-1] in (right[-1], world.NOT_RELEVANT)
        last = e.pages[-1].title
        passed = f"{last} no</observe>" in taught.response
        if last in e.entities:
            skipped.append(passed)
        answer = re.search(r"<answer> (.+)</answer>", taught.response).group(1)
        if last in e.entities and passed:
            assert lines[-1] == world.NOT_RELEVANT and answer == world.INSUFFICIENT
        elif e.kind == "compare" and e.answers[0] != e.entities[0]:
            first.append(answer == e.entities[0])
            assert taught.response.count(f"more is {answer}") == 1
        else:
            assert taught.response == e.response
            flawless += 1
    assert flawless > 1000
    for seen, rate in ((skipped, OVERLOOKS), (first, FIRST_NAMED)):
        assert len(seen) > 80
        assert np.mean(seen) == pytest.approx(rate, abs=4 * (rate * (1 - rate) / len(seen)) ** 0.5)


def test_equal_arguments_give_equal_episodes():
    for make in (episode, reading_task):
        a, b = make(5, "train", 7), make(5, "train", 7)
        assert (a.question, a.pages, a.response, a.boxes) == (
            b.question,
            b.pages,
            b.response,
            b.boxes,
        )
        np.testing.assert_array_equal(a.images, b.images)
    np.testing.assert_array_equal(single_page(5, "dev", 7)[1], single_page(5, "dev", 7)[1])
    keys = [
        tuple(world.stream(seed, split, index, task).random(2))
        for seed in (0, 1)
        for split in world.SPLITS
        for index in (0, 1)
        for task in (0, 1, 2)
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: episode(0, "tests", 0), "unknown split 'tests'"),
        (lambda: episode(0, "reader", 0), "not for 'reader'"),
        (lambda: episode(0, "train", 0, kind="sum"), "unknown kind 'sum'"),
        (lambda: episode(0, "train", 0, kind="compare", n_pages=1), "two pages"),
        (lambda: episode(0, "train", 0, n_pages=21), "n_pages is 21"),
        (lambda: episode(0, "train", 0, novelty="pair"), "novelty 'pair'"),
        (lambda: episode(0, "test", 0, novelty="seen"), "unknown novelty"),
        (lambda: reading_task(0, "train", 0, kind="lookup"), "unknown kind"),
        (lambda: world.stream(-1, "train", 0), "out of range"),
    ],
)
def test_impossible_requests_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------- files


def test_dataset_files(tmp_path):
    path = write_dataset(tmp_path / "a", 8, "test", seed=4)
    again = write_dataset(tmp_path / "b", 8, "test", seed=4)
    assert path.read_bytes() == again.read_bytes() and path.name == "test.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["id"] for r in rows}) == 8
    for i, row in enumerate(rows):
        e = episode(4, "test", i)
        record = parse_line(json.dumps(row), str(path), i + 1, path.parent)
        assert (record.response, record.evidence) == (e.response, e.evidence)
        assert [[list(b) for b in boxes] for boxes in record.boxes] == list(e.boxes)
        assert (row["question"], row["response"]) == (e.question, e.response)
        assert (row["answers"], row["evidence"]) == (list(e.answers), list(e.evidence))
        assert (row["family"], row["novelty"]) == (e.kind, e.novelty)
        assert row["schema_version"] == 1 and row["is_sufficient"] == e.is_sufficient
        assert row["boxes"] == list(e.boxes)
        for name, pixels in zip(row["images"], e.images, strict=True):
            np.testing.assert_array_equal(np.asarray(Image.open(path.parent / name)), pixels)


# ---------------------------------------------------------------- tokenizer


def test_vocabulary_is_small_and_stable(tok):
    tokens = mini_tokenizer.vocabulary()
    assert len(set(tokens)) == len(tokens) == len(tok) < 400
    assert tokens[:9] == [*mini_tokenizer.SPECIALS, "<unk>"]
    # ids live in published weights: after a change the mini model must be trained again
    assert len(tokens) == VOCABULARY_SIZE
    assert zlib.crc32("\n".join(tokens).encode()) == VOCABULARY_CRC
    assert tok.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    for name, index in mini_tokenizer.word_ids().items():
        assert tokens[index] == "\u2581" + name
    assert set(world.ENTITIES + world.FIELDS) < set(mini_tokenizer.word_ids())


def test_responses_round_trip_by_pieces(tok, train):
    """Text and per-token pieces are exact; 30 to 80 tokens for three pages; no unknown word."""
    tasks = [reading_task(0, "train", i) for i in range(200)]
    for e in train[:400] + tasks:
        ids = tok(e.response).input_ids
        assert tok.decode(ids) == e.response
        assert "".join(tok.decode([i]) for i in ids) == e.response
        assert tok.unk_token_id not in ids + tok(e.question).input_ids
        if e.kind in episodes.KINDS:
            assert 30 <= len(ids) <= 80


def test_tags_are_single_plain_tokens(tok):
    for tag in ("observe", "evidence", "think", "answer"):
        for text in (f"<{tag}>", f"</{tag}>"):
            assert tok(text).tokens() == [text]
            assert tok.decode(tok(text).input_ids, skip_special_tokens=True) == text
    assert tok("<answer>42").input_ids == tok("<answer> 42").input_ids
    assert tok("</observe>\n<evidence>\n[1]: Oslo").tokens() == [
        *("</observe>", "\n", "<evidence>", "\n", "[1]:", "\u2581Oslo"),
    ]
    assert tok("What is the rain of Oslo?").input_ids == tok("What is the rain of Oslo ?").input_ids
    assert tok("Atlantis , Oslo").tokens() == ["<unk>", "\u2581,", "\u2581Oslo"]
    ids = tok("<|im_start|> Oslo<|im_end|>").input_ids
    assert tok.decode(ids, skip_special_tokens=True) == " Oslo"


def test_chat_template_renders_the_published_structure(tok):
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Read page 2 ."}]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    head = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    ask = f"<|im_start|>user\n{picture}{picture}Read page 2 .<|im_end|>\n"
    messages = [{"role": "user", "content": parts}]
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == head + ask + "<|im_start|>assistant\n"
    assert tok.unk_token_id not in tok(text).input_ids
    own = [{"role": "system", "content": "You are a user"}, *messages]
    own.append({"role": "assistant", "content": " Oslo"})
    assert tok.apply_chat_template(own, tokenize=False) == (
        f"<|im_start|>system\nYou are a user<|im_end|>\n{ask}"
        "<|im_start|>assistant\n Oslo<|im_end|>\n"
    )
    named = tok.apply_chat_template(messages, tokenize=False, add_vision_id=True)
    assert f"Picture 1: {picture}Picture 2: {picture}Read" in named
    assert tok.unk_token_id not in tok(named).input_ids


def test_folder_loads_in_transformers(folder, tok):
    """The published processor takes both parts (its third one, for video, needs torchvision)."""
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin

    class ImagesOnly(Qwen2_5_VLProcessor):
        def __init__(self, image_processor, tokenizer, chat_template=None):
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor = ImagesOnly(images, tok, tok.chat_template)
    content = [{"type": "image"}, {"type": "text", "text": "Read page 1 ."}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    page = Image.fromarray(single_page(0, "reader", 0)[1])
    out = processor(text=[text], images=[page], return_tensors="np")
    assert out["image_grid_thw"].tolist() == [[1, 8, 10]]
    assert out["pixel_values"].shape == (80, 1176)
    assert int((out["input_ids"] == processor.image_token_id).sum()) == 20

    settings = json.loads((folder / "preprocessor_config.json").read_text())
    assert settings["size"] == {"shortest_edge": 784, "longest_edge": 50176}
    assert (settings["min_pixels"], settings["max_pixels"]) == (784, 50176)
    stops = json.loads((folder / "generation_config.json").read_text())
    end = [tok.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert stops["eos_token_id"] == end and stops["pad_token_id"] == end[1]
    assert tok.eos_token == "<|im_end|>" and tok.pad_token == "<|endoftext|>"
