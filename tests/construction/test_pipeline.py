"""The whole way with a teacher by rule: the sets, every drop, and runs that die anywhere."""

import json
import shutil
from collections import Counter

import pytest

from evisrag_jax.construction.config import ConstructionConfig, FilterConfig, InspectionConfig
from evisrag_jax.construction.contexts import ContextConfig
from evisrag_jax.construction.difficulty import DifficultyConfig
from evisrag_jax.construction.pipeline import ConstructionError, Source, construct
from evisrag_jax.construction.splits import SplitConfig
from evisrag_jax.data.sources import read_records
from evisrag_jax.rewards.gold import gold_text
from evisrag_jax.runtime.host_random import text_hash
from tests.construction.made import Killed, RuleTeacher, draw_pages, right_response, tagged

QUESTIONS = 14
CONFIG = ConstructionConfig(
    chunk=7,
    contexts=ContextConfig(ks=(1, 2, 3)),
    filters=FilterConfig(samples=3, keep=2),
    split=SplitConfig(share=0.5, tolerance=0.1),
    difficulty=DifficultyConfig(samples=4, share=0.8),
    inspection=InspectionConfig(sufficient=6, insufficient=3),
)
KINDS = ("sufficient", "insufficient")
OUTPUTS = ("sft", "grpo", "dropped", "difficulty", "inspection")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """14 questions about as many documents of two pages; the gold page is first, second, or not retrieved."""
    folder = tmp_path_factory.mktemp("raw")
    names = [f"d{i}p{page}" for i in range(QUESTIONS) for page in (0, 1)]
    draw_pages(folder / "pages", names)

    def page(document, number):
        return {
            "image": f"pages/d{document % QUESTIONS}p{number}.png",
            "doc_id": f"d{document % QUESTIONS}",
        }

    rows = []
    for i in range(QUESTIONS):
        mine, other = page(i, 0), page(i, 1)
        far = [page(j, j % 2) for j in range(i + 1, i + 9)]
        ranked = {0: [mine, other], 1: [other, mine], 2: [other]}[i % 3] + far
        row = {"id": f"q{i}", "question": f"what is {i}?", "answers": [f"{i}"], "retrieved": ranked}
        rows.append(row | {"relevant": [mine], "answerable": i % 5 != 4})
    rows[7]["relevant"] = []
    rows[8]["retrieved"] = [{"image": "pages/gone.png", "doc_id": "d8"}, *rows[8]["retrieved"]]
    rows.append({"id": "broken"})
    rows.append({**rows[0], "id": "twin"})
    path = folder / "raw.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(path))


def teach(context, sample):
    """Right in different words, once in a while wrong in one way or another, sometimes not there."""
    draw = text_hash(f"{context.id} {sample}") % 10
    right = right_response(context)
    return {
        0: tagged([None] * context.k, "nobody knows"),
        1: "no tags",
        2: right.replace("seen", "looked"),
        3: right.replace("so", "hence"),
        4: tagged(["x"] * context.k, context.question.answers[0]),
        5: TimeoutError("no reply"),
    }.get(draw, right)


def solve(context, sample):
    """Right for as many samples as the context's name says."""
    right = sample < text_hash(context.id) % 5
    return right_response(context) if right else "<answer>no idea</answer>"


def run(source, out, *, config=CONFIG, lives=None, teacher=None, solver=None, progress=None):
    """One construction; returns (summary, teacher, solver)."""
    teacher = teacher or RuleTeacher(teach, lives=lives)
    solver = solver or RuleTeacher(solve, name="solver", lives=lives)
    facts = {} if progress is None else {"progress": progress}
    summary = construct(
        source, out, config, make_teacher=lambda cache: teacher, make_solver=lambda: solver, **facts
    )
    return summary, teacher, solver


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    return out, *run(source, out)


def rows(out, name):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def written(out):
    """Bytes of every file that a run leaves, pages included, but for the replies."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and not path.name.startswith("requests.sqlite")
    }


def test_the_sets_are_records(whole):
    """Both read as any record file; SFT has responses, GRPO gold evidence, neither a page outside."""
    out, *_ = whole
    sft, grpo = (read_records(out / f"{name}.jsonl") for name in ("sft", "grpo"))
    assert len(sft) > 12 and len(grpo) > 3
    for record in [*sft, *grpo]:
        assert len(record.evidence) == len(record.images) == len(record.doc_ids)
        assert all(image.startswith(str(out / "pages")) for image in record.images)
        assert "<answer>" in gold_text(record)
    assert all(record.response and record.response == record.response.strip() for record in sft)
    assert all(record.response is None for record in grpo)
    assert {record.is_sufficient for record in sft} == {True, False}


def test_kept_responses_are_right(whole):
    """By the raw file alone: the answer, and evidence exactly where the gold page is shown."""
    out, *_ = whole
    for record in read_records(out / "sft.jsonl"):
        number = record.question.split()[-1].rstrip("?")
        document = f"d{number}"
        mine = [line is not None for line in record.evidence]
        assert all(document == doc for doc, has in zip(record.doc_ids, mine, strict=True) if has)
        wanted = number if record.is_sufficient else "insufficient to answer"
        assert f"<answer>{wanted}</answer>" in record.response
        assert record.is_sufficient == (any(mine) and int(number) % 5 != 4)


def test_at_most_two_different_responses_a_context(whole):
    out, *_ = whole
    sft = rows(out, "sft")
    contexts = Counter(row["id"].rpartition("-s")[0] for row in sft)
    assert set(contexts.values()) == {1, 2}
    assert len({(row["id"].rpartition("-s")[0], row["response"]) for row in sft}) == len(sft)


def test_no_document_is_on_both_sides(whole):
    out, *_ = whole
    sides = [{doc for row in rows(out, name) for doc in row["doc_ids"]} for name in ("sft", "grpo")]
    assert not sides[0] & sides[1] and all(sides)


def test_every_drop_has_its_reason(whole):
    """The list and the counts agree; every response is kept or dropped once."""
    out, summary, *_ = whole
    listed: dict = {}
    for row in rows(out, "dropped"):
        listed.setdefault(row["stage"], Counter())[row["reason"]] += 1
    assert {stage: dict(reasons) for stage, reasons in listed.items()} == summary["dropped"]
    assert summary["dropped"]["read"] == {"unreadable_row": 1}
    assert summary["dropped"]["contexts"].keys() == {"no_gold_pages", "duplicate"}
    assert summary["dropped"]["contexts"]["no_gold_pages"] == 1
    assert summary["dropped"]["teacher"] == {"unreadable_page": 3}
    filters = summary["dropped"]["filters"]
    expected = {"teacher_failed", "bad_format", "wrong_answer", "answered_insufficient"}
    assert expected | {"duplicate", "surplus", "extra_evidence"} <= filters.keys()
    kept = sum(n for name, n in summary["kept"].items() if name.split("/")[1] in KINDS)
    assert summary["teacher"]["responses"] == kept + sum(filters.values())
    asked = sum(summary["contexts"].values()) - sum(summary["dropped"]["teacher"].values())
    assert summary["teacher"]["responses"] == 3 * asked


def test_difficulty_orders_and_thins_the_grpo_set(whole):
    out, summary, _, solver = whole
    graded = rows(out, "difficulty")
    assert [row["id"] for row in graded] == [row["id"] for row in rows(out, "grpo")]
    assert all(row["right"] == text_hash(row["id"]) % 5 < 4 for row in graded)
    shares = [row["share"] for row in graded]
    assert shares == sorted(shares, reverse=True)
    counts = summary["difficulty"]["prompts_by_right"]
    candidates = sum(counts.values())
    assert candidates == sum(summary["kept"].get(f"grpo/{kind}", 0) for kind in KINDS)
    assert summary["dropped"]["difficulty"]["solved"] == counts["4/4"]
    assert len(graded) == round(0.8 * (candidates - counts["4/4"]))
    assert set(solver.calls.values()) == {1} and len(solver.calls) == 4 * candidates


def test_rows_for_inspection(whole):
    out, *_ = whole
    picked = rows(out, "inspection")
    assert [row["is_sufficient"] for row in picked] == [True] * 6 + [False] * 3
    assert {row["set"] for row in picked} <= {"sft", "grpo"}
    assert all((out / image).is_file() for row in picked for image in row["images"])


@pytest.mark.parametrize(("lives", "limit"), [(1, 2), (30, 0)])
def test_a_run_killed_again_and_again_ends_like_the_whole(source, whole, tmp_path, lives, limit):
    """Each start dies after `lives` replies of the teacher or the SFT model; no reply is asked for twice."""
    config, expected = CONFIG, whole[0]
    if limit:
        loose = SplitConfig(share=0.5, tolerance=1.0)
        config = ConstructionConfig(**{**vars(CONFIG), "limit": limit, "split": loose})
        expected = tmp_path / "expected"
        run(source, expected, config=config)
    out, calls, starts = tmp_path / "out", Counter(), 0
    done = False
    while not done:
        starts += 1
        teacher = RuleTeacher(teach, lives=lives)
        solver = RuleTeacher(solve, name="solver", lives=lives)
        try:
            run(source, out, config=config, teacher=teacher, solver=solver)
            done = True
        except Killed:
            assert not (out / "sft.jsonl").exists() and starts < 500
        calls += teacher.calls + Counter({("solver", *k): n for k, n in solver.calls.items()})
    assert starts > 3
    assert written(out) == written(expected)
    failed = {k for k in calls if k[0] != "solver" and text_hash(f"{k[0]} {k[1]}") % 10 == 5}
    assert all(count == 1 for key, count in calls.items() if key not in failed)


@pytest.mark.parametrize("stage", ["documents", "teacher", "difficulty"])
def test_a_kill_between_replies(source, whole, tmp_path, stage):
    def die(name, done, total):
        if name == stage and done >= 5:
            raise Killed

    with pytest.raises(Killed):
        run(source, tmp_path, progress=die)
    run(source, tmp_path)
    assert written(tmp_path) == written(whole[0])


def test_a_kill_while_files_are_put_in_place(source, whole, tmp_path, monkeypatch):
    """Some files are new and some are not there yet; the next run puts all in place."""
    from evisrag_jax.construction import sets

    commit, commits = sets.StreamedFile.commit, []

    def die(self):
        if len(commits) == 2:
            raise Killed
        commits.append(self.path)
        commit(self)

    monkeypatch.setattr(sets.StreamedFile, "commit", die)
    with pytest.raises(Killed):
        run(source, tmp_path)
    monkeypatch.undo()
    assert len([name for name in OUTPUTS if (tmp_path / f"{name}.jsonl").exists()]) == 2
    run(source, tmp_path)
    assert written(tmp_path) == written(whole[0])


def test_a_second_run_asks_for_failures_alone(source, whole, tmp_path):
    """A failed call is tried again, a reply never; sets made of replies alone stay what they are."""
    out = tmp_path / "again"
    shutil.copytree(whole[0], out)
    summary, teacher, solver = run(source, out)
    assert not solver.calls and summary["responses"]["difficulty/asked"] == 0
    assert all(text_hash(f"{id} {sample}") % 10 == 5 for id, sample in teacher.calls)
    assert summary["responses"]["teacher/asked"] == len(teacher.calls) > 0
    assert written(out) == written(whole[0])


@pytest.mark.parametrize("change", ["page", "question", "teacher"])
def test_another_page_question_or_teacher_is_another_request(tmp_path, change):
    """Replies are found by content: a page drawn anew under its old name is asked about again."""
    draw_pages(tmp_path / "pages", ["a", "b"])
    row = {"id": "q", "question": "what?", "answers": ["1"], "retrieved": ["pages/a.png"]}
    path = tmp_path / "raw.jsonl"
    path.write_text(json.dumps(row | {"relevant": ["pages/a.png"]}) + "\n")
    config = ConstructionConfig(
        contexts=ContextConfig(ks=(1,)),
        filters=FilterConfig(samples=1),
        split=SplitConfig(tolerance=1.0),
        difficulty=DifficultyConfig(samples=0),
    )

    def calls(name="rule"):
        teacher = RuleTeacher(lambda context, sample: right_response(context), name=name)
        construct(Source(str(path)), tmp_path / "run", config, make_teacher=lambda cache: teacher)
        return len(teacher.calls)

    assert (calls(), calls()) == (1, 0)
    if change == "page":
        shutil.copy(tmp_path / "pages" / "b.png", tmp_path / "pages" / "a.png")
    if change == "question":
        path.write_text(path.read_text().replace("what?", "who?"))
    assert calls("other" if change == "teacher" else "rule") == 1


def test_without_the_difficulty_stage_all_candidates_stay(source, tmp_path):
    config = ConstructionConfig(**{**vars(CONFIG), "difficulty": DifficultyConfig(samples=0)})
    summary, _, solver = run(source, tmp_path, config=config)
    kept = sum(summary["kept"].get(f"grpo/{kind}", 0) for kind in KINDS)
    assert summary["sets"]["grpo"] == kept > 0 and not solver.calls
    assert rows(tmp_path, "difficulty") == [] and "difficulty" not in summary


def test_a_prompt_the_sft_model_cannot_take_is_dropped(source, tmp_path):
    solver = RuleTeacher(lambda context, sample: RuntimeError("no memory"), name="solver")
    summary, *_ = run(source, tmp_path, solver=solver)
    kept = sum(summary["kept"].get(f"grpo/{kind}", 0) for kind in KINDS)
    assert summary["dropped"]["difficulty"] == {"teacher_failed": kept}
    assert summary["sets"]["grpo"] == 0


def test_lists_that_are_too_short_for_any_context(source, tmp_path):
    config = ConstructionConfig(**{**vars(CONFIG), "contexts": ContextConfig(ks=(99,))})
    summary, teacher, _ = run(source, tmp_path, config=config)
    assert summary["dropped"]["contexts"] == {"no_gold_pages": 1, "too_few_pages": QUESTIONS}
    assert not teacher.calls and summary["sets"]["sft"] == summary["sets"]["grpo"] == 0


def test_nothing_to_construct_from(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.write_text('{"id": "a", "retrieved": []}\n')
    with pytest.raises(ConstructionError, match=r"raw\.jsonl: no usable question \(1 rows"):
        run(Source(str(path)), tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*partial"))
