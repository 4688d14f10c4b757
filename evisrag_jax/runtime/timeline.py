"""Where the time of a step goes: phases as rows of timeline.jsonl and as time/<phase> metrics.

    step     |------------------------------------------------------|
    decode      |-----------------|
    reward                   |--------|            overlapping phases each count in full
    update                               |------------|
    idle     |--|                      |-|            |-|     what no phase covers

Host code: never imports jax. Work that a device still does after a phase is not in it: block on its
result inside.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from evisrag_jax.runtime.run_folder import RunFolder

SHORTEST = 1e-3  # seconds: shorter gaps get no row of their own

Span = tuple[str, float, float]  # a phase, its begin and end by time.perf_counter


class StepTimeline:
    """The phases of one step at a time; `start` it, add phases, and `finish` it."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._spans: list[Span] = []
        self._step, self._begin = 0, 0.0

    def start(self, step: int) -> None:
        """A new step begins; one that was not finished is forgotten."""
        self._step, self._begin, self._spans = step, time.perf_counter(), []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((name, begin, time.perf_counter()))

    def add(self, spans: Sequence[Span]) -> None:
        """Phases that were measured elsewhere."""
        self._spans += spans

    def finish(self) -> dict[str, float]:
        """Writes the step's rows; its metrics: seconds of each phase, and time/idle."""
        end = time.perf_counter()
        gaps = uncovered([(begin, till) for _, begin, till in self._spans], self._begin, end)
        idle = [("idle", *gap) for gap in gaps if gap[1] - gap[0] >= SHORTEST]
        for name, begin, till in sorted([*self._spans, *idle], key=lambda span: span[1:]):
            if till > begin:
                self.run.add_span(name, self._step, begin, till)
        metrics = {}
        for name in dict.fromkeys(name for name, _, _ in self._spans):
            own = [(begin, till) for other, begin, till in self._spans if other == name]
            first, last = min(b for b, _ in own), max(t for _, t in own)
            free = sum(b - a for a, b in uncovered(own, first, last))
            metrics[f"time/{name}"] = last - first - free
        return metrics | {"time/idle": sum(b - a for a, b in gaps)}


def uncovered(
    spans: Sequence[tuple[float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    """The parts of [begin, end] that lie in none of the spans."""
    gaps, reached = [], begin
    for first, last in sorted(spans):
        if first > reached:
            gaps.append((reached, min(first, end)))
        reached = max(reached, last)
    if end > reached:
        gaps.append((reached, end))
    return [gap for gap in gaps if gap[1] > gap[0]]
