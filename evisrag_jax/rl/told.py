"""What processes tell each other of a rollout: arrays of fixed shapes, enough to choose a batch by.

    process 0   judged rows 0 1 ─┐             rewards, lengths, flags of rows 0 1 2 3 in every process
    process 1   judged rows 2 3 ─┴─ tell ─►    and, where groups may move to another row, ids and masks

From there on all processes compute the same: which groups are kept, in which rows, and the metrics. With
one process nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt8

from evisrag_jax.prompts.sections import TAGS
from evisrag_jax.rl import scopes
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.runtime.processes import gather
from evisrag_jax.training.batching import Prepared

FINISHES = ("stop", "length", "error")


@dataclass
class Judged:
    """A prompt with its completions, their channel values, scope masks, and which tags were found (none
    are known of a group that another process sampled).  position: in the stream's line.  step: of
    `rl.steps`, whose own channel alone is paid, or ""."""

    item: Prepared
    completions: list[Completion]
    rewards: list[dict[str, float]]
    masks: Bool[np.ndarray, "G C T"]
    found: list[dict[str, bool]]
    position: int = 0
    step: str = ""

    @property
    def valid(self) -> list[bool]:
        """The completions that exist: their logits were finite to the end."""
        return [done.finish != "error" for done in self.completions]


class Moved(NamedTuple):
    """What an update needs of a group beside its prompt. masks: bits, eight tokens a byte."""

    ids: Int32[np.ndarray, "P G T"]
    logp: Float32[np.ndarray, "P G T"]
    masks: UInt8[np.ndarray, "P G C bytes"]


class Told(NamedTuple):
    """A round of all processes, in the order of their rows.

    finish: index into FINISHES.  found: by TAGS.  moved: None where rows stay where they are.
    """

    position: Int32[np.ndarray, " P"]
    rewards: Float32[np.ndarray, "P G C"]
    length: Int32[np.ndarray, "P G"]
    finish: UInt8[np.ndarray, "P G"]
    degenerate: Bool[np.ndarray, "P G"]
    found: Bool[np.ndarray, "P G tags"]
    moved: Moved | None

    @property
    def valid(self) -> Bool[np.ndarray, "P G"]:
        """The responses that exist."""
        return self.finish != FINISHES.index("error")


def tell(judged: Sequence[Judged], rl: RLConfig, *, moves: bool) -> Told:
    """The groups of every process, told to all. `moves`: with all that another process needs to train on
    them."""
    done = [group.completions for group in judged]

    def array(values: Any, dtype: Any) -> np.ndarray:
        return np.array([[values(c) for c in group] for group in done], dtype)

    names = rl.reward.channels
    mine = Told(
        position=np.array([group.position for group in judged], np.int32),
        rewards=np.array([[[r[n] for n in names] for r in g.rewards] for g in judged], np.float32),
        length=array(lambda c: c.length, np.int32),
        finish=array(lambda c: FINISHES.index(c.finish), np.uint8),
        degenerate=array(lambda c: c.degenerate, bool),
        found=np.array([[[f[tag] for tag in TAGS] for f in g.found] for g in judged], bool),
        moved=_moved(judged, rl.max_tokens) if moves else None,
    )
    whole = gather(mine)
    flat = [None if a is None else _rows(a) for a in whole[:-1]]
    return Told(*flat, None if whole.moved is None else Moved(*map(_rows, whole.moved)))


def _rows(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1, *a.shape[2:])


def _moved(judged: Sequence[Judged], width: int) -> Moved:
    ids = np.zeros((len(judged), len(judged[0].completions), width), np.int32)
    logp = np.zeros(ids.shape, np.float32)
    for p, group in enumerate(judged):
        for g, done in enumerate(group.completions):
            ids[p, g, : done.length] = done.ids
            logp[p, g, : done.length] = done.logp
    return Moved(ids, logp, np.packbits(np.stack([g.masks for g in judged]), axis=-1))


def rebuild(item: Prepared, told: Told, row: int, rl: RLConfig) -> Judged:
    """A group that another process sampled, without its text; `item` is its record, prepared here."""
    moved, names = told.moved, rl.reward.channels
    completions = [
        Completion(
            ids=moved.ids[row, g, : told.length[row, g]],
            logp=moved.logp[row, g, : told.length[row, g]],
            text="",
            offsets=np.zeros((told.length[row, g], 2), np.int32),
            finish=FINISHES[told.finish[row, g]],
            length=int(told.length[row, g]),
            degenerate=bool(told.degenerate[row, g]),
        )
        for g in range(told.length.shape[1])
    ]
    rewards = [dict(zip(names, values.tolist(), strict=True)) for values in told.rewards[row]]
    masks = np.unpackbits(moved.masks[row], axis=-1, count=rl.max_tokens).astype(bool)
    return Judged(item, completions, rewards, masks, [], int(told.position[row]))


def rollout_metrics(rounds: Sequence[Told], rl: RLConfig) -> dict[str, float]:
    """Means over everything sampled in all processes, before filter and masks."""
    rewards, length, finish, degenerate, found = (
        np.concatenate([getattr(one, name) for one in rounds])
        for name in ("rewards", "length", "finish", "degenerate", "found")
    )
    wide = rewards.astype(np.float64)
    overall = wide.sum(-1)
    rows = [dict(zip(TAGS, one, strict=True)) for one in found.reshape(-1, len(TAGS)).tolist()]
    return {
        **{f"reward/{n}": float(wide[..., c].mean()) for c, n in enumerate(rl.reward.channels)},
        "reward/overall": float(overall.mean()),
        "reward/group_spread": float(np.ptp(overall, axis=1).mean()),
        "rollout/length_mean": float(length.mean()),
        "rollout/length_max": float(length.max()),
        "rollout/clipped_ratio": float((finish == FINISHES.index("length")).mean()),
        "rollout/failed": float((finish == FINISHES.index("error")).sum()),
        "rollout/degenerate": float(degenerate.mean()),
        **scopes.found_rates(rows),
    }
