"""``evisrag quickstart`` on a tiny random model in place of the bundled one."""

import json
import shutil
from pathlib import Path

import pytest

from evisrag_jax.cli.main import main
from evisrag_jax.training import pretrained
from tests.rl.tiny import few_devices  # noqa: F401  (a fixture)

KEYS = (
    *("accuracy_before", "accuracy_after", "format_after", "evidence_after"),
    *("steps", "seconds", "compiles"),
)


@pytest.fixture
def bundled(monkeypatch, tiny_model):
    """The tiny model as "mini-sft"."""
    find = pretrained.find_model
    monkeypatch.setattr(
        pretrained, "find_model", lambda path: find(tiny_model if path == "mini-sft" else path)
    )


def test_the_whole_loop(bundled, tmp_path, capsys):
    """Two steps, eight questions: summary, table, report; finished it is not run over; stopped between
    training and the second evaluation it goes on and ends with the same numbers."""
    out = tmp_path / "quick"
    command = ["quickstart", f"--out={out}", "--steps=2", "--questions=8", "--noopen"]
    assert main(command) == 0
    text = capsys.readouterr().out
    for part in ("1/4", "4/4", "held-out questions", "accuracy gain", str(out / "report.html")):
        assert part in text
    summary = json.loads((out / "summary.json").read_text())
    assert set(KEYS) <= summary.keys() and summary["steps"] == 2 and summary["compiles"] > 0
    assert summary["eval_before"]["n_expected"] == summary["eval_after"]["n_expected"] == 8
    assert summary["accuracy_after"] == summary["eval_after"]["accuracy"]
    gain = summary["gain"]
    assert gain["low"] <= gain["mean"] <= gain["high"]
    assert gain["mean"] == pytest.approx(summary["accuracy_after"] - summary["accuracy_before"])
    assert len((out / "predictions.jsonl").read_text().splitlines()) == 8
    assert len((out / "data" / "train.jsonl").read_text().splitlines()) == 2 * 16
    assert {p.name for p in (out / "rollouts").iterdir()} == {
        "step_000001.jsonl",
        "step_000002.jsonl",
    }
    assert (out / "model" / "model.safetensors").is_file()

    assert main(command) == 2
    assert "holds a finished quickstart" in capsys.readouterr().err
    shutil.rmtree(out / "after")
    (out / "summary.json").write_text(json.dumps({"command": "rl"}))
    metrics = (out / "metrics.jsonl").read_bytes()
    assert main(command) == 0
    again = json.loads((out / "summary.json").read_text())
    assert (out / "metrics.jsonl").read_bytes() == metrics
    assert all(again[key] == summary[key] for key in KEYS if key not in ("seconds", "compiles"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps=0"], "--questions and --steps must be at least 1"),
        (["--questions=0"], "--questions and --steps must be at least 1"),
        (["pages"], "positional arguments, got pages"),
        (["--stepz=3"], "stepz"),
    ],
)
def test_wrong_usage_is_one_line(refused, argv, message):
    refused(["quickstart", "--out=x", *argv], message)


def test_help(capsys):
    assert main(["quickstart", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--seed", "--steps", "--questions", "--open", "--out"))


def test_without_out_it_stays_in_this_folder(monkeypatch, tmp_path):
    """The default folder lies where the command was given."""
    from evisrag_jax.cli import quickstart

    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        quickstart, "quickstart", lambda out, **settings: seen.append((out, settings)) or {}
    )
    monkeypatch.setattr(quickstart, "_table", lambda summary: None)
    assert main(["quickstart", "--seed=3", "--noopen"]) == 0
    out, settings = seen[0]
    assert out == Path("evisrag-quickstart")
    assert (settings["seed"], settings["steps"], settings["questions"]) == (3, 60, 200)
