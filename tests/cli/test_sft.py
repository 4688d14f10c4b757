"""``evisrag sft`` from the command line: a run, its files, and what it refuses."""

import json

import pytest

pytest.importorskip("torch", reason="the tiny model is made by transformers (extra: test)")

from evisrag_jax.cli.main import main
from evisrag_jax.data.miniworld.files import write_dataset
from tests.sft.tiny import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


def test_trains_and_goes_on_with_the_same_command(model, tmp_path, capsys):
    """Two steps; the same command again finds the run finished; another seed is refused."""
    data = write_dataset(tmp_path, 8, "train")
    command = ["sft", "--config=configs/sft.py:mini", "--data", str(data), "--model", str(model)]
    command += [f"--out={tmp_path / 'run'}", "--config.steps=2", "--config.tensorboard=False"]
    assert main(command) == 0
    assert "loss_last" in capsys.readouterr().out
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["loss_last"] > 0 and summary["skipped"] == 0
    assert json.loads((run / "config.json").read_text())["data"]["path"] == str(data)
    assert "sft.py:mini" in json.loads((run / "versions.json").read_text())["config_source"]
    assert (run / "model" / "model.safetensors").is_file()
    before = (run / "metrics.jsonl").read_text()
    assert main(command) == 0
    assert (run / "metrics.jsonl").read_text() == before
    assert main([*command, "--config.seed=5"]) == 1
    assert "seed: 0 -> 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out=x"], "--data FILE"),
        (["--data=d.jsonl"], "--out RUN"),
        (["--data=d.jsonl", "--out=x", "extra"], "positional arguments, got extra"),
        (["--data=d.jsonl", "--out=x", "--config=sft.py:7b"], "--model FOLDER"),
        (["--data=d.jsonl", "--out=x", "--config.stepz=3"], "did you mean 'steps'"),
        (["--data=d.jsonl", "--out=x", "--config.optim.schedule=linear"], "optim.schedule"),
    ],
)
def test_wrong_usage_is_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sft", *argv]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
