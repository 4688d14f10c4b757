"""Which groups are worth a training step, and how a batch is filled with them (dynamic sampling).

    rule        keeps a group when                                         source
    none        always
    mean_band   low < mean of the reward < high (both strict)              released code, DAPO
    variance    some channel differs between the group's responses         a group without it has
                                                                           only zero advantages
    both        both hold

The band alone keeps constant groups whose level lies inside it; the variance rule alone keeps
groups at any level, however rarely they are right.

    carried from the last step ─┐
    round 1, 2, … of rollouts ──┴─► kept groups: the first P train, the surplus is carried on
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

RULES = ("none", "mean_band", "variance", "both")
SURPLUS = ("carry", "discard")
MAX_TRIES = 1000  # a step's rollouts are numbered below this in their random keys


@dataclass(frozen=True)
class FilterConfig:
    """rule: one of `RULES`.  metric: whose mean the band is about, "overall" (the sum of the paid channels;
    released) or a channel (DAPO: the answer's).  low, high: the open band (released: 0.01 and 6.9 of at
    most 7; DAPO: 0.01 and 0.99 of at most 1).  min_spread: smallest max - min of a channel that counts as
    a difference.  tries: rollouts of P prompts at most until P groups are kept.  surplus: groups kept
    beyond P "carry" over to the next step, as answers of an earlier policy, or are "discard"ed (released).
    train_on_partial: after the last try the step trains on what it has, in a batch with empty rows; off,
    it ends with a `ShortBatch`.
    """

    rule: str = "none"
    metric: str = "overall"
    low: float = 0.01
    high: float = 6.9
    min_spread: float = 1e-6
    tries: int = 20
    surplus: str = "carry"
    train_on_partial: bool = False

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r}; one of {', '.join(RULES)}")
        if self.surplus not in SURPLUS:
            raise ValueError(f"surplus={self.surplus!r}; one of {', '.join(SURPLUS)}")
        if not self.low < self.high:
            raise ValueError(f"an empty band: low={self.low}, high={self.high}")
        if self.min_spread < 0:
            raise ValueError(f"min_spread={self.min_spread}; not negative")
        if not 1 <= self.tries <= MAX_TRIES:
            raise ValueError(f"tries={self.tries} must lie in 1..{MAX_TRIES}")

    @property
    def active(self) -> bool:
        """Whether any group can be dropped."""
        return self.rule != "none"


class ShortBatch(RuntimeError):
    """Dynamic sampling used up its tries; the message has the keep rate and what groups were like."""


@dataclass(frozen=True)
class FilterResult:
    """keep [P]; mean [P] of the overall reward; spread [P], the largest max - min of a channel;
    reasons: for each group "", or why it is dropped: "low", "high", "constant".
    """

    keep: Bool[np.ndarray, " P"]
    mean: Float[np.ndarray, " P"]
    spread: Float[np.ndarray, " P"]
    reasons: tuple[str, ...]

    def summary(self) -> dict[str, float]:
        """Counts of kept and dropped groups by reason, and the mean level and spread."""
        groups = len(self.reasons)
        counts = {reason: self.reasons.count(reason) for reason in ("low", "high", "constant")}
        return {
            "groups": float(groups),
            "kept": float(self.keep.sum()),
            **{f"dropped_{reason}": float(count) for reason, count in counts.items()},
            "mean": float(self.mean.mean()) if groups else 0.0,
            "spread": float(self.spread.mean()) if groups else 0.0,
        }


def filter_groups(
    rewards: Float[np.ndarray, "P G C"],
    valid: Bool[np.ndarray, "P G"],
    config: FilterConfig,
    channel: int | None = None,
) -> FilterResult:
    """Judge every group of a batch; keeping none of them is a result, not an error.

    Args:
      rewards: values of the channels that count; their sum over C is the overall reward.
      channel: the one that the band is about; None for the overall reward.
      valid: the responses that exist. A group without any is dropped as "constant".
    """
    shown = valid[..., None]
    count = np.maximum(valid.sum(1), 1)
    level = rewards.sum(-1, dtype=np.float64) if channel is None else rewards[..., channel]
    mean = np.where(valid, level, 0.0).sum(1) / count
    high = np.where(shown, rewards, -np.inf).max(1, initial=-np.inf)
    low = np.where(shown, rewards, np.inf).min(1, initial=np.inf)
    spread = np.where(valid.any(1), (high - low).max(-1, initial=-np.inf), 0.0).astype(np.float64)
    reasons = []
    for level, width in zip(mean.tolist(), spread.tolist(), strict=True):
        reason = ""
        if config.rule in ("variance", "both") and not width > config.min_spread:
            reason = "constant"
        elif config.rule in ("mean_band", "both") and not level > config.low:
            reason = "low"
        elif config.rule in ("mean_band", "both") and not level < config.high:
            reason = "high"
        reasons.append(reason)
    keep = np.asarray([reason == "" for reason in reasons], bool)
    return FilterResult(keep, mean, spread, tuple(reasons))
