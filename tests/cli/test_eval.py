"""``evisrag eval``: predictions once an id, resumable, scored; what it refuses and warns of."""

import json

import pytest

from evisrag_jax.cli.main import main
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.rollout.engine import Engine


def command(model, out, *more):
    return ["eval", "--config=configs/eval.py:mini", "--model", str(model), f"--out={out}", *more]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A finished evaluation of eight generated questions."""
    out = tmp_path_factory.mktemp("eval") / "run"
    assert main(command(tiny_model, out, "--config.data.questions=8")) == 0
    return out


def test_writes_a_run_folder(run, tiny_model):
    names = {path.name for path in run.iterdir()}
    files = ("config", "versions", "summary")
    assert {f"{name}.json" for name in files} <= names
    assert {"predictions.jsonl", "scores.jsonl", "report.html", "data"} <= names
    assert "predictions.jsonl.partial" not in names
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["accuracy"] <= 1 and summary["mode"] == "strict"
    counts = {"n_expected": 8, "n_predicted": 8, "n_missing": 0, "n_error": 0, "n_refused": 0}
    assert counts.items() <= summary.items() and summary["model"] == str(tiny_model)
    assert summary["visual_tokens"] == 8 * 3 * 20 and summary["questions_per_second"] > 0
    ids = [row["id"] for row in read(run / "data" / "test.jsonl")]
    assert [row["id"] for row in read(run / "predictions.jsonl")] == ids
    assert json.loads((run / "config.json").read_text())["data"]["questions"] == 8
    versions = json.loads((run / "versions.json").read_text())
    assert versions["pixel_budget"]["max_pixels"] == 50176 and versions["command"] == "eval"


def test_b68_a_second_run_asks_nothing(run, tiny_model, monkeypatch, capsys):
    """B68: nothing is appended; another mode scores the same predictions; another method setting is
    refused by name."""
    before = (run / "predictions.jsonl").read_bytes()

    def never(*_, **__):
        raise AssertionError("asked again")

    monkeypatch.setattr(Engine, "_machine", never)
    same = command(tiny_model, run, "--config.data.questions=8")
    assert main(same) == 0
    assert "accuracy" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["n_resumed"] == 8
    assert (run / "predictions.jsonl").read_bytes() == before
    assert main([*same, "--config.method.sampling.max_tokens=32"]) == 1
    assert "method.sampling.max_tokens: 64 -> 32" in capsys.readouterr().err
    assert main([*same, "--config.mode=code"]) == 0
    assert json.loads((run / "summary.json").read_text())["mode"] == "code"


def test_a_run_that_was_cut_short_ends_like_the_whole(run, tiny_model, tmp_path):
    """Three questions first, then all: the same predictions, each once, whatever batch they were in."""
    more = ["--config.data.questions=8", "--config.report=False"]
    assert main(command(tiny_model, tmp_path, *more, "--config.data.limit=3")) == 0
    assert len(read(tmp_path / "predictions.jsonl")) == 3
    assert main(command(tiny_model, tmp_path, *more)) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["n_resumed"] == 3
    for ours, whole in zip(
        *(read(folder / "predictions.jsonl") for folder in (tmp_path, run)), strict=True
    ):
        facts = ("id", "prediction", "finish", "length", "answers")
        assert {k: ours[k] for k in facts} == {k: whole[k] for k in facts}
    assert not (tmp_path / "report.html").exists()


def test_bad_rows_and_pages_are_counted(tiny_model, tmp_path, capsys):
    """A row that is none is named and counted; a page that is cut costs its own question, as wrong."""
    path = write_dataset(tmp_path, 3, "test")
    page = tmp_path / read(path)[1]["images"][2]
    page.write_bytes(page.read_bytes()[:100])
    with path.open("a") as file:
        file.write('{"id": "broken"}\n')
    out = tmp_path / "run"
    assert main(command(tiny_model, out, "--data", str(path))) == 0
    assert "skipped: " in (error := capsys.readouterr().err) and "broken" in error
    summary = json.loads((out / "summary.json").read_text())
    assert summary["n_expected"] == 3 and summary["n_error"] == 1 and summary["n_refused"] == 1
    assert [row["finish"] == "error" for row in read(out / "predictions.jsonl")] == [0, 1, 0]
    rejected = read(out / "rejected.jsonl")
    assert len(rejected) == 1 and "broken" in rejected[0]["reason"]
    assert main(command(tiny_model, out, "--data", str(path))) == 0
    assert read(out / "rejected.jsonl") == rejected


def test_b06_another_pixel_budget_is_warned_of(tiny_model, tmp_path, capsys):
    """B06: pages at another size than the checkpoint's; the run's record holds the one in use."""
    more = ["--config.data.questions=1", "--config.model.budget=sft", "--config.report=False"]
    assert main(command(tiny_model, tmp_path, *more)) == 0
    error = capsys.readouterr().err
    assert "warning: pages had another size in the checkpoint: 784..50176 pixels" in error
    assert "3136..3920000 pixels (4956 tokens for a page of 1654 x 2339) here" in error
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["pixel_budget"]["name"] == "sft"


@pytest.mark.parametrize(("name", "calls"), [("direct", 1), ("ccot_two_call", 2)])
def test_other_methods_by_name(tiny_model, tmp_path, name, calls):
    """--method: what answered stands in every row, with its calls; costs are in the summary."""
    more = [f"--method={name}", "--config.data.questions=2", "--config.report=False"]
    assert main(command(tiny_model, tmp_path, *more)) == 0
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").open()]
    assert [(row["method"], row["calls"]) for row in rows] == [(name, calls)] * 2
    assert all(row["visual_tokens"] == calls * 60 for row in rows)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["cost/calls_median"] == calls and summary["cost/latency_decode_median"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "eval needs --out RUN"),
        (["--out=x", "file.jsonl"], "positional arguments, got file.jsonl"),
        (["--out=x", "--config.modle.path=y"], "did you mean 'mode'"),
        (["--out=x", "--config.mode=fuzzy"], "unknown scoring mode 'fuzzy'"),
        (["--out=x", "--config.method.name=cot"], "method.name='cot'; one of evidence_cot"),
        (["--out=x", "--config.data.questions=0"], "data.questions=0 must be at least 1"),
        (["--out=x", "--config.method.sampling.max_tokens=65"], "max_tokens=65 is more than"),
        (["--out=x", "--data=no.jsonl"], "data.path: "),
        (["--out=x", "--config=eval.py:5b"], "eval.py:5b is unknown; mini"),
    ],
)
def test_wrong_usage_is_one_line(refused, argv, message):
    refused(["eval", *argv], message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model=nowhere"], "model.path: nowhere: no such model folder"),
        (["--model="], "model.path: a model folder is needed"),
        (["--config.model.budget=huge"], "model.budget: unknown pixel budget 'huge'"),
        (["--config.method.template=none.txt"], "method: template 'none.txt': no such file"),
    ],
)
def test_wrong_settings_leave_the_folder_free(tiny_model, tmp_path, capsys, argv, message):
    """Named before anything is answered; the same folder takes the corrected command."""
    data = write_dataset(tmp_path, 1, "test")
    first = ["eval", "--model", str(tiny_model), "--data", str(data), f"--out={tmp_path / 'x'}"]
    assert main([*first, *argv]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "x").iterdir())


def test_help_names_flags_and_fields(capsys):
    assert main(["eval", "--help"]) == 0
    text = capsys.readouterr().out
    for part in ("usage: evisrag eval", "--data", "--model", "--config.method.template='mini'"):
        assert part in text
