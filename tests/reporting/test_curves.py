"""Learning curves: which metrics meet in a chart, and where their points lie."""

import math
import re

import numpy as np
import pytest

from evisrag_jax.reporting.curves import charts, metric_keys
from evisrag_jax.reporting.drawing import (
    BOTTOM,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    path,
    running_mean,
    thin,
)
from evisrag_jax.reporting.tables import metric_tables


def points_of(data: str) -> np.ndarray:
    return np.array(
        [[float(x), float(y)] for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", data)]
    )


def by_title(rows):
    main, more = charts(rows)
    return {chart.title: chart for chart in main}, {chart.title: chart for chart in more}


def test_metrics_find_their_charts():
    row = {
        "step": 1,
        "time": 9.0,
        "lr": 1e-6,
        "note": "text",
        "reward/accuracy": 1.0,
        "reward/evidence": 1.0,
    }
    row |= {
        "reward/overall": 2.0,
        "loss/total": 0.1,
        "loss/grad_norm": 0.5,
        "rollout/length_mean": 90.0,
    }
    row |= {
        "rollout/clipped_ratio": 0.1,
        "rollout/logp_gap": 1e-3,
        "scope/found_think": 1.0,
        "eval/accuracy": 0.5,
    }
    row |= {
        "time/decode": 2.0,
        "compile/count": 4,
        "eval/code/global_em": 0.5,
        "loss/clipfrac_lower": 0.0,
    }
    row |= {"reward/group_spread": 0.5, "rollout/failed": 0.0}
    main, more = by_title([row])
    held = {title: [line.key for line in chart.lines] for title, chart in main.items()}
    assert held == {
        "Overall reward": ["reward/overall", "reward/group_spread"],
        "Reward channels": ["reward/accuracy", "reward/evidence"],
        "Evaluation": ["eval/accuracy"],
        "Loss": ["loss/total"],
        "Gradient norm": ["loss/grad_norm"],
        "Sampler–trainer gap": ["rollout/logp_gap"],
        "Response length": ["rollout/length_mean"],
        "Clipped responses": ["rollout/clipped_ratio"],
        "Scopes found": ["scope/found_think"],
    }
    assert {line.key for chart in more.values() for line in chart.lines} == {
        "lr",
        "time/decode",
        "compile/count",
        "eval/code/global_em",
        "loss/clipfrac_lower",
        "rollout/failed",
    }
    every = [line.key for chart in (main | more).values() for line in chart.lines]
    assert sorted(every) == sorted(
        metric_keys([row])
    )  # nothing numeric is lost, nothing shown twice


def test_channels_wear_the_colour_of_their_section():
    rows = [
        {
            "step": 1,
            "reward/accuracy": 1.0,
            "reward/isThink": 0.0,
            "reward/perception": 1.0,
            "scope/found_think": 1.0,
        }
    ]
    lines = {line.key: line.style for chart in charts(rows)[0] for line in chart.lines}
    assert (
        lines["reward/accuracy"] == "tone-answer" and lines["reward/perception"] == "tone-evidence"
    )
    assert (
        lines["reward/isThink"] == "tone-think dashed"
        and lines["scope/found_think"] == "tone-think"
    )


def test_lines_of_other_magnitude_get_their_own_chart():
    rows = [{"step": s, "loss/total": 0.01, "loss/kl": 0.05, "loss/entropy": 1.5} for s in (1, 2)]
    assert list(by_title(rows)[0]) == ["Loss: total, kl", "Loss: entropy"]
    rows = [{"step": s, "eval/accuracy": 0.8, "eval/em": 0.01, "eval/f1": 60.0} for s in (1, 2)]
    assert [len(c.lines) for c in by_title(rows)[0].values()] == [2, 1]  # shares stay together


def test_points_lie_where_their_values_say():
    rng = np.random.default_rng(0)
    values = rng.uniform(-3, 8, 12)
    chart = by_title([{"step": 10 * s, "reward/overall": float(v)} for s, v in enumerate(values)])[
        0
    ]["Overall reward"]
    drawn = points_of(chart.lines[0].raw)
    np.testing.assert_allclose(
        drawn[:, 0], np.linspace(LEFT, RIGHT, 12), atol=0.06
    )  # one decimal in the path
    ticks = {float(label.replace("−", "-")): y for y, label in chart.y_ticks}
    (v0, y0), (v1, y1) = sorted(ticks.items())[:: len(ticks) - 1]
    np.testing.assert_allclose(drawn[:, 1], y0 + (values - v0) / (v1 - v0) * (y1 - y0), atol=0.06)
    assert drawn[:, 1].min() >= TOP and drawn[:, 1].max() <= BOTTOM
    assert len(chart.lines[0].dots) == 12 and chart.lines[0].smooth == ""


def test_a_log_axis_where_values_span_orders():
    values = [0.5, 0.4, 60.0, 0.6]
    chart = by_title([{"step": s, "grad_norm": v} for s, v in enumerate(values)])[0][
        "Gradient norm"
    ]
    assert chart.note == "log scale" and [label for _, label in chart.y_ticks] == ["1", "10"]
    drawn, (one, ten) = points_of(chart.lines[0].raw), [y for y, _ in chart.y_ticks]
    np.testing.assert_allclose(drawn[:, 1], one + np.log10(values) * (ten - one), atol=0.06)


def test_values_that_are_not_finite_break_the_line_and_are_marked():
    values = [1.0, 2.0, math.nan, 4.0, math.inf]
    chart = by_title([{"step": s, "loss/total": v} for s, v in enumerate(values)])[0]["Loss"]
    assert chart.lines[0].raw.count("M") == 2 and len(points_of(chart.lines[0].raw)) == 3
    np.testing.assert_allclose(chart.broken, [LEFT + (RIGHT - LEFT) * s / 4 for s in (2, 4)])
    assert "2 steps without a finite value" in chart.note and chart.lines[0].last == "4.000"
    assert chart.readout["values"] == [["1.000", "2.000", "nan", "4.000", "∞"]]
    only_broken = by_title([{"step": 1, "loss/total": math.nan}])[0]["Loss"]
    assert only_broken.description == "no finite values" and only_broken.lines[0].last == "n/a"


def test_values_that_the_writer_named_as_not_finite():
    rows = [
        {"step": 1, "loss/total": None, "nonfinite": ["loss/total"]},
        {"step": 2, "loss/total": 2.0},
    ]
    [chart] = charts(rows)[0]
    assert chart.broken == (LEFT,) and chart.readout["values"] == [["n/a", "2.000"]]
    assert [c.description for c in charts(rows[:1])[0]] == ["no finite values"]
    assert metric_tables(rows)[0].rows == (("1", "not finite"), ("2", "2"))


def test_running_mean_against_numpy():
    values = np.random.default_rng(1).normal(size=50)
    means = [v for _, v in running_mean(list(enumerate(map(float, values))), 7)]
    np.testing.assert_allclose(
        means[3:-3], np.convolve(values, np.ones(7) / 7, "valid"), atol=1e-12
    )
    np.testing.assert_allclose(
        [means[0], means[-1]], [values[:4].mean(), values[-4:].mean()], atol=1e-12
    )
    assert running_mean([(0, 1.0), (1, None), (2, 3.0)], 3) == [(0, 1.0), (1, None), (2, 3.0)]


def test_long_lines_are_thinned_but_keep_their_extremes():
    values = np.random.default_rng(2).normal(size=5000)
    values[1234], values[4321] = 50.0, -40.0
    kept = thin([(s, float(v)) for s, v in enumerate(values)])
    assert len(kept) <= MAX_POINTS + 2 and [s for s, _ in kept] == sorted(s for s, _ in kept)
    assert max(v for _, v in kept) == 50.0 and min(v for _, v in kept) == -40.0
    chart = by_title([{"step": s, "reward/overall": float(v)} for s, v in enumerate(values)])[0][
        "Overall reward"
    ]
    assert len(chart.readout["at"]) <= MAX_POINTS and chart.readout["at"][-1][0] == 4999
    assert len(chart.lines[0].raw) + len(chart.lines[0].smooth) < 10_000


def test_path_lifts_the_pen_over_gaps():
    assert path([(0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 4.0)]) == "M0.0 1.0h0.1M2.0 3.0L3.0 4.0"
    assert path([]) == ""


def test_metric_tables_hold_every_key_and_say_what_they_leave_out():
    rows = [{"step": s, "loss/total": float(s), "lr": 1e-6} for s in range(500)] + [
        {"step": 500, "eval/f1": 0.25}
    ]
    tables = {t.title.split(" ")[0]: t for t in metric_tables(rows)}
    assert set(tables) == {"loss", "lr", "eval"}
    assert tables["loss"].rows[-1] == ("499", "499") and len(tables["loss"].rows) == 167
    assert tables["loss"].note == "167 of 500 rows: every 3rd step." and tables["eval"].note == ""


@pytest.mark.parametrize("rows", [[], [{"step": 3}], [{"step": 1, "note": "x"}]])
def test_rows_without_metrics_give_no_charts(rows):
    assert charts(rows) == ([], [])
