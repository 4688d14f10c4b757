"""Geometry of a chart: lines over steps as SVG paths, ticks and readings.

A chart is drawn at 360 × 200 units and shown at about that many pixels, alone on a phone and three abreast on
a desk, so its text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from evisrag_jax.reporting.display import finite, format_number, plural

LEFT, RIGHT, TOP, BOTTOM = 44.0, 350.0, 10.0, 174.0  # the plot inside its 360 × 200 units
MAX_POINTS = (
    300  # a longer line is drawn through the least and greatest value of each bucket of steps
)
SMOOTH_FROM = 30  # from this many steps on a running mean stands before the raw line
DOTS_TO = 16  # up to this many points each is marked


@dataclass(frozen=True)
class Line:
    """One metric over the steps; `style` names CSS classes; values are None where a step has none."""

    key: str
    label: str
    style: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class DrawnLine:
    """A line in chart units. `raw` and `smooth` are path data; `dots` are (x, y); `last` is its final value."""

    label: str
    key: str
    style: str
    raw: str
    smooth: str
    dots: tuple[tuple[float, float], ...]
    last: str


@dataclass(frozen=True)
class Chart:
    """A chart ready for the template: ticks are (position, label), `readout` feeds the pointer's readings."""

    id: str
    title: str
    unit: str
    note: str
    description: str
    lines: tuple[DrawnLine, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    broken: tuple[float, ...]
    readout: dict[str, Any]


def draw(
    id: str,
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    fraction: bool = False,
    smooth: bool = True,
) -> Chart:
    """Lay out one chart of lines that share their axes.

    `log` allows a log axis (used where all values are positive and span a factor of 100), `fraction` an axis from
    0 to 1 (where all values lie there), `smooth` a running mean (from `SMOOTH_FROM` steps on).
    """
    values = [v for line in lines for v in line.values if finite(v) is not None]
    steps = [s for line in lines for s in line.steps] or [0]
    first, last = min(steps), max(steps)
    log = log and bool(values) and min(values) > 0 and max(values) / min(values) >= 100
    low, high, y_values = _y_axis(values, log, fraction)
    span = max(last - first, 1)

    def x(step: int) -> float:
        return (
            (LEFT + RIGHT) / 2 if last == first else LEFT + (RIGHT - LEFT) * (step - first) / span
        )

    def y(value: float) -> float:
        v = math.log10(value) if log else value
        return BOTTOM - (BOTTOM - TOP) * (v - low) / (high - low)

    smooth = smooth and any(len(line.values) >= SMOOTH_FROM for line in lines)
    window = max(len(line.values) for line in lines) // 15 | 1 if smooth else 1
    drawn, broken = [], set()
    for line in lines:
        points = [(s, finite(v)) for s, v in zip(line.steps, line.values, strict=True)]
        broken |= {x(s) for s, v in points if v is None}
        raw = [(x(s), None if v is None else y(v)) for s, v in thin(points)]
        mean = [(x(s), None if v is None else y(v)) for s, v in thin(running_mean(points, window))]
        dots = tuple((px, py) for px, py in raw if py is not None) if len(points) <= DOTS_TO else ()
        final = next((v for _, v in reversed(points) if v is not None), None)
        drawn.append(
            DrawnLine(
                line.label,
                line.key,
                line.style,
                path(raw),
                path(mean) if smooth else "",
                dots,
                format_number(final),
            )
        )
    notes = [f"thick: running mean of {window} steps"] if smooth else []
    notes += ["log scale"] if log else []
    notes += [f"red ticks: {plural(len(broken), 'step')} without a finite value"] if broken else []
    x_values = [first]
    if last > first:
        located = MaxNLocator(5, integer=True).tick_values(first, last)
        x_values = [int(v) for v in located if first <= v <= last]
    return Chart(
        id,
        title,
        unit,
        "; ".join(notes),
        _describe(lines),
        tuple(drawn),
        tuple((x(v), str(v)) for v in x_values),
        tuple((y(v), _tick(v)) for v in y_values),
        tuple(sorted(broken)),
        _readout(lines, x),
    )


def _y_axis(values: list[float], log: bool, fraction: bool) -> tuple[float, float, list[float]]:
    """Lowest and highest position (log10 on a log axis) and the values that get a tick."""
    if log:
        low, high = math.log10(min(values)), math.log10(max(values))
        every = max(1, math.ceil((high - low) / 4))
        powers = range(math.ceil(low), math.floor(high) + 1, every)
        return low - 0.05 * (high - low), high + 0.05 * (high - low), [10.0**p for p in powers]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if fraction and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif 0 < low <= 0.5 * high:
        low = 0.0
    if high == low:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    ticks = [float(v) for v in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]
    pad = 0.04 * (high - low)
    low, high = low - (pad if low else 0), high + (0 if fraction and high == 1 else pad)
    return low, high, [v for v in ticks if low - 1e-9 <= v <= high + 1e-9]


def _tick(value: float) -> str:
    return f"{value:g}".replace("-", "−").replace("e−0", "e−").replace("e+0", "e")


def running_mean(
    points: Sequence[tuple[int, float | None]], window: int
) -> list[tuple[int, float | None]]:
    """Centred mean over `window` points (fewer at the ends); steps without a value take no part in it."""
    half = window // 2
    out: list[tuple[int, float | None]] = []
    for i, (step, value) in enumerate(points):
        near = [v for _, v in points[max(0, i - half) : i + half + 1] if v is not None]
        out.append((step, None if value is None else sum(near) / len(near)))
    return out


def thin(points: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """At most about `MAX_POINTS` points: of each bucket its least and its greatest, so that spikes stay."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)
    out: list[tuple[int, float | None]] = []
    for start in range(0, len(points), size):
        bucket = [p for p in points[start : start + size] if p[1] is not None]
        if not bucket:
            out.append(points[start])
            continue
        least, greatest = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
        out += sorted({least, greatest}, key=lambda p: p[0])
    return out


def path(points: Sequence[tuple[float, float | None]]) -> str:
    """SVG path data through the points, with a gap where there is none; a lone point becomes a dash."""
    parts: list[str] = []
    pen_down = False
    for i, (px, py) in enumerate(points):
        if py is None:
            pen_down = False
            continue
        parts.append(f"{'L' if pen_down else 'M'}{px:.1f} {py:.1f}")
        if not pen_down and (i + 1 == len(points) or points[i + 1][1] is None):
            parts.append("h0.1")
        pen_down = True
    return "".join(parts)


def _describe(lines: Sequence[Line]) -> str:
    said = []
    for line in lines:
        known = [
            (s, v) for s, v in zip(line.steps, line.values, strict=True) if finite(v) is not None
        ]
        if known:
            (s0, v0), (s1, v1) = known[0], known[-1]
            said.append(
                f"{line.label} from {format_number(v0)} at step {s0} to {format_number(v1)} at step {s1}"
            )
    return "; ".join(said) or "no finite values"


def _readout(lines: Sequence[Line], x: Callable[[int], float]) -> dict[str, Any]:
    """Readings under the pointer: `at` = [step, x], `values` = one list a line, null where a step has none."""
    steps = sorted({s for line in lines for s in line.steps})
    every = max(1, math.ceil(len(steps) / MAX_POINTS))
    kept = steps[::-1][::every][::-1]  # the last step always
    columns = []
    for line in lines:
        known = dict(zip(line.steps, line.values, strict=True))
        columns.append([format_number(known[s]) if s in known else None for s in kept])
    return {"at": [[s, round(x(s), 1)] for s in kept], "values": columns}
