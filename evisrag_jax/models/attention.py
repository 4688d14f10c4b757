"""Attention as pure functions: causal, a group over its shared prompt, masked inside images.

Scores and softmax are float32; a row with nothing to see gives finite values and finite gradients
instead of NaN. Queries are taken a block at a time, forward and backward, so that memory grows with
the keys and not with their square (one full-attention layer over a page of 20,000 patches would hold
1.6 GB of scores a head). Which program does it is chosen when a function is traced:

    blocked  one head and one block of rows after another; CPU (`blocked_attention`)
    cudnn    fused; GPU, 16-bit, for what is masked by causality or by lengths alone
    xla      batched products; everything else: TPU, float32 on GPU, a group on GPU (its one softmax
             over two sets of keys has no fused form: merging two calls by their log-sum-exp would
             lose a gradient), vision windows, and a CPU where the abstract mesh has several devices
             (`runtime.mesh.traced_on`)

Outputs carry the checkpoint name "attention", for recomputation policies that keep them.

Letters: P prompts, G responses, T response tokens, L prompt tokens, N query heads, K key-value
heads, R = N/K query heads a key-value head, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from evisrag_jax.models import blocked_attention

Implementation = Literal["blocked", "cudnn", "xla"]
MASKED = -1e30
QUERY_BLOCK = 512
# Rows a key-value head up to which a batched product costs less than a loop: vision windows.
FEW_ROWS = 64

_default: Implementation | None = None


def default_implementation() -> Implementation:
    """What is used where a call names nothing and its arrays allow it."""
    if _default is not None:
        return _default
    return {"cpu": "blocked", "gpu": "cudnn"}.get(jax.default_backend(), "xla")


def set_default_implementation(name: str | None) -> None:
    """Another default for programs traced from now on; None: the backend's own again.

    Programs that are compiled already keep theirs: set it before a run traces anything.

    Raises:
        ValueError: no such implementation.
    """
    if name is not None and name not in get_args(Implementation):
        raise ValueError(f"attention {name!r}: one of {', '.join(get_args(Implementation))}")
    global _default
    _default = name


def causal_attention(
    q: Float[Array, "P L N H"],
    k: Float[Array, "P L K H"],
    v: Float[Array, "P L K H"],
    lengths: Int[Array, " P"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "P L N H"]:
    """Causal attention over right-padded prompts.

    keys      0 1 2 .        length 3, L 4
    query 0   x
    query 1   x x
    query 2   x x x
    query 3   x x x          (padding row: finite, never read)
    """
    L, N = q.shape[1:3]
    chosen = implementation or _fitting(q, L * N // k.shape[2], fused=True)
    if chosen == "blocked":
        return blocked_attention.causal(q, k, v, lengths)
    if chosen == "cudnn":
        # Real rows see real keys by causality alone. What cuDNN leaves in rows behind a query
        # length is not promised, and a NaN there would reach real rows as 0 · NaN in a later layer.
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    else:
        out = _causal(q, k, v, lengths)
    return checkpoint_name(out, "attention")


def group_attention(
    q: Float[Array, "P G T N H"],
    prefix_k: Float[Array, "P L K H"],
    prefix_v: Float[Array, "P L K H"],
    lengths: Int[Array, " P"],
    suffix_k: Float[Array, "P G T K H"],
    suffix_v: Float[Array, "P G T K H"],
    *,
    implementation: Literal["blocked", "xla"] | None = None,
) -> Float[Array, "P G T N H"]:
    """G responses attend to their one prompt and, causally, to themselves; one softmax over both.

                 prompt keys     own keys               length 2, T 3
                 0 1 .           0 1 2
        query 0  x x             x
        query 1  x x             x x
        query 2  x x             x x x

    Exactly the attention of the repeated path: the prompt's keys are read once a prompt.
    """
    rows = q.shape[2] * q.shape[3] // prefix_k.shape[2]
    if (implementation or _fitting(q, rows)) == "blocked":
        return blocked_attention.group(q, prefix_k, prefix_v, lengths, suffix_k, suffix_v)
    out = _group(q, prefix_k, prefix_v, lengths, suffix_k, suffix_v)
    return checkpoint_name(out, "attention")


def group_attention_mass(
    q: Float[Array, "P G T N H"],
    prefix_k: Float[Array, "P L K H"],
    lengths: Int[Array, " P"],
    suffix_k: Float[Array, "P G T K H"],
    key_sets: Bool[Array, "P sets L"],
) -> Float[Array, "P G T sets"]:
    """What the softmax of `group_attention` gives to each set of a prompt's keys, its mean over heads.

    A row's sum over all keys, its own response's included, is 1. Float32 whatever the dtype of q; a
    block's weights are contracted at once, so that no map is kept.
    """
    sets = key_sets.astype(jnp.float32)

    def contract(weights):
        on_prompt = jnp.mean(weights[..., : prefix_k.shape[1]], axis=(1, 3))  # over K and R
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("pgbl,psl->pgbs", on_prompt, sets, precision=highest)

    return _over_group_weights(contract, q, prefix_k, lengths, suffix_k)


def masked_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    mask: Bool[Array, "B S"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B S N H"]:
    """Bidirectional attention to the keys where mask is true: inside a window or an image."""
    chosen = implementation or _fitting(q, q.shape[1], fused=True)
    if chosen == "blocked":
        return blocked_attention.masked(q, k, v, mask)
    out = _cudnn_masked(q, k, v, mask) if chosen == "cudnn" else _masked(q, k, v, mask)
    return checkpoint_name(out, "attention")


def _fitting(q: Array, rows: int, *, fused: bool = False) -> Implementation:
    """The default, or "xla" where it is not legal or does not pay."""
    name = default_implementation()
    few = rows <= FEW_ROWS
    if name == "blocked" and (few or jax.sharding.get_abstract_mesh().size > 1):
        return "xla"
    # cuDNN takes heads of up to 128 on every card.
    legal = fused and q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] in range(8, 129, 8)
    if name == "cudnn" and (few or not legal):
        return "xla"
    return name


def _cudnn_masked(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Windows at an image's edge have masked slots in the middle, and cuDNN knows lengths only:
    the real keys go to the front (softmax does not mind their order); queries stay in place."""
    order = jnp.argsort(~mask, axis=1, stable=True)[..., None, None]
    k, v = (jnp.take_along_axis(a, order, axis=1) for a in (k, v))
    # A row of padding only reads one key: finite, as elsewhere.
    lengths = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32), 1)
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
    )


# Batched products.


def _causal(q: Array, k: Array, v: Array, lengths: Array) -> Array:
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


def _group(
    q: Array,
    prefix_k: Array,
    prefix_v: Array,
    lengths: Array,
    suffix_k: Array,
    suffix_v: Array,
) -> Array:
    prefix_v = prefix_v.transpose(0, 2, 1, 3)  # P K L H
    suffix_v = suffix_v.transpose(0, 3, 1, 2, 4)  # P K G T H

    def attend(weights):
        P, K, G, R, B, _ = weights.shape
        over_prefix, over_suffix = jnp.split(weights.astype(q.dtype), [prefix_k.shape[1]], axis=-1)
        over_prefix = over_prefix.reshape(P, K, G * R * B, -1)
        over_suffix = over_suffix.reshape(P, K, G, R * B, -1)
        out = jnp.einsum("pkql,pklh->pkqh", over_prefix, prefix_v).reshape(P, K, G, R * B, -1)
        out = out + jnp.einsum("pkgqt,pkgth->pkgqh", over_suffix, suffix_v)
        out = out.reshape(P, K, G, R, B, -1).transpose(0, 2, 4, 1, 3, 5)
        return out.reshape(P, G, B, K * R, -1)

    return _over_group_weights(attend, q, prefix_k, lengths, suffix_k)


def _over_group_weights(
    use: Callable[[Array], Array], q: Array, prefix_k: Array, lengths: Array, suffix_k: Array
) -> Array:
    """`use` of a block of rows' weights, float32 [P, K, G, R, B, L + T] → [P, G, B, …], for all T rows."""
    L, K, T = prefix_k.shape[1], prefix_k.shape[2], suffix_k.shape[2]
    prefix_k = prefix_k.transpose(0, 2, 1, 3)  # P K L H
    suffix_k = suffix_k.transpose(0, 3, 1, 2, 4)  # P K G T H
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
            "pkgqh,pkgth->pkgqt",
            queries.reshape(P, K, G, -1, H),
            suffix_k,
            preferred_element_type=jnp.float32,
        ).reshape(P, K, G, N // K, B, T)
        causal = jnp.arange(T)[None] <= jnp.arange(B)[:, None] + start
        seen = jnp.concatenate(
            [
                jnp.broadcast_to(in_prompt, (P, 1, 1, 1, B, L)),
                jnp.broadcast_to(causal, (P, 1, 1, 1, B, T)),
            ],
            -1,
        )
        scores = jnp.concatenate([to_prefix, to_suffix], -1) * H**-0.5
        return use(_softmax(scores, seen))

    # A block's scores are those of all G responses.
    return _by_query_block(attend, q, axis=2, size=max(1, QUERY_BLOCK // q.shape[1]))


def _masked(q: Array, k: Array, v: Array, mask: Array) -> Array:
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


def _by_query_block(
    attend: Callable[[Array, Array | int], Array], q: Array, axis: int, size: int = QUERY_BLOCK
) -> Array:
    """attend(queries, index of the first) over blocks of q's axis; each row's result is the same."""
    n = q.shape[axis]
    if n <= size:
        return attend(q, 0)
    count = -(-n // size)
    size = -(-n // count)
    padding = [(0, count * size - n if i == axis else 0) for i in range(q.ndim)]
    blocks = jnp.pad(q, padding).reshape(*q.shape[:axis], count, size, *q.shape[axis + 1 :])
    blocks = jnp.moveaxis(blocks, axis, 0)
    starts = jnp.arange(count) * size
    out = jax.lax.map(lambda args: jax.checkpoint(attend)(*args), (blocks, starts))
    out = jnp.moveaxis(out, 0, axis)
    out = out.reshape(*out.shape[:axis], -1, *out.shape[axis + 2 :])
    return jax.lax.slice_in_dim(out, 0, n, axis=axis)
