"""Where the time of a run went: timeline.jsonl as one stacked bar a step, and the shares of the phases."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from evisrag_jax.reporting.display import finite, format_seconds, text

PHASES = (
    *("warm_up", "encode", "prefill", "decode", "reward", "prepare", "old_log_probs", "update"),
    *("write", "idle"),
)
IDLE = "idle"
# Host work: while another phase runs, the time is that phase's.
YIELDING = ("reward", "prepare", "write", IDLE)
MAX_BARS = 120  # with more steps, a bar is the mean of neighbouring ones
WIDTH, HEIGHT = 1000.0, 200.0
_OTHER_TONES = 6


@dataclass(frozen=True)
class Phase:
    """A phase over the whole run: `share` of all time, mean `per_step`; seconds. `style` names CSS classes.

    `hidden`: seconds in which another phase ran as well; they are in that one's total.
    """

    name: str
    style: str
    total: float
    share: float
    per_step: float
    hidden: float


@dataclass(frozen=True)
class Bar:
    """One step (or a few): its rectangles (style, x, y, width, height), its words, whether it leaves the scale."""

    title: str
    rects: tuple[tuple[str, float, float, float, float], ...]
    clipped: bool


@dataclass(frozen=True)
class TimeChart:
    """The stacked bars. `ticks` are (share of the height from the bottom, label), `steps` the labels below."""

    phases: tuple[Phase, ...]
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    steps: tuple[str, ...]
    total: float
    count: int
    per_bar: int
    clipped: tuple[str, ...]
    broken: int


def time_chart(rows: Sequence[dict[str, Any]]) -> TimeChart | None:
    """The time chart of timeline rows `{"step", "name", "start", "seconds"}`, or None without any.

    A row may give its `end` instead of `seconds`.

    Phases are added up by name. Where phases of a step overlap, the time is counted once (`shares`). Where the
    run names no idle time, the time of a step that no phase covers is shown as idle. Rows without times, or
    that end before they start, are counted in `broken`.
    """
    spans: dict[int, list[tuple[str, float, float]]] = {}
    broken = 0
    for row in rows:
        start, end, step = finite(row.get("start")), finite(row.get("end")), row.get("step")
        if end is None and start is not None and (took := finite(row.get("seconds"))) is not None:
            end = start + took
        if start is None or end is None or end < start or not isinstance(step, int):
            broken += 1
            continue
        spans.setdefault(step, []).append((text(row.get("name")) or "unnamed", start, end))
    if not spans:
        return None
    named_idle = any(name == IDLE for step in spans.values() for name, _, _ in step)
    steps = sorted(spans)
    seconds: dict[int, dict[str, float]] = {}
    for step in steps:
        sums = shares(spans[step])
        if not named_idle and (gap := uncovered([(s, e) for _, s, e in spans[step]])) > 0:
            sums[IDLE] = gap
        seconds[step] = sums
    names = [n for n in PHASES if any(n in sums for sums in seconds.values())]
    others = dict.fromkeys(n for step in steps for n in seconds[step] if n not in PHASES)
    names = [n for n in names if n != IDLE] + list(others) + [n for n in names if n == IDLE]
    styles = {
        n: f"phase-{n}" if n in PHASES else f"tone-{list(others).index(n) % _OTHER_TONES}"
        for n in names
    }
    grand = sum(sum(sums.values()) for sums in seconds.values())
    whole: dict[str, float] = {}
    for name, start, end in (span for step in spans.values() for span in step):
        whole[name] = whole.get(name, 0.0) + end - start
    phases = []
    for name in names:
        total = sum(sums.get(name, 0.0) for sums in seconds.values())
        phases.append(
            Phase(
                name,
                styles[name],
                total,
                share=total / grand if grand else 0.0,
                per_step=total / len(steps),
                hidden=max(0.0, whole.get(name, 0.0) - total),
            )
        )
    per_bar = math.ceil(len(steps) / MAX_BARS)
    groups = [steps[i : i + per_bar] for i in range(0, len(steps), per_bar)]
    means = [{n: sum(seconds[s].get(n, 0.0) for s in g) / len(g) for n in names} for g in groups]
    limit = scale_limit([sum(m.values()) for m in means])
    bars = [
        _bar(i, len(groups), _span(group), mean, styles, limit)
        for i, (group, mean) in enumerate(zip(groups, means, strict=True))
    ]
    ticks = [float(v) for v in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, limit)]
    labels = dict.fromkeys((0, len(groups) // 2, len(groups) - 1))
    return TimeChart(
        phases=tuple(phases),
        bars=tuple(bars),
        ticks=tuple((v / limit, f"{v:g} s") for v in ticks if 0 < v <= limit),
        steps=tuple(_span(groups[i]) for i in labels),
        total=grand,
        count=len(steps),
        per_bar=per_bar,
        clipped=tuple(bar.title.split(":")[0] for bar in bars if bar.clipped),
        broken=broken,
    )


def shares(spans: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds by phase of (phase, start, end) spans, every moment counted once: to the phase that began
    first, host work (`YIELDING`) after all others."""
    waiting = sorted(spans, key=lambda span: span[1], reverse=True)
    sums = dict.fromkeys((name for name, _, _ in reversed(waiting)), 0.0)
    running: list[tuple[bool, float, float, str]] = []
    edges = sorted({edge for _, *ends in spans for edge in ends})
    for left, right in itertools.pairwise(edges):
        while waiting and waiting[-1][1] <= left:
            name, start, end = waiting.pop()
            heapq.heappush(running, (name in YIELDING, start, end, name))
        while running and running[0][2] <= left:
            heapq.heappop(running)
        if running:
            sums[running[0][3]] += right - left
    return sums


def uncovered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds between the first start and the last end that lie in none of the spans."""
    gap, reached = 0.0, None
    for start, end in sorted(spans):
        if reached is not None and start > reached:
            gap += start - reached
        reached = end if reached is None else max(reached, end)
    return gap


def scale_limit(totals: Sequence[float]) -> float:
    """Top of the axis: the longest bar; where a few (compiling) steps dwarf the others, 1.4 × the 90th percentile."""
    longest = max(totals)
    if longest <= 0:
        return 1.0
    usual = sorted(totals)[int(0.9 * (len(totals) - 1))]
    return 1.4 * usual if usual > 0 and longest > 3 * usual else 1.04 * longest


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


def _bar(
    index: int, count: int, label: str, mean: dict[str, float], styles: dict[str, str], limit: float
) -> Bar:
    slot = WIDTH / count
    width = max(slot * 0.82, slot - 6)
    x = index * slot + (slot - width) / 2
    rects, below = [], 0.0
    for name, value in mean.items():
        bottom, top = min(below, limit), min(below + value, limit)
        if top > bottom:
            height = HEIGHT * (top - bottom) / limit
            rects.append((styles[name], x, HEIGHT * (1 - top / limit), width, height))
        below += value
    said = ", ".join(f"{name} {format_seconds(value)}" for name, value in mean.items() if value > 0)
    return Bar(f"step {label}: {format_seconds(below)} ({said})", tuple(rects), below > limit)
