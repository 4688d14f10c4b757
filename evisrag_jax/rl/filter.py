"""Which groups are worth a training step: by the level of their reward, by its spread, or by both.

    rule        keeps a group when                                         source
    mean_band   low < mean of the overall reward < high (both strict)      released code
    variance    some channel differs between the group's responses         a group without it has
                                                                           only zero advantages
    both        both hold                                                  default

The band alone keeps constant groups whose level lies inside it; the variance rule alone keeps
groups at any level, however rarely they are right.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

RULES = ("mean_band", "variance", "both")


@dataclass(frozen=True)
class FilterConfig:
    """rule: one of `RULES`; low, high: the open band of the mean overall reward (released: 0.01
    and 6.9 of at most 7); min_spread: smallest max - min of a channel that counts as a difference.
    """

    rule: str = "both"
    low: float = 0.01
    high: float = 6.9
    min_spread: float = 1e-6

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r}; one of {', '.join(RULES)}")
        if not self.low < self.high:
            raise ValueError(f"an empty band: low={self.low}, high={self.high}")
        if self.min_spread < 0:
            raise ValueError(f"min_spread={self.min_spread}; not negative")


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
    rewards: Float[np.ndarray, "P G C"], valid: Bool[np.ndarray, "P G"], config: FilterConfig
) -> FilterResult:
    """Judge every group of a batch; keeping none of them is a result, not an error.

    Args:
      rewards: channel values; their sum over C is the overall reward.
      valid: the responses that exist. A group without any is dropped as "constant".
    """
    shown = valid[..., None]
    count = np.maximum(valid.sum(1), 1)
    mean = np.where(valid, rewards.sum(-1, dtype=np.float64), 0.0).sum(1) / count
    high = np.where(shown, rewards, -np.inf).max(1, initial=-np.inf)
    low = np.where(shown, rewards, np.inf).min(1, initial=np.inf)
    spread = np.where(valid.any(1), (high - low).max(-1, initial=-np.inf), 0.0).astype(np.float64)
    reasons = []
    for level, width in zip(mean.tolist(), spread.tolist(), strict=True):
        reason = ""
        if config.rule != "mean_band" and not width > config.min_spread:
            reason = "constant"
        elif config.rule != "variance" and not level > config.low:
            reason = "low"
        elif config.rule != "variance" and not level < config.high:
            reason = "high"
        reasons.append(reason)
    keep = np.asarray([reason == "" for reason in reasons], bool)
    return FilterResult(keep, mean, spread, tuple(reasons))
