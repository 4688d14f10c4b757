"""Which prompts are worth training on: by how many of n completions of the SFT model are right.

The filter follows Polaris (EVisRAG appendix A.2): prompts that are always right go, those that are never
right go on request, and of the rest a share is drawn so that most are hard but solvable. With p the
share of right completions the weight of a level is

    w(p) = (1 - p)^gamma           for 0 < p < 1
    w(0) = w(1 - 1/n) = (1/n)^gamma   never solved: as rare as what is nearly always solved

    n = 4, gamma = 2     p    0     1/4    2/4    3/4      a mirrored J: high where it is hard,
                         w   .06    .56    .25    .06      its hook at what was never solved

and levels are filled in proportion to it as far as they have prompts. A draw is by name: it depends on
the seed and the prompt's id alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from evisrag_jax.runtime.host_random import check_seed, text_hash

ORDERS = ("easy_to_hard", "by_name")


@dataclass(frozen=True)
class DifficultyConfig:
    """What happens to GRPO prompts.

    samples: n completions a prompt; 0 leaves the whole stage out.  drop_solved, drop_unsolved: drop
    prompts that are always, or never, right.  share: of the rest, how many are drawn by weight; 1
    keeps all.  gamma: of the weight.  order: "easy_to_hard" (by p, falling) or "by_name" (no order:
    that of the ids' hashes).
    """

    samples: int = 8
    drop_solved: bool = True
    drop_unsolved: bool = False
    share: float = 0.75
    gamma: float = 2.0
    order: str = "easy_to_hard"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 0 or self.samples == 1:
            raise ValueError(f"difficulty.samples={self.samples}; 0 (off), or at least 2")
        if not 0 < self.share <= 1:
            raise ValueError(f"difficulty.share={self.share} is outside (0, 1]")
        if not self.gamma >= 0:
            raise ValueError(f"difficulty.gamma={self.gamma} is negative")
        if self.order not in ORDERS:
            raise ValueError(f"difficulty.order={self.order!r}; one of {', '.join(ORDERS)}")
        check_seed(self.seed)


def weight(right: int, samples: int, gamma: float) -> float:
    """w(right / samples); ValueError for a prompt that is always right, which has no place."""
    if not 0 <= right < samples:
        raise ValueError(f"{right} of {samples} right: no level of the distribution")
    return ((samples - right) / samples if right else 1 / samples) ** gamma


def quotas(counts: Mapping[int, int], total: int, samples: int, gamma: float) -> dict[int, int]:
    """How many prompts of each level are drawn.

    Args:
        counts: prompts a level; a level is a number of right completions.
        total: prompts to draw, at most all of them.
        samples, gamma: as in `weight`.

    Levels that have too few prompts give all, and the others share the rest in proportion to their
    weights. Parts of a prompt go to the largest remainders, the harder level first where equal.
    """
    if total > sum(counts.values()):
        raise ValueError(f"{total} of {sum(counts.values())} prompts cannot be drawn")
    taken: dict[int, int] = {}
    while True:
        left = [level for level in counts if level not in taken]
        room = total - sum(taken.values())
        weights = {level: weight(level, samples, gamma) for level in left}
        whole = sum(weights.values())
        wanted = {level: room * weights[level] / whole for level in left}
        full = [level for level in left if wanted[level] >= counts[level]]
        if not full:
            break
        taken |= {level: counts[level] for level in full}
    down = {level: int(wanted[level]) for level in left}
    rest = room - sum(down.values())
    by_remainder = sorted(left, key=lambda level: (down[level] - wanted[level], level))
    for level in by_remainder[:rest]:
        down[level] += 1
    return {level: (taken | down)[level] for level in sorted(counts)}


@dataclass(frozen=True)
class Selection:
    """ids: of the prompts kept, in their order.  dropped: id → reason, "solved", "unsolved" or
    "not_drawn".  counts, drawn: prompts a level, before and after the draw."""

    ids: tuple[str, ...]
    dropped: dict[str, str]
    counts: dict[int, int]
    drawn: dict[int, int]


def select(right: Mapping[str, int], config: DifficultyConfig) -> Selection:
    """The prompts to train on; `right` has the right completions of each of `config.samples`."""
    n = config.samples
    dropped: dict[str, str] = {}
    for id, count in right.items():
        if not 0 <= count <= n:
            raise ValueError(f"prompt {id!r}: {count} of {n} completions right")
        if count == n and config.drop_solved:
            dropped[id] = "solved"
        elif count == 0 and config.drop_unsolved:
            dropped[id] = "unsolved"

    def name(id: str) -> tuple[int, str]:
        return text_hash(f"{config.seed} {id}"), id

    solved = [id for id, count in right.items() if count == n and id not in dropped]
    levels: dict[int, list[str]] = {}
    for id, count in right.items():
        if id not in dropped and count < n:
            levels.setdefault(count, []).append(id)
    counts = {level: len(ids) for level, ids in sorted(levels.items())}
    drawn = dict(counts)
    if config.share < 1 and counts:
        total = max(1, round(config.share * sum(counts.values())))
        drawn = quotas(counts, total, n, config.gamma)
    kept = list(solved)
    for level, ids in levels.items():
        ids.sort(key=name)
        kept += ids[: drawn[level]]
        dropped |= dict.fromkeys(ids[drawn[level] :], "not_drawn")
    if config.order == "easy_to_hard":
        kept.sort(key=lambda id: (-right[id], name(id)))
    else:
        kept.sort(key=name)
    return Selection(
        ids=tuple(kept),
        dropped=dropped,
        counts=dict(sorted(Counter(right.values()).items())),
        drawn=dict(sorted(Counter(right[id] for id in kept).items())),
    )
