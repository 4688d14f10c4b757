"""The run folder: everything that is needed to repeat, resume and report a run, as plain files.

    config.json versions.json sharding.txt metrics.jsonl timeline.jsonl rollouts/step_%06d.jsonl
    rejected.jsonl alarms.jsonl predictions.jsonl checkpoints/<step>/ tb/ summary.json report.html

Host code: never imports jax.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import evisrag_jax
from evisrag_jax.runtime.json_files import (
    JsonlWriter,
    filter_jsonl,
    plain,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
)

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"),
    *("transformers", "tokenizers", "safetensors", "ml-collections", "numpy", "pillow"),
)
_ROLLOUT = re.compile(r"step_(\d{6,})\.jsonl")


class RunFolderError(ValueError):
    """A folder that is no run, or holds another run than the one asked for."""


def difference(saved: Any, given: Any, path: str = "") -> list[str]:
    """Readable differences of two JSON-like values, one "field: saved -> given" a line."""
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        lines = []
        for key in sorted(saved.keys() | given.keys(), key=str):
            name = f"{path}.{key}" if path else str(key)
            if key not in given:
                lines.append(f"{name}: {saved[key]!r} -> (absent)")
            elif key not in saved:
                lines.append(f"{name}: (absent) -> {given[key]!r}")
            else:
                lines += difference(saved[key], given[key], name)
        return lines
    return [] if saved == given else [f"{path or 'value'}: {saved!r} -> {given!r}"]


def versions(**more: Any) -> dict[str, Any]:
    """Now, this package, Python, the platform and the packages that numbers depend on."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "evisrag_jax": evisrag_jax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": packages,
        **more,
    }


class RunFolder:
    """One run's folder; opening it creates what is missing and changes nothing else.

    Row files are opened at their first row and closed by ``close`` (or the ``with`` block).

    Args:
        path: the folder.
        writes: False for all but one of the processes of a run: what they are told to write is left to
            that one.
    """

    def __init__(self, path: str | os.PathLike[str], *, writes: bool = True) -> None:
        self.path = Path(path)
        self.writes = writes
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path}: is a file, a run needs a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self.config = self.path / "config.json"
        self.versions = self.path / "versions.json"
        self.sharding = self.path / "sharding.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.rollouts = self.path / "rollouts"
        self.rejected = self.path / "rejected.jsonl"
        self.alarms = self.path / "alarms.jsonl"
        self.predictions = self.path / "predictions.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tb"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self._writers: dict[Path, JsonlWriter] = {}
        self._start = time.perf_counter()

    # Whole files.

    @property
    def has_steps(self) -> bool:
        """Whether a run has already got anywhere: it left metrics, or checkpoints (which may be
        written more often than rows)."""
        rows = self.metrics.exists() and self.metrics.stat().st_size > 0
        folders = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return rows or any(path.name.isdecimal() for path in folders)

    def start(
        self,
        config: Any,
        *,
        resume: bool = False,
        may_differ: Iterable[str] = (),
        **version_facts: Any,
    ) -> None:
        """Write config.json and versions.json, and refuse a folder that belongs to another run.

        Args:
            config: the resolved config (ConfigDict, dataclass or mapping).
            resume: go on with the run in this folder. Its config must be the same, save for fields
                in ``may_differ`` (dotted names; a name covers everything below it).
            version_facts: more for versions.json, e.g. the devices.
        Raises:
            RunFolderError: not resuming and the folder already holds a run with steps, resuming
                with another config (the message lists the differences), or the folder is a model
                or a checkpoint.
        """
        self._refuse_models()
        given = plain(config)
        if resume and self.config.exists():
            allowed = tuple(may_differ)
            lines = [
                line
                for line in difference(read_json(self.config), given)
                if not any(re.match(rf"{re.escape(name)}[.:]", line) for name in allowed)
            ]
            if lines:
                shown = "\n  ".join(lines[:20])
                raise RunFolderError(
                    f"{self.path}: cannot resume with another config "
                    f"({len(lines)} differences, saved -> given):\n  {shown}"
                )
        elif not resume and self.has_steps:
            raise RunFolderError(
                f"{self.path}: already holds a run; resume it, or choose another folder"
            )
        if self.writes:
            write_json(self.config, given)
        self.write_versions(**version_facts)

    def write_versions(self, **facts: Any) -> None:
        """Write versions.json."""
        if self.writes:
            write_json(self.versions, versions(**facts))

    def write_sharding(self, table: str) -> None:
        """Write sharding.txt: how parameters lie on the devices of this start."""
        if self.writes:
            self.sharding.write_text(table, encoding="utf-8")

    def rejected_by(self, process: int) -> Path:
        """The file of records that a process refused: rejected.jsonl of process 0."""
        return self.rejected if process == 0 else self.path / f"rejected-{process}.jsonl"

    def _refuse_models(self) -> None:
        """A run started here would overwrite what is no run."""
        inside = self.path.absolute()
        for folder in (inside, inside.parent, inside.parent.parent):
            if (folder / "_CHECKPOINT_METADATA").exists():
                raise RunFolderError(
                    f"{self.path}: lies in a checkpoint; to go on with its run, give the run's folder"
                )
        saved = read_json(self.config) if self.config.exists() else {}
        if isinstance(saved, Mapping) and "model_type" in saved:
            raise RunFolderError(
                f"{self.path}: is a model folder; start from it with --model, and give the folder of "
                "a run here"
            )

    def read_config(self) -> dict[str, Any]:
        """The resolved config of the run. RunFolderError when the folder holds none."""
        if not self.config.exists():
            raise RunFolderError(f"{self.path}: no config.json, this is not a run folder")
        return read_json(self.config)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        if self.writes:
            write_json(self.summary, summary)

    # Row files.

    def append(self, path: Path, row: Mapping[str, Any]) -> None:
        """Append one row to a JSONL file of this folder; flushed when this returns."""
        if not self.writes:
            return
        if path not in self._writers:
            self._writers[path] = JsonlWriter(path)
        self._writers[path].write(row)

    def reject(self, *, id: str, reason: str, **facts: Any) -> None:
        """Note a record that was skipped: which, why (a short word such as "aspect"), details."""
        self.append(self.rejected, {"id": id, "reason": reason, **facts})

    def add_alarm(self, row: Mapping[str, Any]) -> None:
        """Append one row {step, name, message} to alarms.jsonl."""
        self.append(self.alarms, row)

    def predict(self, row: Mapping[str, Any]) -> None:
        """Append one row to predictions.jsonl."""
        self.append(self.predictions, row)

    def add_span(self, name: str, step: int, begin: float, end: float) -> None:
        """Note a phase of a step in timeline.jsonl: a row {step, name, start, seconds}.

        Args:
            begin, end: by time.perf_counter; ``start`` counts from when this folder was opened.
        """
        row = {"step": step, "name": name, "start": round(begin - self._start, 6)}
        self.append(self.timeline, row | {"seconds": round(end - begin, 6)})

    # Rollouts.

    def rollout_path(self, step: int) -> Path:
        """Where the sampled rollouts of a step stand."""
        return self.rollouts / f"step_{step:06d}.jsonl"

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the sampled rollouts of a step (one row a prompt), atomically."""
        if self.writes:
            write_jsonl(self.rollout_path(step), rows)

    def rollout_steps(self) -> list[int]:
        """Steps that have rollouts, ascending."""
        if not self.rollouts.is_dir():
            return []
        found = (_ROLLOUT.fullmatch(path.name) for path in self.rollouts.iterdir())
        return sorted(int(match[1]) for match in found if match)

    # Resume.

    def truncate_metrics(self, step: int) -> int:
        """Cut metrics.jsonl to rows of at most ``step``; returns how many rows were dropped."""
        return self._truncate(self.metrics, step)

    def truncate(self, step: int) -> None:
        """Forget everything after ``step``: metrics, timeline, rejected rows, alarms and rollouts,
        and what a kill left of files that were being written.

        Rows without a step (records rejected before the first one) stay.
        """
        if not self.writes:
            return
        for path in (self.metrics, self.timeline, self.rejected, self.alarms):
            self._truncate(path, step)
        for late in self.rollout_steps():
            if late > step:
                self.rollout_path(late).unlink()
        for folder in (self.path, self.rollouts):
            for partial in folder.glob(".*.partial"):
                if partial.is_file():
                    partial.unlink()

    def _truncate(self, path: Path, step: int) -> int:
        if path in self._writers:
            self._writers.pop(path).close()
        if not path.exists() or not self.writes:
            return 0
        return filter_jsonl(path, lambda row: row.get("step", step) <= step)[1]

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl."""
        return read_jsonl(self.metrics)

    def close(self) -> None:
        """Close all row files; the folder may be written again after it."""
        while self._writers:
            self._writers.popitem()[1].close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
