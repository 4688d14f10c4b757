"""Bootstrap intervals against theory and against a plain loop written here."""

import numpy as np
import pytest

from evisrag_jax.evaluation.statistics import bootstrap, paired_difference


def run(values):
    return {f"q{i}": float(value) for i, value in enumerate(values)}


def draws(seed, runs, questions):
    rng = np.random.default_rng(seed)
    return [run(rng.integers(0, 2, questions)) for _ in range(runs)]


def test_one_run_has_the_normal_interval():
    """400 questions, half right: 1.96 * sqrt(0.25 / 400) = 0.0490 to each side, within 0.004."""
    found = bootstrap([run([0, 1] * 200)], seed=1)
    assert found.mean == 0.5 and found.std is None
    assert (found.runs, found.questions, found.resamples, found.level) == (1, 400, 10_000, 0.95)
    assert abs(found.low - (0.5 - 0.049)) < 0.004 and abs(found.high - (0.5 + 0.049)) < 0.004


def test_runs_and_questions_are_resampled_as_a_loop_does_it():
    """Against a plain loop: runs first, then one set of questions for all of them; within 0.01."""
    table = draws(3, runs=4, questions=60)
    values = np.array([[one[f"q{i}"] for i in range(60)] for one in table])
    values[0] += 0.5  # one run is much better, so that runs matter
    rng = np.random.default_rng(7)
    means = []
    for _ in range(4000):
        rows = rng.integers(0, 4, 4)
        columns = rng.integers(0, 60, 60)
        means.append(values[np.ix_(rows, columns)].mean())
    found = bootstrap([run(row) for row in values], seed=2)
    low, high = np.percentile(means, (2.5, 97.5))
    assert abs(found.low - low) < 0.01 and abs(found.high - high) < 0.01
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    assert found.std == pytest.approx(values.mean(1).std(ddof=1), abs=1e-12)


def test_repeating_a_run_does_not_narrow_the_interval():
    """Five identical runs know no more about the questions than one (crossed, not nested)."""
    one = run([0, 1] * 50)
    single, five = bootstrap([one], seed=4), bootstrap([one] * 5, seed=4)
    assert abs((five.high - five.low) - (single.high - single.low)) < 0.01
    assert five.std == 0.0


def test_the_seed_decides():
    data = draws(5, 2, 30)
    assert bootstrap(data, seed=9) == bootstrap(data, seed=9)
    assert bootstrap(data, seed=9) != bootstrap(data, seed=10)


def test_wider_level_wider_interval_and_chunks_do_not_matter(monkeypatch):
    data = draws(6, 1, 50)
    narrow, wide = bootstrap(data, level=0.5), bootstrap(data, level=0.99)
    assert wide.low < narrow.low <= narrow.mean <= narrow.high < wide.high
    monkeypatch.setattr("evisrag_jax.evaluation.statistics._CHUNK_CELLS", 700)
    assert bootstrap(data, level=0.5) == narrow


def test_pairing_removes_what_the_questions_share():
    """B differs from A on 10 of 200 questions only: sd of the difference sqrt(.05-.0025)/sqrt(200)."""
    a = [0, 1] * 100
    b = list(a)
    for i in range(0, 20, 2):
        b[i] = 1  # ten more right
    found = paired_difference([run(b)], [run(a)], seed=3)
    assert found.difference == pytest.approx(0.05, abs=1e-12)
    assert found.p_not_better < 1e-3
    side = 1.96 * np.sqrt(0.05 - 0.05**2) / np.sqrt(200)
    assert abs((found.high - found.low) / 2 - side) < 0.004
    back = paired_difference([run(a)], [run(b)], seed=3)
    assert back.p_not_better == 1.0 and back.difference == pytest.approx(-0.05, abs=1e-12)


def test_equal_systems_are_never_better():
    data = draws(8, 3, 40)
    found = paired_difference(data, data[:1] * 2)
    assert found.runs == 3 and found.baseline_runs == 2
    same = paired_difference(data[:1], data[:1])
    assert (same.difference, same.low, same.high, same.p_not_better) == (0.0, 0.0, 0.0, 1.0)


def test_runs_with_other_questions_are_refused_by_name():
    """B68: a dropped question must not make a system look better."""
    short = run([1, 1])
    with pytest.raises(ValueError, match="'q2'.*score missing answers as 0"):
        bootstrap([run([1, 1, 0]), short])
    with pytest.raises(ValueError, match="'q2'"):
        paired_difference([short], [run([1, 1, 0])])


def test_nothing_to_resample_is_refused():
    for runs in ([], [{}]):
        with pytest.raises(ValueError):
            bootstrap(runs)
    with pytest.raises(ValueError, match="each system"):
        paired_difference([run([1])], [])
    with pytest.raises(ValueError, match="not finite"):
        bootstrap([run([float("nan")])])
    with pytest.raises(ValueError, match="level=1"):
        bootstrap([run([1, 0])], level=1.0)
