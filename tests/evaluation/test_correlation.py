"""Correlations against scipy's, and their intervals against a plain loop of resamples."""

import numpy as np
import pytest
from scipy import stats

from evisrag_jax.evaluation import correlation
from evisrag_jax.runtime.host_random import philox

NAMES = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
KINDS = pytest.mark.parametrize("kind", sorted(NAMES))


def correlate(x, y, questions, **named):
    """Of arrays too."""
    return correlation.correlate(list(x), list(y), list(questions), **named)


def responses(questions, group, seed=0):
    """Ties on both sides, and a correlation inside questions as well as between them."""
    rng = np.random.default_rng(seed)
    ids = np.repeat([f"q{i:02d}" for i in range(questions)], group)
    x = np.repeat(rng.normal(size=questions), group) + 0.5 * rng.normal(size=len(ids))
    y = x + rng.normal(size=len(ids))
    return x.round(1), (y > 0.3).astype(float), ids.tolist()


@KINDS
def test_the_coefficient_is_scipys(kind):
    """To 1e-12; pairs that lack a side are left out and counted."""
    x, y, ids = responses(12, 4)
    expected = NAMES[kind](x, y).statistic
    holes = [None, 0.4, float("nan"), *x], [1.0, None, 0.0, *y], ["q00"] * 3 + ids
    found = correlate(*holes, kind=kind, resamples=50)
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert (found.left_out, found.responses, found.questions) == (3, 48, 12)
    assert found.low < found.value < found.high
    flipped = correlate(-x, [bool(v) for v in y], ids, kind=kind, resamples=50)
    assert flipped.value == pytest.approx(-expected, abs=1e-12)


@KINDS
def test_each_resample_is_scipys_on_the_drawn_responses(kind, monkeypatch):
    """Three draws of questions: every coefficient to 1e-12 of scipy's on the copied rows, in chunks of
    one resample; the interval is theirs."""
    x, y, ids = responses(8, 3, seed=1)
    monkeypatch.setattr(correlation, "_CHUNK_CELLS", 1)
    found = correlate(x, y, ids, kind=kind, resamples=3, level=0.9)
    rng, expected = philox(0, "correlation"), []
    for _ in range(3):
        times = rng.multinomial(8, np.full(8, 1 / 8))
        assert times.max() > 1
        rows = np.repeat(np.arange(24), np.repeat(times, 3))
        expected.append(NAMES[kind](x[rows], y[rows]).statistic)
    low, high = np.percentile(expected, (5, 95))
    assert found.low == pytest.approx(low, abs=1e-12)
    assert found.high == pytest.approx(high, abs=1e-12)


def test_the_interval_is_that_of_fishers_transform():
    """300 independent pairs with r near 0.5: tanh(atanh(r) ± 1.96 / sqrt(297)), to 0.02."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=300)
    y = 0.5 * x + np.sqrt(0.75) * rng.normal(size=300)
    found = correlate(x, y, [str(i) for i in range(300)], resamples=4000)
    low, high = np.tanh(np.arctanh(found.value) + np.array([-1.96, 1.96]) / np.sqrt(297))
    assert abs(found.low - low) < 0.02 and abs(found.high - high) < 0.02
    assert found.constant == 0


def test_copies_of_a_response_do_not_narrow_the_interval():
    """Eight equal responses a question know no more than one."""
    x, y, ids = responses(30, 1, seed=5)
    one = correlate(x, y, ids, resamples=3000)
    eight = correlate(np.repeat(x, 8), np.repeat(y, 8), np.repeat(ids, 8), resamples=3000)
    assert eight.value == pytest.approx(one.value, abs=1e-12)
    assert abs((eight.high - eight.low) - (one.high - one.low)) < 0.02


@KINDS
def test_what_does_not_vary_has_no_coefficient(kind):
    """0.1 three times leaves rounding errors, not variation. One right answer of four: the resamples that
    miss it, (3/4)^4 = 0.316 of them, are counted and left out; 1,000 of them, to 0.06."""
    ids = ["a", "b", "c", "d"]
    for x, y in (([0.1, 0.1, 0.1, 0.1], [1, 0, 1, 0]), ([1, 2, None, None], [1, 2, 3, 4])):
        found = correlate(x, y, ids, kind=kind, resamples=10)
        assert found.value is found.low is found.high is None
    found = correlate([0.1, 0.2, 0.3, 0.4], [True, False, False, False], ids, resamples=1000)
    assert abs(found.constant / 1000 - 0.75**4) < 0.06 + 4 * 0.25**4
    assert -1 <= found.low <= found.high <= 1
    single = correlate([1, 2, 3], [1, 3, 2], ["a"] * 3, kind=kind)
    assert single.value == pytest.approx(0.5) and single.low is None
    nothing = correlate([], [], [], kind=kind)
    assert nothing.value is None and nothing.responses == 0


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="2 and 1 values of 2"):
        correlate([1, 2], [1], ["a", "b"])
    with pytest.raises(ValueError, match="infinite"):
        correlate([1, float("inf")], [1, 2], ["a", "b"])
    with pytest.raises(ValueError, match="level=1"):
        correlate([1], [1], ["a"], level=1.0)


def test_the_seed_decides():
    x, y, ids = responses(10, 2, seed=6)
    assert correlate(x, y, ids, resamples=20, seed=1) == correlate(x, y, ids, resamples=20, seed=1)
    assert correlate(x, y, ids, resamples=20, seed=1) != correlate(x, y, ids, resamples=20, seed=2)
