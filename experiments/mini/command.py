"""What the programs of this experiment share: their arguments, and running `evisrag` commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from evisrag_jax.cli import main as cli


def arguments(program: str, doc: str, **options: dict) -> argparse.Namespace:
    """The command line of a program with `--out` and further options, by name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def run(*argv: object) -> None:
    """One `evisrag` command; ends the program if it fails."""
    if code := cli.main([str(word) for word in argv]):
        raise SystemExit(code)
