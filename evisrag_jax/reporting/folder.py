"""Reading a run folder as it stands: whatever is missing is left empty, whatever is broken is noted, never raised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evisrag_jax.reporting.display import plural, texts

NONFINITE = "nonfinite"  # a metric row's list of values that JSON cannot hold; they stand as null
_ROLLOUT_NAME = re.compile(r"step_(\d+)\.jsonl")


@dataclass
class RunFolder:
    """What a run left behind. Dicts are None and lists empty where the file is missing or unreadable.

    Attributes:
        path: the folder, resolved.
        config, versions, summary: the JSON objects of the files of these names.
        metrics: one dict a step, ascending by step; rows of one step are merged, the later value wins.
        timeline: rows `{"step", "name", "start", "seconds"}`.
        predictions, rejected, alarms: the rows of these files.
        rollouts: (step, file) of each `rollouts/step_*.jsonl`, ascending; read one with `read_rows`.
        present: names of the files that were found.
        notes: what could not be read, in sentences for the reader of the report.
    """

    path: Path
    config: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[tuple[int, Path]] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's name: what summary or config call it, else the folder's own name."""
        for source in (self.summary, self.config):
            name = (source or {}).get("name")
            if isinstance(name, str) and name:
                return name
        return self.path.name


def read_folder(path: Path) -> RunFolder:
    """Read everything but the rollouts' rows. Raises FileNotFoundError where there is no such folder."""
    path = path.resolve()
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such run folder")
    run = RunFolder(path)
    run.config = _read_object(run, "config.json")
    run.versions = _read_object(run, "versions.json")
    run.summary = _read_object(run, "summary.json")
    run.metrics = _by_step(run, _read_named(run, "metrics.jsonl"))
    run.timeline = _read_named(run, "timeline.jsonl")
    run.predictions = _read_named(run, "predictions.jsonl")
    run.rejected = _read_named(run, "rejected.jsonl")
    run.alarms = _read_named(run, "alarms.jsonl")
    for file in (path / "rollouts").glob("step_*.jsonl"):
        if match := _ROLLOUT_NAME.fullmatch(file.name):
            run.rollouts.append((int(match[1]), file))
    run.rollouts.sort()
    if run.rollouts:
        run.present.append("rollouts")
    return run


def read_rows(file: Path, notes: list[str], name: str | None = None) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file, one a line. Lines that are none are left out and counted in `notes`.

    A writer that is still at work (or was killed) leaves half a last line: that is said in other words
    than damage in the middle. Undecodable bytes become U+FFFD.
    """
    name = name or file.name
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        notes.append(f"{name} could not be read: {error.strerror or error}.")
        return []
    rows: list[dict[str, Any]] = []
    broken: list[int] = []
    filled = [i for i, line in enumerate(lines) if line.strip()]
    for i in filled:
        try:
            row = json.loads(lines[i])
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken.append(i + 1)
    if broken and filled and broken[-1] == filled[-1] + 1:
        broken.pop()
        notes.append(f"{name}: the last line is incomplete and was left out.")
    if broken:
        notes.append(f"{name}: left out {_lines(broken)}, not a JSON object.")
    return rows


def _lines(numbers: list[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:5]) + (" …" if len(numbers) > 5 else "")
    return f"line {shown}" if len(numbers) == 1 else f"{len(numbers)} lines ({shown})"


def _read_object(run: RunFolder, name: str) -> dict[str, Any] | None:
    file = run.path / name
    if not file.is_file():
        return None
    run.present.append(name)
    try:
        value = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        run.notes.append(f"{name} could not be read: {error}.")
        return None
    if not isinstance(value, dict):
        run.notes.append(f"{name} is not a JSON object and was left out.")
        return None
    return value


def _read_named(run: RunFolder, name: str) -> list[dict[str, Any]]:
    file = run.path / name
    if not file.is_file():
        return []
    run.present.append(name)
    return read_rows(file, run.notes)


def _by_step(run: RunFolder, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: dict[int, dict[str, Any]] = {}
    nameless = 0
    for row in rows:
        step = row.get("step")
        if isinstance(step, bool) or not isinstance(step, int):
            nameless += 1
            continue
        known = merged.setdefault(step, {})
        bad = [*known.get(NONFINITE, ()), *texts(row.get(NONFINITE))]
        known.update(row)
        known.pop(NONFINITE, None)
        if bad:
            known[NONFINITE] = bad
    if nameless:
        run.notes.append(
            f"metrics.jsonl: left out {plural(nameless, 'row')} without an integer step."
        )
    return [merged[step] for step in sorted(merged)]
