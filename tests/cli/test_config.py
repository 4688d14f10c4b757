"""Command lines, config files, dataclasses, and the dispatcher."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from absl import flags
from ml_collections import ConfigDict

from evisrag_jax.cli import config as c
from evisrag_jax.cli import main as m

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg="full"):
    if arg not in ("full", "mini"):
        raise ValueError(f"unknown argument {arg!r}: full or mini")
    return ConfigDict({
        "model": {"path": "", "depth": 2},
        "lr": 1e-3, "steps": 10 if arg == "full" else 1, "verbose": False, "sizes": (1, 2),
    })
"""


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A folder of packaged configs with exp.py, and another folder to stand in."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "exp.py").write_text(CONFIG)
    (folder / "_shared.py").write_text("")
    monkeypatch.setattr(c, "packaged_folders", lambda: [folder])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def parse(*argv, **settings):
    settings = {"command": "sft", "summary": "Train.", "default_config": "exp.py"} | settings
    return c.parse(argv, **settings)


@pytest.mark.parametrize("name", ["exp", "exp.py", "configs/exp.py"])
def test_packaged_config_from_any_folder(packaged, name):
    parsed = parse(f"--config={name}:mini", "--config.lr=0.5", "--config.model.depth", "4")
    assert (parsed.config.steps, parsed.config.lr, parsed.config.model.depth) == (1, 0.5, 4)
    assert parsed.source == f"{packaged / 'exp.py'}:mini"
    assert parsed.overrides == {"lr": 0.5, "model.depth": 4}
    assert parsed.resolved()["model"] == {"path": "", "depth": 4}
    assert parsed.facts()["command"] == "sft"


def test_a_path_wins_over_the_packaged_config(packaged):
    Path("configs").mkdir()
    Path("configs/exp.py").write_text(CONFIG.replace("1e-3", "7.0"))
    assert parse("--config=configs/exp.py").config.lr == 7.0
    assert parse("--config=exp.py").config.lr == 1e-3


def test_flags_arguments_and_the_short_form_for_the_model(packaged):
    def define(values):
        flags.DEFINE_bool("resume", False, "go on", flag_values=values)

    parsed = parse(
        *("page.png", "--model", "a/b", "--out", "run", "--resume", "what is it?"), define=define
    )
    assert parsed.config.model.path == "a/b" and parsed.out == Path("run")
    assert parsed.flags.resume and parsed.args == ("page.png", "what is it?")
    assert parse().out is None and parse().source == str(packaged / "exp.py")
    assert parse("--", "--model").args == ("--model",)
    parsed = parse("--config.verbose", "--config.sizes=(3, 4, 5)")
    assert parsed.config.verbose is True and parsed.config.sizes == (3, 4, 5)
    assert c.parse(["f.jsonl"], command="validate", summary="").args == ("f.jsonl",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config=expp.py"], r"no config file 'expp\.py'; did you mean 'exp\.py'\?"),
        (["--config=/a/exp.py"], r"no config file '/a/exp\.py'"),
        (["--config=exp:nimi"], r"exp\.py: unknown argument 'nimi': full or mini"),
        (["--config.lrr=1"], r"config\.lrr: unknown field; did you mean 'lr'\?"),
        (["--config.model.pth=x"], r"config\.model\.pth: unknown field; did you mean 'path'\?"),
        (["--noconfig.qqq"], r"config\.qqq: unknown field; fields: lr, model"),
        (["--config.lr.x=1"], r"config\.lr\.x: config\.lr has no fields"),
        (["--config.steps=many"], r"steps.*many"),
        (["--outt=x"], r"outt"),
        (["--out"], r"out"),
        (["--config"], r"--config needs a value"),
    ],
)
def test_wrong_command_lines_are_named_in_one_line(packaged, argv, message):
    with pytest.raises(c.ConfigError, match=message) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"has no get_config"),
        ("def get_config(): return None", r"does not fit 'bad\.py:a'"),
        ("def get_config(arg): return 3", r"returned int, not a ConfigDict"),
    ],
)
def test_wrong_config_files_are_named(packaged, text, message):
    Path("bad.py").write_text(text)
    with pytest.raises(c.ConfigError, match=rf"bad\.py: .*{message}|bad\.py: get_config {message}"):
        parse("--config=bad.py:a")


def test_help_lists_flags_and_fields(packaged):
    with pytest.raises(c.HelpRequested) as caught:
        parse("--config=exp:mini", "--help", usage="PAGES...")
    text = str(caught.value)
    for part in ("evisrag sft", "PAGES...", "--out", "--config.model.depth=2", "--config.steps=1"):
        assert part in text


@dataclasses.dataclass(frozen=True)
class Model:
    path: str
    depth: int = 2


@dataclasses.dataclass(frozen=True)
class Run:
    model: Model
    lr: float = 0.1
    mode: Literal["paper", "code"] = "code"
    sizes: tuple[int, ...] = (1,)
    pair: tuple[str, float] | None = None
    out: Path | None = None
    names: dict[str, float] = dataclasses.field(default_factory=dict)
    verbose: bool = False

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr {self.lr} must be positive")


def test_to_dataclass_converts_nested_values():
    given = ConfigDict(
        {
            "model": {"path": "p"},
            "lr": 1,
            "sizes": [3, 4],
            "pair": ("a", 2),
            "out": "x",
            "names": {"n": 1},
        }
    )
    run = c.to_dataclass(given, Run)
    assert run == Run(Model("p", 2), 1.0, "code", (3, 4), ("a", 2.0), Path("x"), {"n": 1.0}, False)
    assert type(run.lr) is float
    assert c.to_dataclass({"model": Model("q")}, Run) == Run(Model("q"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vebose": 1}, r"config\.vebose: unknown field of Run; did you mean 'verbose'\?"),
        ({"zzz": 1}, r"config\.zzz: unknown field of Run; fields: model, lr"),
        ({"model": {"path": "p", "depht": 1}}, r"config\.model\.depht: .*Model.*'depth'"),
        ({"model": {}}, r"config\.model\.path: is missing; Model needs it"),
        ({"model": 3}, r"config\.model: 3 is not Model"),
        ({"model": {"path": "p", "depth": True}}, r"config\.model\.depth: True is not int"),
        ({"model": {"path": "p", "depth": 2.0}}, r"config\.model\.depth: 2\.0 is not int"),
        ({"lr": "0.1"}, r"config\.lr: '0\.1' is not float"),
        ({"lr": True}, r"config\.lr: True is not float"),
        ({"lr": -1.0}, r"config: lr -1\.0 must be positive"),
        ({"mode": "papre"}, r"config\.mode: 'papre' is none of 'paper', 'code'"),
        ({"sizes": (1, "2")}, r"config\.sizes\[1\]: '2' is not int"),
        ({"sizes": 3}, r"config\.sizes: 3 is not"),
        ({"pair": ("a",)}, r"config\.pair: \('a',\) needs 2 values"),
        ({"verbose": 1}, r"config\.verbose: 1 is not bool"),
    ],
)
def test_to_dataclass_refuses_by_name(change, message):
    with pytest.raises(c.ConfigError, match=message):
        c.to_dataclass({"model": {"path": "p"}, **change}, Run)


# The dispatcher.


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Adds a module to the commands: command(name, text)."""
    import evisrag_jax.cli as package

    monkeypatch.setattr(m, "_FOLDER", tmp_path)
    monkeypatch.setattr(package, "__path__", [str(tmp_path), *package.__path__])

    def add(name, body, summary="Does it."):
        (tmp_path / f"{name}.py").write_text(
            f"import sys\nfrom evisrag_jax.cli.config import ConfigError, HelpRequested\n"
            f"SUMMARY: str = {summary!r}\n\ndef run(argv):\n    {body}\n"
        )
        monkeypatch.delitem(sys.modules, f"evisrag_jax.cli.{name}", raising=False)

    yield add
    for name in list(sys.modules):
        path = getattr(sys.modules[name], "__file__", None)
        if name.startswith("evisrag_jax.cli.") and path and path.startswith(str(tmp_path)):
            del sys.modules[name]


def test_help_lists_commands_in_order(command, capsys):
    for name in ("zeta", "rl", "ask", "eval"):
        command(name, "return 0", summary=f"Does {name}.")
    assert list(m.commands()) == ["ask", "eval", "rl", "zeta"]
    assert m.main(["--help"]) == 0
    assert "  ask   Does ask." in capsys.readouterr().out.splitlines()
    assert m.main([]) == 2


def test_run_gets_the_arguments_and_gives_the_status(command, capsys):
    command("one", "print(argv); return 3")
    assert m.main(["one", "--a", "b"]) == 3
    assert capsys.readouterr().out == "['--a', 'b']\n"
    command("two", "raise HelpRequested('the help')")
    assert m.main(["two", "--help"]) == 0
    assert capsys.readouterr().out == "the help\n"


def test_unknown_commands_get_the_nearest(command, capsys):
    command("quickstart", "return 0")
    assert m.main(["quikstart"]) == 2
    assert capsys.readouterr().err == (
        "evisrag: error: no command 'quikstart'; did you mean 'quickstart'?\n"
    )
    assert m.main(["--xyzzy"]) == 2
    assert "commands: quickstart" in capsys.readouterr().err


def test_our_errors_are_one_line_and_bugs_are_not_hidden(command, capsys, monkeypatch):
    command("wrong", "raise ConfigError('config.x: is bad')")
    assert m.main(["wrong"]) == 2
    assert capsys.readouterr().err == "evisrag wrong: error: config.x: is bad\n"
    command("lost", "open('/no/such/file')")
    assert m.main(["lost"]) == 1
    assert capsys.readouterr().err == (
        "evisrag lost: error: /no/such/file: No such file or directory\n"
    )
    command("ours", "from evisrag_jax.runtime.mesh import MeshError; raise MeshError('no')")
    assert m.main(["ours"]) == 1
    command("stop", "raise KeyboardInterrupt")
    assert m.main(["stop"]) == 130
    command("bug", "raise ValueError('bug')")
    with pytest.raises(ValueError, match="bug"):
        m.main(["bug"])
    monkeypatch.setenv(m.DEBUG, "1")
    capsys.readouterr()
    m.main(["wrong"])
    assert "Traceback" in capsys.readouterr().err


def test_help_does_not_import_jax_and_works_as_a_module():
    code = (
        "import sys; from evisrag_jax.cli.main import main; rc = main(['--help'])\n"
        "heavy = [name for name in ('jax', 'torch', 'transformers', 'orbax') if name in sys.modules]\n"
        "assert not heavy, heavy; sys.exit(rc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: evisrag COMMAND" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "evisrag_jax.cli.main", "--version"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.stdout.startswith("evisrag ") and done.returncode == 0


def test_every_command_has_a_summary_and_run():
    """Every module with a SUMMARY is a command: it also has run(argv), seen without importing it."""
    for name, summary in m.commands().items():
        source = (Path(m.__file__).parent / f"{name}.py").read_text()
        assert summary and "\n" not in summary and "def run(" in source, name


def test_resolved_config_goes_to_the_run_folder(packaged, tmp_path):
    from evisrag_jax.runtime.run_folder import RunFolder

    parsed = parse("--config.lr=0.5", f"--out={tmp_path / 'run'}")
    run = RunFolder(parsed.out)
    run.start(parsed.resolved(), **parsed.facts())
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lr"] == 0.5
    facts = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert facts["overrides"] == {"lr": 0.5} and facts["config_source"].endswith("exp.py")
