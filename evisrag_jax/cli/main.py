"""``evisrag COMMAND ...``: finds the command's module, runs it, and turns its errors into one line.

A command is a module of this folder with a literal ``SUMMARY: str`` and ``run(argv) -> int``. It is
imported only when it is called, so that help is instant; summaries are read from the source text.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import evisrag_jax
from evisrag_jax.cli.config import HelpRequested

# The order of the help text; commands that are not named here follow by name.
ORDER = (
    "ask",
    "eval",
    "judge",
    "probe",
    "construct",
    "sft",
    "rl",
    "quickstart",
    "validate",
    "report",
    "convert",
    "doctor",
)
DEBUG = "EVISRAG_DEBUG"
_FOLDER = Path(__file__).parent


def _summary(path: Path) -> str | None:
    """The value of SUMMARY in a module's source; None when it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == "SUMMARY" for target in targets):
            return str(ast.literal_eval(node.value))
    return None


def commands() -> dict[str, str]:
    """Name -> summary of every command, in the order of the help text."""
    found = {path.stem: _summary(path) for path in sorted(_FOLDER.glob("*.py"))}
    named = {name: summary for name, summary in found.items() if summary is not None}
    return {name: named[name] for name in sorted(named, key=_place)}


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def help_text() -> str:
    """What ``evisrag --help`` prints."""
    known = commands()
    width = max(map(len, known), default=0)
    lines = [f"  {name.ljust(width)}  {summary}" for name, summary in known.items()]
    return "\n".join(
        [
            f"evisrag {evisrag_jax.__version__}: answers from page images, evidence first",
            "",
            "usage: evisrag COMMAND [arguments]",
            "       evisrag COMMAND --help",
            "",
            "commands:",
            *lines,
        ]
    )


def _fail(command: str, message: object, code: int) -> int:
    name = f"evisrag {command}".rstrip()
    print(f"{name}: error: {message}", file=sys.stderr)
    return code


def _is_ours(error: BaseException) -> bool:
    return any(kind.__module__.partition(".")[0] == "evisrag_jax" for kind in type(error).__mro__)


def _run(name: str, argv: list[str]) -> int:
    try:
        module = importlib.import_module(f"evisrag_jax.cli.{name}")
        return int(module.run(argv) or 0)
    except HelpRequested as request:
        print(request)
        return 0
    except BrokenPipeError:
        # The reader has gone (evisrag ... | head): say nothing, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(name, "interrupted", 130)
    except Exception as error:
        about_a_file = isinstance(error, OSError) and error.filename is not None
        if not (_is_ours(error) or about_a_file):
            raise
        if os.environ.get(DEBUG):
            traceback.print_exc()
        message = f"{error.filename}: {error.strerror}" if about_a_file else str(error)
        # What it happened to, such as the record that a worker was preparing; libraries add notes too.
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("while ")]
        message += "".join(f" ({note})" for note in notes)
        code = getattr(error, "exit_code", 1)
        if code == 0:  # a run that was asked to stop
            print(f"evisrag {name}: {message}")
            return 0
        return _fail(name, message, code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 fine, 1 failed, 2 wrong usage).

    Errors of this package, and errors about files, are printed as one message; EVISRAG_DEBUG=1 adds
    the traceback. Anything else is a bug and shows its traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"evisrag {evisrag_jax.__version__}")
        return 0
    name = argv[0]
    known = list(commands())
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(known)}"
        return _fail("", f"no command {name!r}; {hint}", 2)
    code = _run(name, argv[1:])
    if several := sys.modules.get("evisrag_jax.runtime.processes"):
        several.leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
