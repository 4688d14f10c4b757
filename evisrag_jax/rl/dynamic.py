"""What dynamic sampling did in a step: its metrics, and the words for a batch that cannot be filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.told import Judged, Told
from evisrag_jax.runtime.timeline import Span


def sampling_metrics(
    rl: RLConfig,
    kept: Sequence[Judged | tuple[int, int]],
    over: tuple[int, int],
    told: Sequence[Told],
    reasons: Counter[str],
    spans: Sequence[Span],
) -> dict[str, float]:
    """What the filter did, what it cost, and what the batch is like behind it (kept/…).

    Args:
      kept: the step's groups, surplus included: carried ones, then (round, row) of fresh ones.
      over: groups carried into the step, and out of it.
      told: the rounds.  reasons: dropped groups by reason.  spans: phases of the rollouts.
    """
    P, names, filter = rl.prompts, rl.reward.channels, rl.filter
    sampled = float(sum(len(one.length) for one in told))
    out = {
        "filter/kept": float(min(P, len(kept))),
        "filter/groups": sampled,
        "filter/rounds": float(len(told)),
        **{f"filter/dropped_{name}": float(n) for name, n in sorted(reasons.items())},
    }
    if not filter.active:
        return out
    fresh = [one for one in kept if not isinstance(one, Judged)]
    used = kept[:P] if filter.surplus == "discard" else kept
    tokens = sum(int(one.length.sum()) for one in told)
    useful = sum(
        int(told[one[0]].length[one[1]].sum()) for one in used if not isinstance(one, Judged)
    )
    seconds = sum(end - begin for name, begin, end in spans if name in ("prefill", "decode"))
    out |= {
        "filter/keep_rate": len(fresh) / max(1.0, sampled),
        "filter/carried_in": float(over[0]),
        "filter/carried_out": float(over[1]),
        "filter/dropped_tokens": float(tokens - useful),
        "time/discarded": seconds * (tokens - useful) / max(1, tokens),
    }
    rewards = [
        np.array([[one[n] for n in names] for one in group.rewards])
        if isinstance(group, Judged)
        else told[group[0]].rewards[group[1]].astype(np.float64)
        for group in kept[:P]
    ]
    if rewards:
        batch = np.stack(rewards)
        out |= {f"kept/{n}": float(batch[..., c].mean()) for c, n in enumerate(names)}
        out["kept/overall"] = float(batch.sum(-1).mean())
    return out


def shortage(
    rl: RLConfig, step: int, carried: int, told: Sequence[Told], reasons: Counter[str]
) -> str:
    """Why a step has too few groups, and what can be done."""
    rewards = np.concatenate([one.rewards for one in told]).astype(np.float64).sum(-1)
    groups = len(rewards)
    kept = groups - sum(reasons.values())
    why = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
    return (
        f"step {step}: {len(told)} rounds kept {kept} of {groups} groups ({kept / groups:.1%}), and "
        f"{carried} were carried over; {rl.prompts} are needed. Dropped: {why}. A group's mean reward is "
        f"{rewards.mean():.3f}, its spread {np.ptp(rewards, axis=1).mean():.3f}. Choose questions that "
        "are sometimes answered, widen rl.filter, raise rl.filter.tries, or set "
        "rl.filter.train_on_partial"
    )
