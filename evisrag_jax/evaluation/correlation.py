"""Correlation of two values of the same responses, with a bootstrap interval over questions.

Responses to one question share its pages and are not independent: a resample draws questions and
takes all responses of each. It is held as weights, how often each response was drawn, so that ranks
and moments of all resamples are array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int64

from evisrag_jax.evaluation.statistics import RESAMPLES, percentiles
from evisrag_jax.runtime.host_random import philox

Kind = Literal["pearson", "spearman"]
_CHUNK_CELLS = 1_000_000  # weights of resamples held at once


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient and its percentile interval.

    kind: pearson, or spearman (of ranks, ties at their mean rank; ranked anew in each resample).
    value: None for fewer than three pairs, or where one side does not vary.
    low, high: None without a value, or with fewer than two questions.
    responses, questions: pairs that were used, and their questions.  left_out: pairs that lack a side.
    level, resamples: how the interval was made.  constant: resamples without a coefficient, because a
        side did not vary; the interval is over the others.
    """

    kind: Kind
    value: float | None
    low: float | None
    high: float | None
    responses: int
    questions: int
    left_out: int
    level: float
    resamples: int
    constant: int


def correlate(
    x: Sequence[float | int | bool | None],
    y: Sequence[float | int | bool | None],
    questions: Sequence[str],
    *,
    kind: Kind = "pearson",
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> Correlation:
    """Correlation of x and y over responses.

    Args:
        x, y: a value for each response; a pair with a None or NaN is left out and counted.
        questions: the question id of each response.
        resamples, level, seed: of the bootstrap.

    Raises:
        ValueError: another kind, values of different numbers, or an infinite one.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: one of {', '.join(get_args(Kind))}")
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"resamples={resamples} must be positive, level={level} inside (0, 1)")
    if not len(x) == len(y) == len(questions):
        raise ValueError(f"{len(x)} and {len(y)} values of {len(questions)} responses")
    pairs = np.array([x, y], dtype=np.float64).reshape(2, -1)  # None becomes NaN
    if np.isinf(pairs).any():
        raise ValueError("a value is infinite")
    whole = ~np.isnan(pairs).any(0)
    names, owner = np.unique(np.asarray(questions, dtype=str)[whole], return_inverse=True)
    used = _Pairs(*pairs[:, whole], kind=kind)
    value = low = high = None
    constant = 0
    if len(owner) >= 3:
        value = _number(used.coefficients(np.ones((1, len(owner))))[0])
    if value is not None and len(names) >= 2:
        draws = _draws(used, owner, len(names), resamples, philox(seed, "correlation"))
        constant = int(np.isnan(draws).sum())
        if constant < resamples:
            low, high = percentiles(draws[~np.isnan(draws)], level)
    return Correlation(
        kind=kind,
        value=value,
        low=low,
        high=high,
        responses=len(owner),
        questions=len(names),
        left_out=int((~whole).sum()),
        level=level,
        resamples=resamples,
        constant=constant,
    )


class _Pairs:
    """Values [N] of two sides, whose coefficient is taken under weights."""

    def __init__(self, *sides: Float64[np.ndarray, " N"], kind: Kind) -> None:
        self.sides, self.kind = sides, kind
        self.orders = [np.unique(side, return_inverse=True)[1] for side in sides]

    def coefficients(self, weights: Float64[np.ndarray, "R N"]) -> Float64[np.ndarray, " R"]:
        """One a row of weights (numbers of copies); NaN where a side does not vary."""
        sides = self.sides
        if self.kind == "spearman":
            sides = [_mean_ranks(order, weights) for order in self.orders]
        size = weights.sum(1, keepdims=True)
        centred = [side - (weights * side).sum(1, keepdims=True) / size for side in sides]
        a, b = ((weights * side**2).sum(1) for side in centred)
        # What rounding leaves of equal values is not variation.
        floors = [1e-24 * (weights * side**2).sum(1) for side in sides]
        varies = (a > floors[0]) & (b > floors[1])
        product = (weights * centred[0] * centred[1]).sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = product / np.sqrt(a * b)
        return np.where(varies, np.clip(found, -1, 1), np.nan)


def _mean_ranks(
    order: Int64[np.ndarray, " N"], weights: Float64[np.ndarray, "R N"]
) -> Float64[np.ndarray, "R N"]:
    """Ranks from 1 among all copies; `order` numbers the distinct values from the smallest."""
    by_value = np.argsort(order, kind="stable")
    first = np.searchsorted(order[by_value], np.arange(order.max() + 1))
    copies = np.add.reduceat(weights[:, by_value], first, axis=1)
    ranks = np.cumsum(copies, axis=1) - (copies - 1) / 2
    return ranks[:, order]


def _draws(
    pairs: _Pairs,
    owner: Int64[np.ndarray, " N"],
    questions: int,
    resamples: int,
    rng: np.random.Generator,
) -> Float64[np.ndarray, " R"]:
    chunk = max(1, _CHUNK_CELLS // len(owner))
    parts = []
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        times = rng.multinomial(questions, np.full(questions, 1 / questions), size=size)
        parts.append(pairs.coefficients(times[:, owner].astype(np.float64)))
    return np.concatenate(parts)


def _number(value: np.floating) -> float | None:
    return None if np.isnan(value) else float(value)
