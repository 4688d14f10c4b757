"""``evisrag report RUN``: one self-contained HTML page from a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evisrag_jax.cli.config import ConfigError, parse

SUMMARY = "write RUN/report.html: curves, timeline, rollouts and predictions of a run"


def run(argv: Sequence[str]) -> int:
    """Writes the report of every folder and prints where it is."""
    parsed = parse(argv, command="report", summary=SUMMARY, usage="RUN [RUN ...]")
    if not parsed.args:
        raise ConfigError("report needs the folder of a run: evisrag report RUN")
    for name in parsed.args:
        if not Path(name).is_dir():
            raise ConfigError(f"{name}: no such run folder")
    from evisrag_jax.reporting.page import write_report

    for name in parsed.args:
        print(write_report(name))
    return 0
