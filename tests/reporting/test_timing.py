"""The time chart: sums, idle time, the bars' geometry, and steps that leave the scale."""

import numpy as np
import pytest

from evisrag_jax.reporting.timing import (
    HEIGHT,
    MAX_BARS,
    scale_limit,
    shares,
    time_chart,
    uncovered,
)


def row(step, name, start, end):
    return {"step": step, "name": name, "start": start, "end": end}


def test_a_row_gives_its_end_or_its_seconds():
    given = [
        {"step": 1, "name": "decode", "start": 2.0, "seconds": 1.5},
        {"step": 1, "name": "update", "start": 4.0, "end": 5.0},
    ]
    chart = time_chart(given)
    assert {p.name: p.total for p in chart.phases} == pytest.approx(
        {"decode": 1.5, "update": 1.0, "idle": 0.5}
    )


def test_phases_add_up_and_uncovered_time_is_idle():
    rows = [
        row(1, "prefill", 0, 1),
        row(1, "decode", 1, 4),
        row(1, "reward", 4.5, 5),
        row(1, "update", 5, 7),
        row(2, "decode", 7, 9),
        row(2, "decode", 9, 10),
        row(2, "checkpoint", 10, 12),
    ]
    chart = time_chart(rows)
    totals = {p.name: p.total for p in chart.phases}
    assert totals == pytest.approx(
        {"prefill": 1, "decode": 6, "reward": 0.5, "update": 2, "checkpoint": 2, "idle": 0.5}
    )
    assert list(totals)[-1] == "idle"
    assert sum(p.share for p in chart.phases) == pytest.approx(1) and chart.total == pytest.approx(
        12
    )
    assert {p.name: p.per_step for p in chart.phases}["decode"] == pytest.approx(3)


def test_idle_that_the_run_names_is_not_counted_again():
    chart = time_chart(
        [
            row(1, "decode", 0, 1),
            row(1, "idle", 1, 3),
            row(2, "decode", 4, 5),
            row(2, "update", 7, 8),
        ]
    )
    assert {p.name: p.total for p in chart.phases} == pytest.approx(
        {"decode": 2, "update": 1, "idle": 2}
    )


def test_bars_stack_without_gaps_to_their_length():
    rng = np.random.default_rng(0)
    lengths = rng.uniform(0.5, 2, (10, 3))
    rows = []
    for step, parts in enumerate(lengths):
        ends = np.cumsum(parts)
        rows += [
            row(step, n, float(e - p), float(e))
            for n, p, e in zip(("prefill", "decode", "update"), parts, ends, strict=True)
        ]
    chart = time_chart(rows)
    heights = np.array([sum(r[4] for r in bar.rects) for bar in chart.bars])
    np.testing.assert_allclose(
        heights / heights.max(), lengths.sum(1) / lengths.sum(1).max(), rtol=1e-9
    )
    for bar in chart.bars:
        bottoms = [y + h for _, _, y, _, h in bar.rects]
        tops = [y for _, _, y, _, _ in bar.rects]
        np.testing.assert_allclose(bottoms, [HEIGHT, *tops[:-1]], atol=1e-9)
    assert not any(bar.clipped for bar in chart.bars) and chart.clipped == ()


def test_a_compiling_step_does_not_flatten_the_others():
    assert scale_limit([1.0] * 20 + [60.0]) == pytest.approx(1.4)
    assert scale_limit([1.0, 2.0, 2.5]) == pytest.approx(2.6)
    assert scale_limit([0.0]) == 1.0
    chart = time_chart([row(1, "decode", 0, 60), *(row(s, "decode", 0, 1) for s in range(2, 20))])
    assert chart.clipped == ("step 1",) and sum(r[4] for r in chart.bars[0].rects) == pytest.approx(
        HEIGHT
    )
    assert chart.bars[0].title.startswith("step 1: 1 min 0 s")


def test_many_steps_are_averaged_into_bars():
    chart = time_chart([row(s, "decode", 0, 1 + s % 3) for s in range(360)])
    assert len(chart.bars) <= MAX_BARS and chart.per_bar == 3 and chart.count == 360
    assert {bar.title.split(": ")[1].split(" (")[0] for bar in chart.bars} == {"2.00 s"}
    assert chart.steps[0] == "0–2" and chart.steps[-1] == "357–359"


def test_rows_without_valid_times_are_counted():
    assert time_chart([row(1, "decode", 2, 1)]) is None
    chart = time_chart(
        [row(1, "a", 0, 1), row(1, "b", None, 1), row("x", "c", 0, 1), row(1, "d", float("nan"), 1)]
    )
    assert chart.broken == 3 and time_chart([]) is None


def test_overlapping_phases_are_counted_once():
    """Host work yields to the device's; of two device phases the first to begin counts. The bar is as
    long as the step, and what ran behind something else is said."""
    spans = [
        ("decode", 0.0, 4.0),
        ("reward", 3.0, 6.0),
        ("prepare", 5.0, 8.0),
        ("update", 7.0, 9.0),
    ]
    assert shares(spans) == {"decode": 4.0, "reward": 2.0, "prepare": 1.0, "update": 2.0}
    assert shares([("a", 0.0, 2.0), ("b", 1.0, 3.0)]) == {"a": 2.0, "b": 1.0}
    assert shares([("a", 0.0, 9.0), ("b", 1.0, 3.0), ("a", 2.0, 4.0)]) == {"a": 9.0, "b": 0.0}
    chart = time_chart([row(1, *span) for span in spans])
    assert chart.total == 9.0
    hidden = {p.name: p.hidden for p in chart.phases}
    assert hidden == {"decode": 0, "reward": 1, "prepare": 2, "update": 0}


def test_shares_equal_a_fine_grid():
    """Random overlapping spans against counting grid cells, one by one."""
    rng = np.random.default_rng(4)
    names = ("decode", "update", "reward", "prepare")
    starts = rng.integers(0, 50, 40)
    spans = [(names[i % 4], float(s), float(s + rng.integers(0, 12))) for i, s in enumerate(starts)]
    want = dict.fromkeys(names, 0)
    for cell in np.arange(0.5, 70):
        on = [span for span in spans if span[1] < cell < span[2]]
        if on:
            first = min(on, key=lambda s: (s[0] in ("reward", "prepare"), s[1], s[2], s[0]))
            want[first[0]] += 1
    assert shares(spans) == want


def test_uncovered_time_of_overlapping_spans():
    assert uncovered([(0.0, 4.0), (1.0, 2.0), (6.0, 7.0)]) == 2.0
    assert uncovered([(0.0, 2.0), (1.0, 3.0)]) == 0.0
