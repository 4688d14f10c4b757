"""Metrics of a run: a row a step to metrics.jsonl, TensorBoard, and Weights & Biases if asked for.

Never imports jax by itself; arrays are fetched from their devices explicitly, in one transfer, so
that writing works under a transfer guard. Compiles are counted by
:class:`evisrag_jax.runtime.compile_cache.CompileCounter`.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from evisrag_jax.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_NAME = re.compile(r"[A-Za-z0-9_.:<>-]+(/[A-Za-z0-9_.:<>-]+)*")
_RESERVED = ("step", "time", "nonfinite")


class MetricError(ValueError):
    """A metric that cannot be written; names it."""


def _host_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    if "jax" in sys.modules:
        values = sys.modules["jax"].device_get(dict(values))
    out = {}
    for name, value in values.items():
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise MetricError(f"{name!r} is not a metric's name (group/name)")
        array = np.asarray(value)
        if array.size != 1 or array.dtype == object:
            raise MetricError(f"{name}: a metric is one number, not shape {array.shape}")
        out[name] = float(array.reshape(()))
    return out


def _open_events(folder: RunFolder, resume_step: int | None) -> SummaryWriter:
    # Imported here: tensorboardX imports torch where it is installed, which takes seconds.
    from tensorboardX import SummaryWriter

    purge = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(folder.tensorboard), purge_step=purge, flush_secs=10)


def _open_wandb(folder: RunFolder, settings: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MetricError("wandb is not installed: pip install 'evisrag-jax[wandb]'") from error
    config = folder.read_config() if folder.config.exists() else None
    return wandb.init(dir=str(folder.path), config=config, **settings)


class MetricWriter:
    """Writes rows ``{"step", "time", "<group>/<name>": number, ...}``.

    A number that is NaN or infinite is written as null and its name listed under "nonfinite".

    Args:
        folder: the run's folder.
        resume_step: the restored step when a run goes on: rows and events after it are dropped, and
            "time" goes on from the last row that is left.
        tensorboard: also write events to tb/. They are written by a thread: a kill may lose those of
            the last seconds there (the rows never).
        wandb: arguments of ``wandb.init`` (project, name, mode, ...); None writes nothing there.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        resume_step: int | None = None,
        tensorboard: bool = True,
        wandb: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self._last_step = -1
        before = 0.0
        if resume_step is not None:
            folder.truncate_metrics(resume_step)
            rows = folder.read_metrics()
            if rows:
                self._last_step, before = int(rows[-1]["step"]), float(rows[-1]["time"])
        self._start = time.perf_counter() - before
        self._events = _open_events(folder, resume_step) if tensorboard else None
        self._wandb = _open_wandb(folder, wandb) if wandb is not None else None

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write one row; returns it as written.

        Args:
            step: may repeat (say, training and evaluation of one step) but not go back.
            metrics: numbers, numpy scalars or jax arrays of one element.
        Raises:
            MetricError: a name that is none, more than one number, or a step that goes back.
        """
        if step < self._last_step:
            raise MetricError(f"step {step} after step {self._last_step}: metrics only go forward")
        values = _host_scalars(metrics)
        row: dict[str, Any] = {"step": step, "time": round(time.perf_counter() - self._start, 3)}
        row |= values
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            row["nonfinite"] = bad
        self.folder.append(self.folder.metrics, row)
        self._last_step = step
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        return row

    def close(self) -> None:
        """Flush and close what is open; the folder itself stays open."""
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
