"""Attention of one new token a slot, where slots of one prompt share its keys and values.

Slots hold responses of different prompts and lengths side by side; a prompt's keys are read once for
all its slots, as a matrix-matrix product:

    slots      0 1 2 3 4        row of each slot     0 0 1 0 1
    members    prompt row 0:  0 1 3 -               queries gathered to rows for the prompt part,
               prompt row 1:  2 4 - -               results scattered back to slots

The two parts meet in one softmax: each comes with its maximum and its sum of exponentials, float32.

Letters: S slots, R resident prompts, W slots a prompt at most, L prompt tokens, T response tokens,
N query heads, K key-value heads, H head width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30


class Seats(NamedTuple):
    """Which slot sits where. `members` has the slots of each row, S (none) where a place is empty;
    `row` and `place` say the same by slot."""

    members: Int[Array, "R W"]
    row: Int[Array, " S"]
    place: Int[Array, " S"]


class _Part(NamedTuple):
    """Σ exp(score - top) · value, Σ exp(score - top) and the largest score, over some of the keys."""

    sum: Array
    weight: Array
    top: Array


def slot_attention(
    q: Float[Array, "S N H"],
    prefix_k: Float[Array, "R K L H"],
    prefix_v: Float[Array, "R K L H"],
    lengths: Int[Array, " R"],
    suffix_k: Float[Array, "S K T H"],
    suffix_v: Float[Array, "S K T H"],
    count: Int[Array, " S"],
    seats: Seats,
) -> Float[Array, "S N H"]:
    """The newest token of each slot attends to its prompt and to its own suffix 0 … count."""
    S, N, H = q.shape
    R, K, L, _ = prefix_k.shape
    W = seats.members.shape[1]
    q = q * H**-0.5
    seated = jnp.take(q, seats.members, axis=0, mode="fill", fill_value=0)  # R W N H
    queries = seated.reshape(R, W, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(R, K, -1, H)
    real = (jnp.arange(L) < lengths[:, None])[:, None, None]
    prompt = _attend(queries, prefix_k, prefix_v, real)

    def to_slots(a):  # [R, K, W·N/K, …] → [S, N, …]
        a = a.reshape(R, K, W, N // K, *a.shape[3:])
        return a[seats.row, :, seats.place].reshape(S, N, *a.shape[4:])

    prompt = _Part(*(to_slots(a) for a in prompt))
    own = (jnp.arange(suffix_k.shape[2]) <= count[:, None])[:, None, None]
    suffix = _attend(q.reshape(S, K, N // K, H), suffix_k, suffix_v, own)
    suffix = _Part(*(a.reshape(S, N, *a.shape[3:]) for a in suffix))
    return _joined(prompt, suffix).astype(q.dtype)


def _attend(q: Array, k: Array, v: Array, seen: Bool[Array, "..."]) -> _Part:
    scores = jnp.einsum("bkqh,bkmh->bkqm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.max(scores, -1)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.einsum(
        "bkqm,bkmh->bkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return _Part(total, jnp.sum(weights, -1), top)


def _joined(a: _Part, b: _Part) -> Array:
    """softmax over both sets of keys; a set of which nothing is seen has no share."""
    top = jnp.maximum(a.top, b.top)
    share_a, share_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    total = a.sum * share_a[..., None] + b.sum * share_b[..., None]
    return total / (a.weight * share_a + b.weight * share_b)[..., None]
