"""Command lines with configs: ``evisrag COMMAND --config=FILE.py:arg --config.field=value``.

A config file has ``get_config(arg)`` and returns an ml_collections ConfigDict. FILE is a path first,
else the name of a config that the package carries (``configs/eval.py``, ``eval.py`` or ``eval``).
``--model PATH`` is short for ``--config.model.path=PATH``. :mod:`evisrag_jax.cli.fields` turns the
result into frozen dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from ml_collections import ConfigDict, config_flags

import evisrag_jax
from evisrag_jax.cli.fields import ConfigError, to_dataclass
from evisrag_jax.runtime.json_files import plain

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")

__all__ = [
    "ConfigError",
    "HelpRequested",
    "Parsed",
    "find_config",
    "load_config",
    "packaged_configs",
    "packaged_folders",
    "parse",
    "to_dataclass",
]


class HelpRequested(Exception):
    """``--help`` was given; the text is the message."""


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A command's arguments.

    config: the ConfigDict with all overrides; None for a command without one.
    source: the config file and its argument, as resolved ("/path/eval.py:mini"); "" without.
    overrides: fields set on the command line, dotted names.
    args: positional arguments.
    flags: the command's own flags, by attribute.
    """

    command: str
    config: ConfigDict | None
    source: str
    overrides: Mapping[str, Any]
    args: tuple[str, ...]
    flags: absl_flags.FlagValues

    @property
    def out(self) -> Path | None:
        """The folder named by ``--out``."""
        return None if self.flags.out is None else Path(self.flags.out)

    def resolved(self) -> dict[str, Any]:
        """The whole config as plain values, for config.json."""
        return plain(self.config or {})

    def facts(self) -> dict[str, Any]:
        """Where the config came from, for versions.json."""
        return {
            "command": self.command,
            "config_source": self.source,
            "overrides": plain(self.overrides),
        }


# Config files.


def packaged_folders() -> list[Path]:
    """Folders of packaged configs: inside the wheel, or the repository's own configs/."""
    package = Path(evisrag_jax.__file__).parent
    folders = [package / "_configs"]
    if (package.parent / "pyproject.toml").is_file():
        folders.append(package.parent / "configs")
    return [folder for folder in folders if folder.is_dir()]


def packaged_configs() -> dict[str, Path]:
    """File name -> path of every packaged config."""
    found: dict[str, Path] = {}
    for folder in packaged_folders():
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                found.setdefault(path.name, path)
    return found


def find_config(name: str) -> Path:
    """The file that a config's name stands for: a path first, else a packaged config.

    Raises ConfigError with the nearest packaged names when there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path.absolute()
    known = packaged_configs()
    short = path.name if path.suffix == ".py" else f"{path.name}.py"
    if path.parent in (Path(), Path("configs")) and short in known:
        return known[short]
    near = difflib.get_close_matches(short, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"packaged: {', '.join(known) or 'none'}"
    raise ConfigError(f"no config file {name!r}; {hint}")


def load_config(spec: str) -> tuple[ConfigDict, str]:
    """Load ``FILE.py`` or ``FILE.py:arg``; returns the locked config and its resolved source.

    A ValueError that ``get_config`` raises (say, for an argument that it does not know) becomes a
    ConfigError that names the file.
    """
    name, colon, arg = spec.partition(":")
    path = find_config(name)
    found = importlib.util.spec_from_file_location(f"evisrag_config_{path.stem}", path)
    if found is None or found.loader is None:
        raise ConfigError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"{path}: has no get_config(arg)")
    arguments = [arg] if colon else []
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{path}: get_config does not fit {spec!r} ({error})") from error
    try:
        config = get_config(*arguments)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"{path}: get_config returned {type(config).__name__}, not a ConfigDict")
    return config.lock(), f"{path}{colon}{arg}"


# Command lines.


def _take_flag(argv: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """Remove ``--name=value`` or ``--name value`` before any ``--``; the last one counts."""
    rest: list[str] = []
    value: str | None = None
    pending = list(argv)
    while pending:
        word = pending.pop(0)
        if word == "--":
            rest += [word, *pending]
            break
        if word in (f"--{name}", f"-{name}"):
            if not pending:
                raise ConfigError(f"--{name} needs a value")
            value = pending.pop(0)
        elif word.startswith((f"--{name}=", f"-{name}=")):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return rest, value


def _check_overrides(argv: Sequence[str], config: ConfigDict) -> None:
    """Refuse ``--config.x.y`` that the config does not have, with the nearest name."""
    for word in argv:
        if word == "--":
            return
        match = _OVERRIDE.match(word)
        if match is None:
            continue
        node: Any = config
        for depth, name in enumerate(parts := match[1].split(".")):
            above = ".".join(["config", *parts[:depth]])
            if not isinstance(node, ConfigDict):
                raise ConfigError(f"{above}.{name}: {above} has no fields")
            if name not in node:
                near = difflib.get_close_matches(name, node.keys(), n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"fields: {', '.join(node)}"
                raise ConfigError(f"{above}.{name}: unknown field; {hint}")
            node = node[name]


def _wants_help(argv: Sequence[str]) -> bool:
    own = argv[: argv.index("--")] if "--" in argv else argv
    return any(word in ("--help", "-h", "-help") for word in own)


def parse(
    argv: Sequence[str],
    *,
    command: str,
    summary: str,
    usage: str = "",
    default_config: str | None = None,
    define: Callable[[absl_flags.FlagValues], None] | None = None,
) -> Parsed:
    """Parse a command's arguments.

    Args:
        argv: the arguments after the command's name.
        command, summary, usage: for the help text; ``usage`` shows the positional arguments.
        default_config: the config taken without ``--config``; None: the command has no config.
        define: adds the command's own flags, e.g.
            ``lambda fv: flags.DEFINE_bool("resume", False, "go on with the run", flag_values=fv)``.
            ``--out`` is there already.
    Raises:
        ConfigError: an unknown flag or field (with the nearest name), or a value of a wrong type.
        HelpRequested: ``--help``; lists flags and the fields of the config with their values.
    """
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("out", None, "folder of the run: where results go", flag_values=values)
    if define is not None:
        define(values)
    words = list(argv)
    config: ConfigDict | None = None
    source = ""
    if default_config is not None:
        words, spec = _take_flag(words, "config")
        words, model = _take_flag(words, "model")
        if model is not None:
            words.insert(0, f"--config.model.path={model}")
        config, source = load_config(spec or default_config)
    if _wants_help(words):
        raise HelpRequested(_help(command, summary, usage, values, config, source))
    overrides: Mapping[str, Any] = {}
    if config is not None:
        _check_overrides(words, config)
    try:
        if config is not None:
            config_flags.DEFINE_config_dict(
                "config", config, flag_values=values, sys_argv=["evisrag", *words]
            )
        args = values(["evisrag", *words])[1:]
        if config is not None:
            overrides = dict(values["config"].override_values)
    except absl_flags.Error as error:
        raise ConfigError(_one_line(error)) from error
    except (TypeError, ValueError) as error:
        # config_flags reports some values of a wrong type like this.
        raise ConfigError(f"--config: {_one_line(error)}") from error
    return Parsed(command, config, source, overrides, tuple(args), values)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _help(
    command: str,
    summary: str,
    usage: str,
    values: absl_flags.FlagValues,
    config: ConfigDict | None,
    source: str,
) -> str:
    takes_config = (
        " [--config=FILE.py:arg] [--config.field=value ...]" if config is not None else ""
    )
    lines = [summary, "", f"usage: evisrag {command}{takes_config} {usage}".rstrip(), "", "flags:"]
    if config is not None:
        lines += [
            "  --config  the experiment: a path, else a packaged config "
            f"({', '.join(packaged_configs()) or 'none'})",
            "  --model  short for --config.model.path",
        ]
    for name in sorted(values):
        lines.append(f"  --{name}  {values[name].help}")
    if config is not None:
        lines += ["", f"config ({source}):"]
        lines += [f"  --config.{name}={value!r}" for name, value in _flat(config)]
    return "\n".join(lines)


def _flat(config: ConfigDict, prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            out += _flat(value, f"{prefix}{name}.")
        else:
            out.append((f"{prefix}{name}", value))
    return out
