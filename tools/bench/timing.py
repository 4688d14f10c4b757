"""Times of several sides of a comparison, taken in turn in one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call. `run` must wait for its own result."""
    gc.collect()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def alternate(
    sides: Mapping[str, Callable[[], Any]], repeats: int, *, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of `repeats` calls of every side: A B, B A, A B, … after `warmup` calls of each.

    A change of the machine's speed (another process, heat) then meets all sides alike.
    """
    for _ in range(warmup):
        for run in sides.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats):
        for name in list(sides) if i % 2 == 0 else list(sides)[::-1]:
            times[name].append(timed(sides[name]))
    return times


def median(seconds: Sequence[float]) -> float:
    """The median of a side's times."""
    return statistics.median(seconds)


def spread(seconds: Sequence[float]) -> str:
    """Least and largest, for a table."""
    return f"{min(seconds):.3f} – {max(seconds):.3f}"
