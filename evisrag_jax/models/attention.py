"""Attention as pure functions: causal, a group over its shared prompt, masked inside images.

Scores and softmax are float32; masked scores are a large negative number, so a row with nothing to
see gives finite values and finite gradients instead of NaN. More than QUERY_BLOCK queries are taken
a block at a time, forward and backward, so that memory grows with the keys and not with their
square (one full-attention layer over a page of 20,000 patches would hold 1.6 GB of scores a head).

Letters: P prompts, G responses, T response tokens, L prompt tokens, S suffix slots, N query heads,
K key-value heads, R = N/K query heads a key-value head, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
QUERY_BLOCK = 512


def causal_attention(
    q: Float[Array, "P L N H"],
    k: Float[Array, "P L K H"],
    v: Float[Array, "P L K H"],
    lengths: Int[Array, " P"],
) -> Float[Array, "P L N H"]:
    """Causal attention over right-padded prompts (queries past the length see real keys only).

    keys      0 1 2 .        length 3, L 4
    query 0   x
    query 1   x x
    query 2   x x x
    query 3   x x x          (padding row: finite, never read)
    """
    L, K = k.shape[1:3]
    real = jnp.arange(L)[None] < lengths[:, None]
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # P K L H

    def attend(block, start):
        P, B, N, H = block.shape
        # [P, K, R·B, H] against [P, K, L, H]: matrix products, batched over prompt and kv head.
        queries = block.reshape(P, B, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(P, K, -1, H)
        scores = jnp.einsum("pkqh,pkmh->pkqm", queries, keys, preferred_element_type=jnp.float32)
        seen = (start + jnp.arange(B)[:, None] >= jnp.arange(L))[None] & real[:, None]
        weights = _softmax((scores * H**-0.5).reshape(P, K, N // K, B, L), seen[:, None, None])
        weights = weights.astype(v.dtype).reshape(P, K, -1, L)
        out = jnp.einsum("pkqm,pkmh->pkqh", weights, values).reshape(P, K, N // K, B, H)
        return out.transpose(0, 3, 1, 2, 4).reshape(P, B, N, H)

    return _by_query_block(attend, q, axis=1)


def group_attention(
    q: Float[Array, "P G T N H"],
    prefix_k: Float[Array, "P L K H"],
    prefix_v: Float[Array, "P L K H"],
    lengths: Int[Array, " P"],
    suffix_k: Float[Array, "P G S K H"],
    suffix_v: Float[Array, "P G S K H"],
    offset: Int[Array, ""] | int,
) -> Float[Array, "P G T N H"]:
    """G responses attend to their one prompt and, causally, to themselves; one softmax over both.

    Query t sits in suffix slot offset + t.

                 prompt keys     suffix slots           length 2, offset 1, T 2
                 0 1 .           0 1 2 .
        query 0  x x             x x
        query 1  x x             x x x

    Exactly the attention of the repeated path: the prompt's keys are read once a prompt, as a
    matrix-matrix product over the group's queries.
    """
    L, K, S = prefix_k.shape[1], prefix_k.shape[2], suffix_k.shape[2]
    prefix_k, prefix_v = (a.transpose(0, 2, 1, 3) for a in (prefix_k, prefix_v))  # P K L H
    suffix_k, suffix_v = (a.transpose(0, 3, 1, 2, 4) for a in (suffix_k, suffix_v))  # P K G S H
    in_prompt = (jnp.arange(L)[None] < lengths[:, None])[:, None, None, None, None, :]

    def attend(block, start):
        P, G, B, N, H = block.shape
        queries = block.reshape(P, G, B, K, N // K, H).transpose(0, 3, 1, 4, 2, 5)  # P K G R B H
        to_prefix = jnp.einsum(
            "pkqh,pklh->pkql",
            queries.reshape(P, K, -1, H),
            prefix_k,
            preferred_element_type=jnp.float32,
        ).reshape(P, K, G, N // K, B, L)
        to_suffix = jnp.einsum(
            "pkgqh,pkgsh->pkgqs",
            queries.reshape(P, K, G, -1, H),
            suffix_k,
            preferred_element_type=jnp.float32,
        ).reshape(P, K, G, N // K, B, S)
        causal = jnp.arange(S)[None] <= jnp.arange(B)[:, None] + start + offset
        seen = jnp.concatenate(
            [
                jnp.broadcast_to(in_prompt, (P, 1, 1, 1, B, L)),
                jnp.broadcast_to(causal, (P, 1, 1, 1, B, S)),
            ],
            -1,
        )
        scores = jnp.concatenate([to_prefix, to_suffix], -1) * H**-0.5
        weights = _softmax(scores, seen).astype(q.dtype)
        over_prefix = weights[..., :L].reshape(P, K, -1, L)
        over_suffix = weights[..., L:].reshape(P, K, G, -1, S)
        out = jnp.einsum("pkql,pklh->pkqh", over_prefix, prefix_v).reshape(queries.shape)
        out = out + jnp.einsum("pkgqs,pkgsh->pkgqh", over_suffix, suffix_v).reshape(out.shape)
        return out.transpose(0, 2, 4, 1, 3, 5).reshape(P, G, B, N, H)

    return _by_query_block(attend, q, axis=2)


def masked_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    mask: Bool[Array, "B S"],
) -> Float[Array, "B S N H"]:
    """Bidirectional attention to the keys where mask is true: inside a window or an image."""
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def attend(block, _):
        queries = block.transpose(0, 2, 1, 3)
        scores = jnp.einsum("bnsh,bnth->bnst", queries, keys, preferred_element_type=jnp.float32)
        weights = _softmax(scores * q.shape[-1] ** -0.5, mask[:, None, None, :])
        out = jnp.einsum("bnst,bnth->bnsh", weights.astype(v.dtype), values)
        return out.transpose(0, 2, 1, 3)

    return _by_query_block(attend, q, axis=1)


def _softmax(scores: Array, seen: Array) -> Array:
    return jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)


def _by_query_block(attend: Callable[[Array, Array | int], Array], q: Array, axis: int) -> Array:
    """attend(queries, index of the first) over blocks of q's axis; each row's result is the same."""
    n = q.shape[axis]
    if n <= QUERY_BLOCK:
        return attend(q, 0)
    count = -(-n // QUERY_BLOCK)
    size = -(-n // count)
    padding = [(0, count * size - n if i == axis else 0) for i in range(q.ndim)]
    blocks = jnp.pad(q, padding).reshape(*q.shape[:axis], count, size, *q.shape[axis + 1 :])
    blocks = jnp.moveaxis(blocks, axis, 0)
    starts = jnp.arange(count) * size
    out = jax.lax.map(lambda args: jax.checkpoint(attend)(*args), (blocks, starts))
    out = jnp.moveaxis(out, 0, axis)
    out = out.reshape(*out.shape[:axis], -1, *out.shape[axis + 2 :])
    return jax.lax.slice_in_dim(out, 0, n, axis=axis)
