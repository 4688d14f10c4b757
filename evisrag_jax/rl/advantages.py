"""Group advantages: what a response, or a span of it, is worth against its own group.

    estimator   input       normalised per                  result        source
    code        [P, G, C]   group and channel               [P, G, C]     the released code
    paper       [P, G, C]   group and scope (or index)      [P, G, T]     EVisRAG eq. 7-9
    grpo, rloo  [P, G, C]   group, after summing channels   [P, G]        plain GRPO, leave-one-out

All in float32, standard deviation with n - 1, divided by (std + 1e-6), or by nothing with `scale`
off (Dr.GRPO). `valid` marks the responses
that exist (a padded row has none). A group without spread, or with fewer than two responses, gets
exact zeros, never NaN. Grouping is by id (`group_by_id`), never by position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from evisrag_jax.rewards.evisrag import PAPER_CHANNELS

EPSILON = 1e-6


def zscore(
    values: Float[Array, "*B"],
    valid: Bool[Array, "*B"],
    *,
    axis: int,
    eps: float = EPSILON,
    exact_zero: bool = True,
    scale: bool = True,
) -> Float[Array, "*B"]:
    """(value - mean) / (std + eps) over the valid entries of an axis; 0 elsewhere.

    Args:
      values, valid: equal shapes. Invalid entries take no part and get 0.
      axis: the group axis.
      exact_zero: give exactly 0 where all valid entries are equal. Without it a rounded float32
        mean leaves up to about 0.3 there (seven times 6.8), as in the released code.
      scale: off leaves the deviation undivided.
    """
    values = values.astype(jnp.float32)
    count = jnp.sum(valid, axis, keepdims=True)
    mean = jnp.sum(values, axis, where=valid, keepdims=True) / jnp.maximum(count, 1)
    centred = jnp.where(valid, values - mean, 0.0)
    variance = jnp.sum(jnp.square(centred), axis, keepdims=True) / jnp.maximum(count - 1, 1)
    has_signal = count >= 2
    if exact_zero:
        high = jnp.max(values, axis, where=valid, initial=-jnp.inf, keepdims=True)
        low = jnp.min(values, axis, where=valid, initial=jnp.inf, keepdims=True)
        has_signal &= high > low
    spread = jnp.sqrt(variance) + eps if scale else 1.0
    return jnp.where(has_signal, centred / spread, 0.0)


def code_advantages(
    rewards: Float[Array, "P G C"],
    valid: Bool[Array, "P G"],
    *,
    eps: float = EPSILON,
    exact_zero: bool = True,
    scale: bool = True,
) -> Float[Array, "P G C"]:
    """Every channel normalised on its own within its group (released estimator "router")."""
    shown = jnp.broadcast_to(valid[..., None], rewards.shape)
    return zscore(rewards, shown, axis=1, eps=eps, exact_zero=exact_zero, scale=scale)


def grpo_advantages(
    rewards: Float[Array, "P G C"],
    valid: Bool[Array, "P G"],
    *,
    eps: float = EPSILON,
    exact_zero: bool = True,
    scale: bool = True,
) -> Float[Array, "P G"]:
    """Plain GRPO: the channels summed, then one z-score a group."""
    total = jnp.sum(rewards, -1)
    return zscore(total, valid, axis=1, eps=eps, exact_zero=exact_zero, scale=scale)


def rloo_advantages(
    rewards: Float[Array, "P G C"], valid: Bool[Array, "P G"]
) -> Float[Array, "P G"]:
    """Leave-one-out: the summed reward minus the mean of the group's other responses."""
    total = jnp.where(valid, jnp.sum(rewards, -1, dtype=jnp.float32), 0.0)
    count = jnp.sum(valid, 1, keepdims=True)
    others = (jnp.sum(total, 1, keepdims=True) - total) / jnp.maximum(count - 1, 1)
    return jnp.where(valid & (count >= 2), total - others, 0.0)


def paper_advantages(
    rewards: Float[Array, "P G C"],
    masks: Bool[Array, "P G C T"],
    valid: Bool[Array, "P G"],
    *,
    channels: Sequence[str] = PAPER_CHANNELS,
    paid: Sequence[str] | None = None,
    align: str = "scope",
    scoped: bool = True,
    eps: float = EPSILON,
    exact_zero: bool = True,
    scale: bool = True,
) -> Float[Array, "P G T"]:
    """Token advantages from the mean of the channels in scope (EVisRAG eq. 7-9).

    A token's channels, by the section it stands in (masks of `scopes.scope_masks`, mode "paper"):

        section            perception   derivation   format and others
        observe, evidence      x                            x
        think, answer                       x               x
        none                                                x

    A token that straddles two sections counts for the later one.

    Args:
      rewards: of `channels`, perception and derivation among them.
      masks: tokens of the channels; format covers the response.
      paid: the channels that count; None for all. A scope none of whose channels counts gets 0.
      align: "scope": each response has one mean reward a scope, normalised over the responses that
        have the scope, and given to all its tokens. "index": eq. 9 to the letter: at token index t
        over the responses that have a token t.
      scoped: off gives every token all channels.

    Returns zeros outside the responses, in groups without spread, and where fewer than two
    responses take part.
    """
    if align not in ("scope", "index"):
        raise ValueError(f"align={align!r}; scope or index")
    rewards = rewards.astype(jnp.float32)
    row = {name: i for i, name in enumerate(channels)}
    response = masks[:, :, row["format"]] & valid[..., None]
    if scoped:
        derived = masks[:, :, row["derivation"]] & response
        seen = masks[:, :, row["perception"]] & response & ~derived
        scopes = jnp.stack([seen, derived, response & ~seen & ~derived], axis=2)  # [P, G, S, T]
        left_out = ({"derivation"}, {"perception"}, {"perception", "derivation"})
    else:
        scopes, left_out = response[:, :, None], ({},)
    counts = np.array(
        [
            [name not in out and (paid is None or name in paid) for name in channels]
            for out in left_out
        ],
        np.float32,
    )
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)  # [S, C]
    means = jnp.einsum("PGC,SC->PGS", rewards, share, precision="highest")
    options = {"axis": 1, "eps": eps, "exact_zero": exact_zero, "scale": scale}
    if align == "scope":
        value = zscore(means, jnp.any(scopes, -1), **options)
        return jnp.sum(value[..., None] * scopes, axis=2)
    value = jnp.sum(means[..., None] * scopes, axis=2)  # [P, G, T]
    return zscore(value, response, **options)


def to_tokens(
    advantages: Float[Array, "P G C"], masks: Bool[Array, "P G C T"]
) -> Float[Array, "P G C T"]:
    """A[p, g, c] on the tokens of channel c, 0 elsewhere: what the policy loss takes."""
    return advantages[..., None] * masks


@dataclass(frozen=True)
class Groups:
    """Rows of a flat batch arranged as groups.

    ids     [P]     the group ids, in order of first appearance
    index   [P, G]  row of the flat batch (0 where invalid)
    valid   [P, G]  False on padding, where a group has fewer than G rows
    """

    ids: tuple[str, ...]
    index: Int[np.ndarray, "P G"]
    valid: Bool[np.ndarray, "P G"]

    def gather(self, rows: np.ndarray | Array) -> np.ndarray:
        """[B, ...] -> [P, G, ...]; padding repeats row 0."""
        return np.asarray(rows)[self.index]

    def scatter(self, grouped: np.ndarray | Array) -> np.ndarray:
        """[P, G, ...] -> [B, ...], the inverse of `gather` on the valid entries."""
        grouped = np.asarray(grouped)
        rows = np.zeros((int(self.valid.sum()), *grouped.shape[2:]), grouped.dtype)
        rows[self.index[self.valid]] = grouped[self.valid]
        return rows


def group_by_id(ids: Sequence[str], *, size: int | None = None) -> Groups:
    """Arrange rows by group id, whatever their order.

    Args:
      ids: the group id of each row: one id a prompt occurrence (`occurrence_ids`), never its text,
        since two prompts may share a text and differ in their pages.
      size: responses a group (G); None takes the largest group.

    Raises ValueError, naming the id, for a group of one (it has no baseline) or above `size`.
    """
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(ids):
        rows.setdefault(key, []).append(row)
    width = max(map(len, rows.values()), default=2) if size is None else size
    index = np.zeros((len(rows), width), np.int32)
    valid = np.zeros((len(rows), width), bool)
    for place, (key, members) in enumerate(rows.items()):
        if len(members) < 2:
            raise ValueError(f"group {key!r} has one response; a group needs at least two")
        if len(members) > width:
            raise ValueError(
                f"group {key!r} has {len(members)} responses, more than {width}: "
                "two occurrences of one prompt need different ids"
            )
        index[place, : len(members)] = members
        valid[place, : len(members)] = True
    return Groups(tuple(rows), index, valid)


def occurrence_ids(ids: Sequence[str]) -> list[str]:
    """Ids that tell apart repeated prompts of one batch: the second "q7" becomes "q7#2"."""
    seen: dict[str, int] = {}
    out = []
    for key in ids:
        seen[key] = seen.get(key, 0) + 1
        out.append(key if seen[key] == 1 else f"{key}#{seen[key]}")
    return out
