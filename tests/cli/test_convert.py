"""`evisrag convert`: checkpoints of a run become the folders that the run itself exports; folders are checked."""

import json
import shutil

import numpy as np
import pytest

from evisrag_jax.cli.main import main
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.rl.run import train
from evisrag_jax.training.state import flatten
from tests.rl.tiny import few_devices, run_config, write_model  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Two steps of adapters on a frozen base, both saved."""
    data = write_dataset(tmp_path_factory.mktemp("data"), 6, "train")
    out = tmp_path_factory.mktemp("run")
    lora = LoraConfig(rank=2, alpha=64.0)
    train(run_config(model, data, steps=2, save_every=1, lora=lora), out)
    return out


def params(folder):
    return flatten(load_params(folder)[0])


def test_a_checkpoint_becomes_what_the_run_exported(run, tmp_path, capsys):
    """The last step bitwise, adapters merged and beside it; another step is another model."""
    assert main(["convert", "export", str(run), "--out", str(tmp_path / "last")]) == 0
    assert f"step 2 of {run}" in capsys.readouterr().out
    files = {path.name for path in (run / "model").iterdir()}
    assert {path.name for path in (tmp_path / "last").iterdir()} == files
    for name in files:
        assert (tmp_path / "last" / name).read_bytes() == (run / "model" / name).read_bytes(), name
    name = "adapter_model.safetensors"
    assert (tmp_path / "last-adapter" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    assert main(["convert", "export", str(run), "--step=1", "--out", str(tmp_path / "first")]) == 0
    first, last = params(tmp_path / "first"), params(tmp_path / "last")
    moved = [path for path in last if not np.array_equal(first[path], last[path])]
    assert moved and all(path.startswith("text/layers/") for path in moved)


def test_the_format_and_the_place_of_the_start_can_be_given(run, model, tmp_path):
    moved = shutil.copytree(model, tmp_path / "moved")
    copy = shutil.copytree(run, tmp_path / "run")
    config = json.loads((copy / "config.json").read_text())
    config["model"]["path"] = "/nowhere/model"
    (copy / "config.json").write_text(json.dumps(config))
    out = str(tmp_path / "out")
    assert main(["convert", "export", str(copy), "--out", out]) == 1
    command = ["convert", "export", str(copy), "--out", out, "--model", str(moved)]
    assert main([*command, "--dtype=bfloat16"]) == 0
    want = params(run / "model")
    for path, value in params(tmp_path / "out").items():
        np.testing.assert_allclose(value, want[path], rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["export", "RUN"], 2, "needs --out"),
        (["export", "RUN", "--out=OUT", "--step=9"], 1, "no complete step 9; there are [1, 2]"),
        (["export", "RUN", "--out=OUT", "--best"], 1, "no checkpoint has a validation"),
        (["export", "RUN", "--out=OUT", "--best", "--step=1"], 2, "not both"),
        (["export", "none", "--out=OUT"], 1, "none: no such run folder"),
        (["export", "RUN", "--out=RUN/checkpoints"], 2, "is not empty and holds no model"),
        (["export", "RUN", "--out=OUT", "--dtype=float16"], 1, "--dtype: float16 is refused"),
        (["nothing"], 2, "convert takes"),
        (["check", "none"], 1, "no such model folder"),
    ],
)
def test_wrong_uses_are_named(run, tmp_path, capsys, argv, code, words):
    argv = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in argv]
    assert main(["convert", *argv]) == code
    assert words in capsys.readouterr().err


def test_a_folder_is_checked_by_its_headers(model, tmp_path, capsys):
    assert main(["convert", "check", str(model)]) == 0
    out = capsys.readouterr().out
    assert "2 layers, width 32, heads 4/2" in out and "whole:" in out
    broken = shutil.copytree(model, tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert main(["convert", "check", str(broken)]) == 1
    assert f"{file}: not a readable safetensors file" in capsys.readouterr().err
