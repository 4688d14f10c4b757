"""A tiny model folder, the command line in this process, and one-line errors."""

import pytest

from evisrag_jax.cli.main import main


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Qwen2.5-VL with the mini tokenizer, of a few thousand parameters."""
    from tests.rl.tiny import write_model

    return write_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """(argv, message, status): the command ends with this status and message on one line, and leaves
    nothing behind."""
    monkeypatch.chdir(tmp_path)

    def check(argv, message, status=2):
        assert main(argv) == status
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not (tmp_path / "x").exists() or not any((tmp_path / "x").iterdir())

    return check
