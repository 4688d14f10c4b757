"""``evisrag report RUN``: one self-contained HTML page from a run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from evisrag_jax.cli.config import ConfigError, parse

SUMMARY = "write RUN/report.html: curves, timeline, rollouts and predictions of a run"


def run(argv: Sequence[str]) -> int:
    """Writes the report and prints where it is."""
    parsed = parse(argv, command="report", summary=SUMMARY, usage="RUN [RUN ...]")
    if not parsed.args:
        raise ConfigError("report needs the folder of a run: evisrag report RUN")
    from evisrag_jax.reporting.page import write_report

    for name in parsed.args:
        if not Path(name).is_dir():
            raise ConfigError(f"{name}: no such run folder")
        print(write_report(Path(name)), file=sys.stdout)
    return 0
