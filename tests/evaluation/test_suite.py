"""The suite with stand-in methods: files, resume, bad records, both modes; and the budget warning."""

import json
from dataclasses import dataclass

import pytest

from evisrag_jax.data.schema import Record
from evisrag_jax.evaluation import suite
from evisrag_jax.evaluation.budgets import compare_budgets
from evisrag_jax.evaluation.statistics import paired_difference
from evisrag_jax.evaluation.suite import efficiency
from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.plan import BUDGETS
from evisrag_jax.prompts.chat import PromptTooLong


@dataclass
class Said:
    id: str
    text: str
    answer: str
    finish: str = "stop"
    length: int = 5
    degenerate: bool = False


class Echo:
    """Answers question i with "i"; keeps what it was asked; may die or refuse a record."""

    name = "echo"

    def __init__(self, die_at=None, refuse=None):
        self.asked, self.die_at, self.refuse = [], die_at, refuse

    def __call__(self, records, engine):
        assert engine == "engine"
        for record in records:
            if record.id == self.die_at:
                raise RuntimeError("killed")
            if self.refuse and record.id in self.refuse:
                raise self.refuse[record.id]
        self.asked.append([record.id for record in records])
        return [Said(r.id, f"<answer>{r.id[1:]}</answer>", r.id[1:]) for r in records]


def questions(count=10):
    """Question i has the answer i, except that 0 and 1 have another; 9 is insufficient."""
    return [
        Record(
            id=f"q{i}",
            question="Q?",
            images=(f"/pages/{i}.png",),
            answers=("wrong" if i < 2 else str(i),),
            is_sufficient=i != 9,
            family="odd" if i % 2 else "even",
        )
        for i in range(count)
    ]


def run(method, out=None, records=None, **options):
    options = {"resamples": 200, "progress": False, "chunk": 4, **options}
    return suite.evaluate(records or questions(), method, "engine", out, **options)


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_files_and_summary(tmp_path):
    method = Echo()
    summary = run(method, tmp_path)
    assert method.asked == [["q0", "q1", "q2", "q3"], ["q4", "q5", "q6", "q7"], ["q8", "q9"]]
    rows = lines(tmp_path / "predictions.jsonl")
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(10)]
    assert rows[3] == {
        "id": "q3",
        "prediction": "<answer>3</answer>",
        "answer": "3",
        "finish": "stop",
        "length": 5,
        "calls": 1,
        "generated": 5,
        "visual_tokens": 0,
        "method": "echo",
        "images": ["/pages/3.png"],
        "question": "Q?",
        "answers": ["3"],
        "is_sufficient": True,
        "degenerate": False,
        "accuracy": 1.0,
        "mode": "strict",
    }
    assert summary["mode"] == "strict" and summary["method"] == "echo"
    assert summary["accuracy"] == 0.7  # 2..8 right; 9 answered although insufficient
    assert summary["accuracy_insufficient"] == 0.0
    assert summary["family/even/accuracy"] == 0.8 and summary["family/odd/accuracy"] == 0.6
    assert (summary["n_expected"], summary["n_predicted"], summary["n_missing"]) == (10, 10, 0)
    low, high = summary["ci"]["accuracy"]
    assert low < 0.7 < high
    assert "evidence_f1" not in summary["ci"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    scores = lines(tmp_path / "scores.jsonl")
    assert [s["accuracy"] for s in scores] == [0.0, 0.0, *[1.0] * 7, 0.0]
    assert scores[9]["outcome"] == "right" and scores[9]["strict/em"] is None


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    """B68: resuming skips what is done and ends with ten unique rows and the same summary."""
    with pytest.raises(RuntimeError, match="killed"):
        run(Echo(die_at="q5"), tmp_path / "a")
    assert not (tmp_path / "a/predictions.jsonl").exists()
    method = Echo()
    summary = run(method, tmp_path / "a")
    assert method.asked == [["q4", "q5", "q6", "q7"], ["q8", "q9"]]
    assert summary.pop("n_resumed") == 4
    straight = run(Echo(), tmp_path / "b")
    assert straight.pop("n_resumed") == 0
    clock = [name for name in summary if name.startswith("cost/latency")]
    assert clock == ["cost/latency_median", "cost/latency_p90"]
    for name in clock:
        assert summary.pop(name) > 0 and straight.pop(name) > 0
    assert summary == straight
    times = lines(tmp_path / "a" / "times.jsonl")
    assert sorted(row["id"] for row in times) == sorted(f"q{i}" for i in range(10))
    for name in ("predictions.jsonl", "scores.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again = Echo()
    assert run(again, tmp_path / "a")["n_resumed"] == 10 and again.asked == []


def test_costs_by_hand():
    """Medians and 90th percentiles; an error, and rows of older files, say nothing."""
    rows = [
        {"calls": 1, "generated": 10, "visual_tokens": 60},
        {"calls": 3, "generated": 30, "visual_tokens": 20},
        {"calls": 0, "generated": 0, "visual_tokens": 0, "finish": "error"},
        {},
    ]
    got = efficiency(rows, [{"id": "a", "seconds": 2.0, "decode": 1.0}])
    assert got["cost/calls_median"] == 2 and got["cost/generated_p90"] == 28
    assert got["cost/latency_median"] == 2.0 and got["cost/latency_decode_p90"] == 1.0
    assert efficiency([{}], []) == {}


def test_predictions_of_another_set_or_method_are_refused(tmp_path):
    """B68: an unknown id is named, never dropped."""
    run(Echo(), tmp_path)
    with pytest.raises(ValueError, match="question 'q3' is not in the set"):
        run(Echo(), tmp_path, records=questions(3))
    with pytest.raises(ValueError, match="answered by method 'echo', not 'other'"):
        run(Echo(), tmp_path, name="other")


def test_limit_then_the_rest(tmp_path):
    assert run(Echo(), tmp_path, limit=3)["n_expected"] == 3
    method = Echo()
    assert run(method, tmp_path)["n_resumed"] == 3
    assert method.asked == [["q3", "q4", "q5", "q6"], ["q7", "q8", "q9"]]
    assert run(Echo(), tmp_path, limit=2)["count"] == 2
    assert len(lines(tmp_path / "predictions.jsonl")) == 10


def test_a_bad_page_or_long_prompt_costs_its_own_question_only(tmp_path):
    """B12: the evaluation goes on; the row says what was wrong and counts as wrong."""
    refuse = {
        "q5": PageError("/pages/5.png", "the file is empty", "empty"),
        "q8": PromptTooLong("q8", 20_000, 15_000),
    }
    summary = run(Echo(refuse=refuse), tmp_path)
    rows = {row["id"]: row for row in lines(tmp_path / "predictions.jsonl")}
    assert rows["q5"]["finish"] == rows["q8"]["finish"] == "error"
    assert "/pages/5.png" in rows["q5"]["error"] and "15000" in rows["q8"]["error"]
    assert rows["q4"]["finish"] == rows["q6"]["finish"] == "stop"
    assert summary["n_error"] == 2 and summary["accuracy"] == 0.5


def test_both_modes_are_scored_and_named(tmp_path):
    def verbose(records, engine):
        return [Said(r.id, f"<answer>about {r.answers[0]} sites</answer>", "") for r in records]

    strict = run(verbose)
    code = run(verbose, mode="code")
    assert (strict["mode"], code["mode"], strict["method"]) == ("strict", "code", "verbose")
    assert strict["accuracy"] == 0.0 and code["accuracy"] == 0.9  # all but the insufficient one
    for name in ("strict/accuracy", "code/global_acc", "code/global_em", "strict/contains"):
        assert strict[name] == code[name]
    with pytest.raises(ValueError, match="'loose'"):
        run(verbose, mode="loose")


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(Echo())
    assert list(tmp_path.iterdir()) == []


def test_methods_must_answer_what_they_were_asked():
    with pytest.raises(ValueError, match="was asked"):
        run(lambda records, engine: [], name="lazy")
    with pytest.raises(ValueError, match="nothing to evaluate"):
        run(Echo(), limit=0)
    with pytest.raises(ValueError, match="'q0' more than once"):
        run(Echo(), records=questions(2) + questions(1))


def test_missing_rows_are_wrong_or_refused():
    """B68: the denominator is the set, whatever the file holds."""
    rows = [{"id": f"q{i}", "prediction": f"<answer>{i}</answer>"} for i in (2, 3, 3)]
    scores, summary = suite.score_predictions(questions(), rows, resamples=50)
    assert summary["accuracy"] == pytest.approx(0.2, abs=1e-12) and len(scores) == 10
    assert (summary["n_missing"], summary["n_duplicate"]) == (8, 1)
    assert summary["outcome/sufficient/missing"] == 7
    with pytest.raises(ValueError, match="8 of 10 questions have no prediction"):
        suite.score_predictions(questions(), rows, require_complete=True)


def test_scores_of_two_runs_can_be_compared(tmp_path):
    run(Echo(), tmp_path / "a")
    run(lambda records, engine: [Said(r.id, "", "") for r in records], tmp_path / "b", name="mute")
    a, b = (suite.read_scores(tmp_path / name / "scores.jsonl") for name in "ab")
    found = paired_difference([a], [b], resamples=500)
    assert found.difference == pytest.approx(0.7, abs=1e-12) and found.p_not_better == 0.0
    assert suite.read_scores(tmp_path / "a/scores.jsonl", "strict/em").keys() == a.keys() - {"q9"}
    with pytest.raises(ValueError, match="no metric 'rouge'"):
        suite.read_scores(tmp_path / "a/scores.jsonl", "rouge")
    with pytest.raises(FileNotFoundError):
        suite.read_scores(tmp_path / "scores.jsonl")


def test_summary_as_text_shows_empty_subsets_as_not_available():
    """B70: no insufficient question in the set."""
    text = suite.format_summary(run(Echo(), records=questions(9)))
    shown = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert shown["accuracy_insufficient"] == ["n/a"] == shown["code/unsuff_em"]
    assert shown["accuracy"][0] == "0.7778" and shown["accuracy"][1].startswith("[")
    assert shown["mode"] == ["strict"] and shown["count"] == ["9"]


def test_other_pixel_budgets_than_the_checkpoints_are_warned_of():
    """B06: the same A4 page is 4,956 tokens at the SFT budget and 1,961 at the GRPO budget."""
    budget = {"min_pixels": 262_144, "max_pixels": 1_568_000}
    sft = {"min_pixels": 3136, "max_pixels": 3_920_000}
    assert compare_budgets(budget, BUDGETS["grpo"]) == []
    (warning,) = compare_budgets({"sft": sft, "grpo": budget}, BUDGETS["grpo"])
    assert "in sft" in warning and "4956 tokens" in warning and "1961 tokens" in warning
    assert "3136..3920000" in warning and "262144..1568000" in warning
    assert len(compare_budgets({"sft": sft, "grpo": budget}, BUDGETS["default"])) == 2
    assert "does not say" in compare_budgets({}, budget)[0]
    with pytest.raises(ValueError, match="sft: a pixel budget needs min_pixels"):
        compare_budgets({"sft": {"max": 3}}, budget)


def test_several_processes_answer_a_share_each_and_score_all(monkeypatch, tmp_path):
    """Three processes over ten questions: each asks its own, all get the summary of one."""
    told, methods = [], [Echo() for _ in range(3)]

    class Waits(Exception):
        """A process waits for the others."""

    def wait(rows):
        told.append(rows)
        raise Waits

    monkeypatch.setattr(suite, "gather_json", wait)
    for i, method in enumerate(methods):
        with pytest.raises(Waits):
            run(method, share=(i, 3))
    asked = [[id for chunk in method.asked for id in chunk] for method in methods]
    assert asked == [[f"q{i}" for i in range(k, 10, 3)] for k in range(3)]
    monkeypatch.setattr(suite, "gather_json", lambda rows: told)
    assert run(Echo(), share=(1, 3)) == run(Echo())
    with pytest.raises(ValueError, match="are not written"):
        run(Echo(), tmp_path, share=(0, 2))
