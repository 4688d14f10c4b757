"""Scenes and questions with a usual answer: same arguments same question, priors by split, boxes that
hold the pixels, responses that say what the picture shows, records that validate."""

import dataclasses
import itertools

import numpy as np
import pytest

from evisrag_jax.data.miniworld.draw import HEIGHT, WIDTH
from evisrag_jax.data.miniworld.world import ENTITIES, FIELDS, LOOKUP_QUESTIONS, VALUES
from evisrag_jax.data.sources import read_records
from evisrag_jax.data.validate import validate_file
from evisrag_jax.prompts.tokenizer import load_tokenizer
from experiments.evidence_rl import files, questions, scenes, tokenizer
from experiments.evidence_rl.questions import question, respond
from experiments.mini import tokenizer as mini_tokenizer

KINDS = list(itertools.product(questions.SOURCES, questions.FAMILIES))


def some(split, source, family, count=40, seed=3):
    return [question(seed, split, i, family, source) for i in range(count)]


# --- scenes


def test_objects_lie_in_their_boxes_and_the_boxes_in_the_picture():
    """Taking an object away changes pixels of its box alone, and reaches all four sides of it up to
    what rounding hides."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        base, things = scenes.ground(rng), scenes.place(rng, scenes.random_kinds(rng))
        whole = scenes.paint(base, things)
        for i, thing in enumerate(things):
            x, y, w, h = thing.box
            assert x >= 0 and x + w <= WIDTH and y >= 0 and y + h <= HEIGHT
            changed = np.argwhere(
                (scenes.paint(base, things[:i] + things[i + 1 :]) != whole).any(-1)
            )
            assert (changed >= (y, x)).all() and (changed < (y + h, x + w)).all()
            low, high = changed.min(0), changed.max(0)
            assert (low - (y, x) <= 4).all() and ((y + h - 1, x + w - 1) - high <= 4).all()
            middle = np.array([x + w / 2, y + h / 2])
            assert (middle // 28).tolist() == [thing.col, thing.row]
            sides = np.array([x - 28 * thing.col, y - 28 * thing.row])
            assert (sides >= -scenes.OVERHANG).all()
            assert (sides + (w, h) <= 28 + scenes.OVERHANG).all()
            assert min(w, h) >= 14 and max(w, h) <= 28


def test_every_object_has_a_cell_of_its_own():
    things = scenes.place(np.random.default_rng(1), [("red", "star")] * 20)
    assert len({(t.col, t.row) for t in things}) == 20
    with pytest.raises(ValueError, match="21 objects for 20 cells"):
        scenes.place(np.random.default_rng(1), [("red", "star")] * 21)


def test_objects_have_the_colour_they_are_called():
    """The pixel nearest to the middle of mass of a filled object is closest to its own colour."""
    rng = np.random.default_rng(2)
    tones = np.array(list(scenes.COLOURS.values()), float)
    for colour in scenes.COLOURS:
        for shape in ("circle", "square", "cross"):
            image, (thing,) = scenes.draw_scene(rng, [(colour, shape)])
            x, y, w, h = thing.box
            pixel = image[y + h // 2, x + w // 2].astype(float)
            assert list(scenes.COLOURS)[np.linalg.norm(tones - pixel, axis=1).argmin()] == colour


def test_unknown_shapes_are_refused():
    with pytest.raises(ValueError, match="'cube'"):
        scenes.mask("cube", 20, 0)


# --- questions


@pytest.mark.parametrize("split", questions.SPLITS)
def test_equal_arguments_give_equal_questions(split):
    a, b, c = (question(*args) for args in ((5, split, 7), (5, split, 7), (5, split, 8)))
    for name in ("text", "answer", "usual", "boxes", "cues"):
        assert getattr(a, name) == getattr(b, name)
    assert (a.image == b.image).all() and (a.image != c.image).any()


def test_splits_show_different_pictures():
    pictures = [question(5, split, 7, "counting", "scene").image for split in questions.SPLITS]
    assert all((a != b).any() for a, b in itertools.combinations(pictures, 2))


@pytest.mark.parametrize("source, family", KINDS)
def test_usual_answers_are_as_frequent_as_the_split_says(source, family):
    """0.8 of 600 within four standard deviations (0.065); never in "shifted"."""
    for split in ("train", "test"):
        usual = np.mean([q.answer == q.usual for q in some(split, source, family, 600)])
        assert abs(usual - 0.8) < 0.066
    assert not any(q.answer == q.usual for q in some("shifted", source, family, 100))
    options = {q.answer for q in some("even", source, family, 100)}
    assert len(options) >= {"scenecounting": 5, "sceneattribute": 6, "pagecounting": 3}.get(
        source + family, 50
    )


@pytest.mark.parametrize("source, family", KINDS)
def test_the_usual_answer_follows_from_the_text(source, family):
    found = {}
    for q in some("train", source, family, 60) + some("shifted", source, family, 60):
        assert found.setdefault(q.text, q.usual) == q.usual == questions.prior(q.text)
    assert len(set(found.values())) >= 3


def test_wordings_of_one_look_up_have_the_same_usual_answer():
    texts = [w.format(field="rain", a="Oslo") for w in LOOKUP_QUESTIONS]
    assert len({questions.prior(t) for t in texts}) == 1


def test_other_texts_have_no_usual_answer():
    with pytest.raises(ValueError, match="no question of scenes or pages"):
        questions.prior("Where is Oslo ?")


def cell(box):
    return [int(box[0] + box[2] / 2) // 28 + 1, int(box[1] + box[3] / 2) // 28 + 1]


def test_counting_on_scenes_has_a_box_and_a_cue_for_each_object():
    for q in some("even", "scene", "counting"):
        colour, shape = q.subject.split()
        assert len(q.boxes) == len(q.cues) == int(q.answer)
        for box, cue in zip(q.boxes, q.cues, strict=True):
            assert cue == " ".join([colour, shape, *map(str, cell(box))])


def test_an_asked_attribute_is_that_of_the_one_shape_in_the_box():
    tones = np.array(list(scenes.COLOURS.values()), float)
    for q in some("even", "scene", "attribute"):
        (box,), (cue,) = q.boxes, q.cues
        assert cue == " ".join([q.subject, *map(str, cell(box))]) and q.answer not in cue
        if q.subject in ("circle", "square", "cross"):
            pixel = q.image[box[1] + box[3] // 2, box[0] + box[2] // 2].astype(float)
            nearest = np.linalg.norm(tones - pixel, axis=1).argmin()
            assert list(scenes.COLOURS)[nearest] == q.answer


@pytest.mark.parametrize("family", questions.FAMILIES)
def test_rows_of_pages_are_named_and_boxed(family):
    """The box of "FIELD row R" has ink of grid row R, and only it."""
    for q in some("even", "page", family):
        assert len(q.boxes) == (int(q.answer) if family == "counting" else 1)
        for (_, y, _, h), cue in zip(q.boxes, q.cues, strict=True):
            name, word, row = cue.split()
            assert name in FIELDS and word == "row"
            assert 28 * int(row) <= y and y + h <= 28 * (int(row) + 1)
            assert not set(cue.split()) & set(map(str, VALUES))


@pytest.mark.parametrize("source, family", KINDS)
def test_responses_are_grounded_or_lazy(source, family):
    rng = np.random.default_rng(0)
    for q in some("shifted", source, family, 20):
        form = "<evidence> {}</evidence>\n<answer> {}</answer>"
        assert respond(q, True, rng) == form.format(f"usual {q.subject}", q.usual)
        assert respond(q, False, rng) in {form.format(cue, q.answer) for cue in q.cues}
        assert all(not cue.startswith("usual") for cue in q.cues)
    if family == "counting":
        q = next(q for q in some("shifted", source, family) if len(q.cues) > 1)
        assert len({respond(q, False, rng) for _ in range(40)}) == len(q.cues)


def test_text_questions_name_the_larger_number():
    for i in range(30):
        q = questions.text_question(0, i)
        words = q.text.split()
        numbers = {w: int(n) for w, n in itertools.pairwise(words) if w in ENTITIES}
        assert q.image is None and q.answer == max(numbers, key=numbers.get)
        assert f"<answer> {q.answer}</answer>" in respond(q, True, np.random.default_rng(0))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        question(0, "dev", 0)
    with pytest.raises(ValueError, match="family 'spatial'"):
        question(0, "train", 0, "spatial")


# --- files and words


def test_records_validate_and_keep_family_source_and_boxes(tmp_path):
    path = files.write_dataset(tmp_path, 12, "shifted", seed=4)
    report = validate_file(path)
    assert report.good == 12 and not report.findings
    for i, record in enumerate(read_records(path)):
        q = question(4, "shifted", i)
        assert (record.family, record.source, record.answers) == (q.family, q.source, (q.answer,))
        assert [list(map(int, box)) for box in record.boxes[0]] == q.boxes
        assert record.response in {
            f"<evidence> {cue}</evidence>\n<answer> {q.answer}</answer>" for cue in q.cues
        }
    again = files.write_dataset(tmp_path / "again", 12, "shifted", seed=4)
    assert again.read_bytes() == path.read_bytes()


def test_text_records_have_no_pictures(tmp_path):
    path = files.write_text_dataset(tmp_path, 5, seed=4)
    assert validate_file(path).good == 5
    assert all(r.images == () and r.source == "text" for r in read_records(path))


def test_words_of_the_mini_tokenizer_keep_their_ids():
    old, new = mini_tokenizer.vocabulary(), mini_tokenizer.vocabulary(tokenizer.WORDS)
    assert new[: len(old)] == old
    assert new[len(old) :] == ["\u2581" + w for w in tokenizer.WORDS]


def test_words_that_are_there_are_not_added_again():
    for wrong in (["Oslo"], ["two words"], ["red", "red"], [""]):
        with pytest.raises(ValueError, match="tokenizer"):
            mini_tokenizer.vocabulary(wrong)


@pytest.mark.parametrize("source, family", KINDS)
def test_questions_and_responses_are_spelled_without_unknown_words(tmp_path, source, family):
    tok = load_tokenizer(tokenizer.build(tmp_path))
    rng = np.random.default_rng(0)
    for q in some("even", source, family, 30):
        for text in (f" {q.text}", *(respond(q, lazy, rng) for lazy in (True, False))):
            ids = tok.encode(text, add_special_tokens=False)
            assert tok.unk_token_id not in ids
            assert tok.decode(ids).strip() == text.strip()


def test_questions_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        question(0, "train", 0).answer = "1"
