"""Bootstrap intervals over questions and runs, and paired differences between two systems.

    one system     runs x questions -> mean, 95 % interval
    two systems    same questions   -> difference of the means, its interval, P(difference <= 0)

A resample draws runs with replacement, then one set of questions with replacement that all drawn runs
share: questions and runs are crossed (every run answers every question), so drawing questions anew
for each run would average the largest source of variation away. The two systems of a difference keep
their own runs and share the drawn questions, which is what pairs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from evisrag_jax.runtime.host_random import philox

RESAMPLES = 10_000
_CHUNK_CELLS = 2_000_000  # drawn question indices held at once

#: Scores of one run: a value for each question id.
Run = Mapping[str, float]


@dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval.

    Attributes:
        mean: over runs and questions.
        low, high: percentile interval of ``level``.
        std: standard deviation of the run means (n - 1), None for a single run.
        level, resamples: how the interval was made.
        runs, questions: how much it rests on.
    """

    mean: float
    low: float
    high: float
    std: float | None
    level: float
    resamples: int
    runs: int
    questions: int


@dataclass(frozen=True)
class Difference:
    """Mean of a system minus mean of a baseline on the same questions.

    Attributes:
        difference: of the means over runs and questions.
        low, high: percentile interval of ``level``.
        p_not_better: share of resamples with a difference <= 0.
        level, resamples: how the interval was made.
        runs, baseline_runs, questions: how much it rests on.
    """

    difference: float
    low: float
    high: float
    p_not_better: float
    level: float
    resamples: int
    runs: int
    baseline_runs: int
    questions: int


def bootstrap(
    runs: Sequence[Run], *, resamples: int = RESAMPLES, level: float = 0.95, seed: int = 0
) -> Interval:
    """Mean and percentile interval of a metric over runs and questions.

    Args:
        runs: for each run the metric by question id; all runs must hold the same ids.
        resamples, level, seed: of the bootstrap.

    Raises:
        ValueError: without runs or questions, or when the runs hold different ids.
    """
    ids = _common_ids(runs, "run")
    table = _table(runs, ids)
    draws = _resampled_means([table], resamples, level, seed)[0]
    means = table.mean(1)
    low, high = percentiles(draws, level)
    return Interval(
        mean=float(table.mean()),
        low=low,
        high=high,
        std=float(means.std(ddof=1)) if len(runs) > 1 else None,
        level=level,
        resamples=resamples,
        runs=len(runs),
        questions=len(ids),
    )


def paired_difference(
    runs: Sequence[Run],
    baseline: Sequence[Run],
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """``runs`` minus ``baseline``, paired by question id; see ``bootstrap`` for the arguments."""
    ids = _common_ids([*runs, *baseline], "run of the two systems")
    if not runs or not baseline:
        raise ValueError("a difference needs at least one run of each system")
    mine, theirs = _table(runs, ids), _table(baseline, ids)
    first, second = _resampled_means([mine, theirs], resamples, level, seed)
    draws = first - second
    # Means of the same values summed in another order must count as a tie.
    draws = np.where(np.abs(draws) < 1e-12, 0.0, draws)
    low, high = percentiles(draws, level)
    return Difference(
        difference=float(mine.mean() - theirs.mean()),
        low=low,
        high=high,
        p_not_better=float(np.mean(draws <= 0)),
        level=level,
        resamples=resamples,
        runs=len(runs),
        baseline_runs=len(baseline),
        questions=len(ids),
    )


def _common_ids(runs: Sequence[Run], what: str) -> list[str]:
    if not runs:
        raise ValueError("no run to take statistics of")
    ids = set(runs[0])
    for number, run in enumerate(runs[1:], start=2):
        odd = sorted(ids ^ set(run))
        if odd:
            raise ValueError(
                f"{what} {number} and the first hold different questions ({len(odd)}, e.g. "
                f"{odd[0]!r}); score missing answers as 0 instead of leaving them out"
            )
    if not ids:
        raise ValueError("the runs hold no question")
    return sorted(ids)


def _table(runs: Sequence[Run], ids: Sequence[str]) -> Float64[np.ndarray, "R Q"]:
    table = np.array([[run[id] for id in ids] for run in runs], dtype=np.float64)
    if not np.isfinite(table).all():
        raise ValueError("a value is not finite")
    return table


def _resampled_means(
    tables: Sequence[np.ndarray], resamples: int, level: float, seed: int
) -> list[Float64[np.ndarray, " N"]]:
    """Mean of each table [R, Q] under N resamples: own runs each, questions in common."""
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"resamples={resamples} must be positive, level={level} inside (0, 1)")
    questions = tables[0].shape[1]
    rng = philox(seed, "bootstrap")
    chunk = max(1, _CHUNK_CELLS // questions)
    parts: list[list[np.ndarray]] = [[] for _ in tables]
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        drawn = rng.integers(questions, size=(size, questions))
        for table, part in zip(tables, parts, strict=True):
            if len(table) == 1:
                part.append(table[0][drawn].mean(1))
                continue
            times = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=size)
            by_question = times @ table / len(table)
            part.append(np.take_along_axis(by_question, drawn, 1).mean(1))
    return [np.concatenate(part) for part in parts]


def percentiles(draws: Float64[np.ndarray, " N"], level: float) -> tuple[float, float]:
    """The interval of `level` (inside (0, 1)) that leaves equal shares of the draws on both sides."""
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(draws, (tail, 100 - tail))
    return float(low), float(high)
