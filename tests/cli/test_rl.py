"""``evisrag rl`` from the command line: a run with validation, its files, and what it refuses."""

import json

import pytest

from evisrag_jax.cli.main import main
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.training.pretrained import load_pretrained
from tests.rl.tiny import few_devices  # noqa: F401  (a fixture)


def test_trains_validates_and_goes_on_with_the_same_command(tiny_model, tmp_path, capsys):
    """Two steps of the mini config; the same command again finds the run finished; another seed is
    refused. A random model earns nothing, so its parameters stay (B52)."""
    data = write_dataset(tmp_path, 8, "train")
    held_out = write_dataset(tmp_path, 3, "test")
    run = tmp_path / "run"
    command = ["rl", "--config=configs/rl.py:mini", "--data", str(data), "--model", str(tiny_model)]
    fields = {"steps": 2, "rl.prompts": 4, "rl.group": 2, "rl.max_tokens": 16, "tensorboard": False}
    fields |= {"eval_every": 2, "eval_limit": 2, "data.validation": held_out, "data.threads": 1}
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    command.append(f"--out={run}")
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "reward_last" in out and str(run / "report.html") in out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["mode"] == "paper" and "eval/accuracy" in summary
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    names = {"reward/perception", "reward/derivation", "reward/format", "scope/found_answer"}
    assert all(names <= row.keys() for row in rows if "loss/total" in row)
    assert [path.name for path in sorted((run / "rollouts").iterdir())] == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    assert load_pretrained(run / "model").config == load_pretrained(tiny_model).config
    versions = json.loads((run / "versions.json").read_text())
    assert "rl.py:mini" in versions["config_source"] and versions["overrides"]["rl.group"] == 2
    before = (run / "metrics.jsonl").read_text()
    assert main(command) == 0
    assert (run / "metrics.jsonl").read_text() == before
    again = json.loads((run / "summary.json").read_text())
    assert {**again, "compiles": 0} == {**summary, "compiles": 0}
    assert main([*command, "--config.seed=5"]) == 1
    assert "seed: 0 -> 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out=x"], "--data FILE"),
        (["--data=d.jsonl"], "--out RUN"),
        (["--data=d.jsonl", "--out=x", "extra"], "positional arguments, got extra"),
        (["--data=d.jsonl", "--out=x", "--config=rl.py:paper"], "--model FOLDER"),
        (["--data=d.jsonl", "--out=x", "--config.rl.gruop=3"], "did you mean 'group'"),
        (["--data=d.jsonl", "--out=x", "--config.rl.group=1"], "group=1 at least 2"),
        (["--data=d.jsonl", "--out=x", "--config.rl.top_p=0.9"], "top_p=0.9: a filtered sampler"),
        (["--data=d.jsonl", "--out=x", "--config.eval_every=5"], "needs data.validation"),
    ],
)
def test_wrong_usage_is_one_line(refused, argv, message):
    refused(["rl", *argv], message)


def test_help_names_flags_and_fields(capsys):
    assert main(["rl", "--help"]) == 0
    text = capsys.readouterr().out
    for part in ("usage: evisrag rl", "--data", "--progress", "--config.rl.estimator='paper'"):
        assert part in text
