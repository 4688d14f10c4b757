"""Attention as pure functions: causal, a group over its shared prompt, masked inside images.

Scores and softmax are float32; masked scores are a large negative number, so a row with nothing to
see gives finite values and finite gradients instead of NaN.

Letters: P prompts, G responses, T response tokens, L prompt tokens, S suffix slots, N query heads,
K key-value heads, R = N/K query heads a key-value head, H head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30


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
    P, L, N, H = q.shape
    K = k.shape[2]
    position = jnp.arange(L)
    seen = (position[:, None] >= position[None, :])[None] & (
        position[None, None, :] < lengths[:, None, None]
    )
    # [P, K, R·L, H] against [P, K, L, H]: plain matrix products, batched over prompt and kv head.
    queries = q.reshape(P, L, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(P, K, -1, H)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("pkqh,pkmh->pkqm", queries, keys, preferred_element_type=jnp.float32)
    weights = _softmax((scores * H**-0.5).reshape(P, K, N // K, L, L), seen[:, None, None])
    weights = weights.astype(v.dtype).reshape(P, K, -1, L)
    out = jnp.einsum("pkqm,pkmh->pkqh", weights, values).reshape(P, K, N // K, L, H)
    return out.transpose(0, 3, 1, 2, 4).reshape(P, L, N, H)


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
    P, G, T, N, H = q.shape
    L, K, S = prefix_k.shape[1], prefix_k.shape[2], suffix_k.shape[2]
    R = N // K
    queries = q.reshape(P, G, T, K, R, H).transpose(0, 3, 1, 4, 2, 5)  # P K G R T H
    prefix_k, prefix_v = (a.transpose(0, 2, 1, 3) for a in (prefix_k, prefix_v))  # P K L H
    suffix_k, suffix_v = (a.transpose(0, 3, 1, 2, 4) for a in (suffix_k, suffix_v))  # P K G S H
    to_prefix = jnp.einsum(
        "pkqh,pklh->pkql",
        queries.reshape(P, K, -1, H),
        prefix_k,
        preferred_element_type=jnp.float32,
    ).reshape(P, K, G, R, T, L)
    to_suffix = jnp.einsum(
        "pkgqh,pkgsh->pkgqs",
        queries.reshape(P, K, G, -1, H),
        suffix_k,
        preferred_element_type=jnp.float32,
    ).reshape(P, K, G, R, T, S)
    in_prompt = (jnp.arange(L)[None] < lengths[:, None])[:, None, None, None, None, :]
    causal = jnp.arange(S)[None] <= jnp.arange(T)[:, None] + offset
    seen = jnp.concatenate(
        [
            jnp.broadcast_to(in_prompt, (P, 1, 1, 1, T, L)),
            jnp.broadcast_to(causal, (P, 1, 1, 1, T, S)),
        ],
        -1,
    )
    scores = jnp.concatenate([to_prefix, to_suffix], -1) * H**-0.5
    weights = _softmax(scores, seen).astype(q.dtype)
    over_prefix = weights[..., :L].reshape(P, K, -1, L)
    over_suffix = weights[..., L:].reshape(P, K, G, -1, S)
    out = jnp.einsum("pkql,pklh->pkqh", over_prefix, prefix_v).reshape(P, K, G, R, T, H)
    out = out + jnp.einsum("pkgqs,pkgsh->pkgqh", over_suffix, suffix_v).reshape(out.shape)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(P, G, T, N, H)


def masked_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    mask: Bool[Array, "B S"],
) -> Float[Array, "B S N H"]:
    """Bidirectional attention to the keys where mask is true: inside a window or an image."""
    queries, keys, values = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
    scores = jnp.einsum("bnsh,bnth->bnst", queries, keys, preferred_element_type=jnp.float32)
    weights = _softmax(scores * q.shape[-1] ** -0.5, mask[:, None, None, :])
    return jnp.einsum("bnst,bnth->bnsh", weights.astype(v.dtype), values).transpose(0, 2, 1, 3)


def _softmax(scores: Array, seen: Array) -> Array:
    return jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
