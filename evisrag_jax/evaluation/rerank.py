"""Offline rerank: one of N candidate answers a sample is chosen by a score, and what that changes.

    candidates of a sample   0     1     2     3
    score                   .50   .80   .80   .10
    answer log-prob        -2.0  -1.5  -0.7  -0.3
    chosen by score                     x            the higher log-prob of the two best
    chosen by log-prob                        x      what the score has to beat

Source: Evidence-RL, table A.11 (CED spec 1.7). Its text leaves open, and this project decides: scores within
1e-9 of the best are equal, as the spec's bound for a constant reward has it; of equal log-probs the
earlier candidate is taken; "top-1" is candidate 0, the first one sampled, and is reported beside the choice
by log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer

EQUAL = 1e-9  # scores that differ by no more are a tie; so is a constant reward's range


@dataclass(frozen=True)
class Choices:
    """What choosing gives on some of the samples; shares are None where there is no sample.

    Attributes:
        samples: how many.
        accuracy: share that is right with the candidate chosen by score.
        logprob, top1: with the one of the highest answer log-prob, with candidate 0.
        random: with one drawn at random, in expectation.
        oracle: share with a right candidate at all.
        wins, losses: samples right by score and wrong by log-prob, and the other way round.
    """

    samples: int
    accuracy: float | None
    logprob: float | None
    top1: float | None
    random: float | None
    oracle: float | None
    wins: int
    losses: int


@dataclass(frozen=True, eq=False)
class Reranked:
    """A rerank of S samples.

    Attributes:
        chosen: candidate of each sample.
        everything, informative, strong: all samples, those with two distinct texts or more, and those
            with right and wrong candidates.
        rnc: share of samples whose score is not constant over the candidates.
        flip: share whose chosen candidate is not the one of the highest log-prob.
        not_first: share whose chosen candidate is not candidate 0.
    """

    chosen: Integer[np.ndarray, " S"]
    everything: Choices
    informative: Choices
    strong: Choices
    rnc: float
    flip: float
    not_first: float


def rerank(
    scores: Float[np.ndarray, "S N"],
    logp: Float[np.ndarray, "S N"],
    correct: Bool[np.ndarray, "S N"],
    texts: Sequence[Sequence[str]],
) -> Reranked:
    """Chooses a candidate of each sample by its score.

    Args:
        scores: the higher the better.
        logp: answer log-prob of each candidate, for ties and for comparison.
        correct: whether a candidate's answer is right.
        texts: the candidates, normalised as they are to be told apart.

    Raises:
        ValueError: without samples or candidates, for a score or log-prob that is not finite, and for
            texts of another shape; names the place.
    """
    if not scores.size:
        raise ValueError(f"scores of shape {scores.shape}: no candidate to choose")
    for name, values in (("scores", scores), ("logp", logp)):
        if not np.isfinite(values).all():
            sample, candidate = np.argwhere(~np.isfinite(values))[0].tolist()
            raise ValueError(f"{name}[{sample}, {candidate}] is not finite")
    counts = [len(row) for row in texts]
    if counts != [scores.shape[1]] * len(scores):
        raise ValueError(f"texts of {counts} candidates for scores of shape {scores.shape}")
    chosen, likely = choose(scores, logp), logp.argmax(1)
    distinct = np.array([len(set(row)) for row in texts])
    mixed = correct.any(1) & ~correct.all(1)
    return Reranked(
        chosen=chosen,
        everything=_choices(chosen, likely, correct, np.ones(len(scores), bool)),
        informative=_choices(chosen, likely, correct, distinct >= 2),
        strong=_choices(chosen, likely, correct, mixed),
        rnc=float((np.ptp(scores, axis=1) > EQUAL).mean()),
        flip=float((chosen != likely).mean()),
        not_first=float((chosen != 0).mean()),
    )


def choose(
    scores: Float[np.ndarray, "S N"], logp: Float[np.ndarray, "S N"]
) -> Integer[np.ndarray, " S"]:
    """The candidate of the highest score; of equal ones that of the higher log-prob, then the earlier."""
    best = scores >= scores.max(1, keepdims=True) - EQUAL
    return np.where(best, logp, -np.inf).argmax(1)


def _choices(
    chosen: np.ndarray, likely: np.ndarray, correct: np.ndarray, which: np.ndarray
) -> Choices:
    count, right, rows = int(which.sum()), correct[which], np.arange(int(which.sum()))
    ours, theirs = right[rows, chosen[which]], right[rows, likely[which]]
    shares = (ours, theirs, right[:, 0], right, right.any(1))
    means = [float(share.mean()) if count else None for share in shares]
    return Choices(count, *means, int((ours & ~theirs).sum()), int((~ours & theirs).sum()))
