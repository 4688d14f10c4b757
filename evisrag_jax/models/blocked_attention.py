"""Attention for XLA's CPU backend: one key-value head and one block of query rows at a time.

There a product of two matrices runs at the machine's speed, a batched one at a fifth of it, and a
[queries, keys] score matrix that leaves the cache costs more than the products. So scores exist one
block at a time, forward and backward, and memory grows with the keys and not with their square.

A row sees the keys whose `order` is at most its `place`; padding keys have order NEVER:

    causal    order = position            place = position
    masked    order = 0                   place = 0
    group     order = 0 for the prompt,   place = t
              t for the response's own

The loops are `lax.map`, which XLA would run by gathering an axis that is split over devices: this
is the path of one device (`attention` takes the batched one where the abstract mesh has several).

Letters as in `attention`; A any batch (prompts times key-value heads), M keys of a block, D query
rows of a block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
NEVER = np.iinfo(np.int32).max
# Query positions of a block where N/K heads share its keys, and where each has its own.
BLOCK = 128
LONE_BLOCK = 512
# A causal layer slices its keys this many times at most: each slice is code of its own.
STAGES = 8

_barrier = jax.lax.optimization_barrier


def causal(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """`attention.causal_attention`. Queries of a stage meet the keys up to the stage's end:

    keys       0 1 2 3 4 5       BLOCK 2, three stages
    rows 0 1   x x
    rows 2 3   x x x x
    rows 4 5   x x x x x x
    """
    P, L, N, H = q.shape
    K = k.shape[2]
    blocks = -(-L // BLOCK)
    stage = -(-blocks // STAGES) * BLOCK
    order = jnp.where(jnp.arange(L) < lengths[:, None], jnp.arange(L), NEVER)

    def one_head(args):
        q, k, v, order = args
        parts = []
        for start in range(0, L, stage):
            stop = min(start + stage, L)
            parts.append(_rows(q[start:stop], (k,), (v,), order, start, stop, BLOCK))
        return jnp.concatenate(parts)

    heads = (_split_heads(q, K), _heads_first(k), _heads_first(v))
    out = jax.lax.map(one_head, (*heads, jnp.repeat(order, K, axis=0)))
    return _join_heads(out, P)


def group(
    q: Array,
    prefix_k: Array,
    prefix_v: Array,
    lengths: Array,
    suffix_k: Array,
    suffix_v: Array,
) -> Array:
    """`attention.group_attention`: a response at a time, against its prompt's keys and its own."""
    P, G, T, N, H = q.shape
    L, K = prefix_k.shape[1:3]
    seen = jnp.where(jnp.arange(L) < lengths[:, None], 0, NEVER)
    order = jnp.concatenate([seen, jnp.broadcast_to(jnp.arange(T), (P, T))], axis=1)

    def one_head(args):
        q, prefix_k, prefix_v, suffix_k, suffix_v, order = args

        def one_response(args):
            q, own_k, own_v = args
            keys, values = (prefix_k, own_k), (prefix_v, own_v)
            return _rows(q, keys, values, order, 0, L + T, BLOCK)

        return jax.lax.map(one_response, (q, suffix_k, suffix_v))

    def responses_last(a):  # [P, G, M, K, …] → [P·K, G, M, …]
        return jnp.moveaxis(a, 3, 1).reshape(P * K, G, *a.shape[2:3], *a.shape[4:])

    out = jax.lax.map(
        one_head,
        (
            responses_last(q.reshape(P, G, T, K, N // K, H)),
            _heads_first(prefix_k),
            _heads_first(prefix_v),
            responses_last(suffix_k),
            responses_last(suffix_v),
            jnp.repeat(order, K, axis=0),
        ),
    )
    return jnp.moveaxis(out.reshape(P, K, G, T, N // K, H), 1, 3).reshape(P, G, T, N, H)


def masked(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """`attention.masked_attention`."""
    B, S, N, H = q.shape
    order = jnp.where(mask, 0, NEVER).astype(jnp.int32)

    def one_head(args):
        q, k, v, order = args
        return _rows(q, (k,), (v,), order, None, S, LONE_BLOCK)

    heads = (_split_heads(q, N), _heads_first(k), _heads_first(v))
    return _join_heads(jax.lax.map(one_head, (*heads, jnp.repeat(order, N, axis=0))), B)


def _heads_first(a: Float[Array, "P L K H"]) -> Float[Array, "A L H"]:
    return a.transpose(0, 2, 1, 3).reshape(-1, a.shape[1], a.shape[3])


def _split_heads(q: Float[Array, "P L N H"], K: int) -> Float[Array, "A L R H"]:
    P, L, N, H = q.shape
    return q.reshape(P, L, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(P * K, L, N // K, H)


def _join_heads(out: Float[Array, "A L R H"], P: int) -> Float[Array, "P L N H"]:
    L, H = out.shape[1], out.shape[3]
    return out.reshape(P, -1, *out.shape[1:]).transpose(0, 2, 1, 3, 4).reshape(P, L, -1, H)


def _rows(q, keys, values, order, start, stop, block):
    """Rows [T, R, H] of one key-value head against its keys, `block` positions at a time.

    `start` is the place of the first row, None where all rows have place 0.
    """
    T, R, H = q.shape

    def attend(q, first):
        steps = jnp.arange(q.shape[0], dtype=jnp.int32)
        place = jnp.zeros_like(steps) if start is None else start + first + steps
        rows = q.reshape(-1, H)
        out = _attend(rows, keys, values, jnp.repeat(place, R), order, stop)
        return out.reshape(q.shape)

    if block >= T:
        return attend(q, 0)
    count = -(-T // block)
    size = -(-T // count)
    blocks = jnp.pad(q, ((0, count * size - T), (0, 0), (0, 0))).reshape(count, size, R, H)
    out = jax.lax.map(lambda args: attend(*args), (blocks, jnp.arange(count) * size))
    return out.reshape(-1, R, H)[:T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: Float[Array, "D H"],
    keys: tuple[Float[Array, "_ H"], ...],
    values: tuple[Float[Array, "_ H"], ...],
    place: Int[Array, " D"],
    order: Int[Array, " _"],
    stop: int,
) -> Float[Array, "D H"]:
    """Softmax attention of some rows over the first `stop` of all keys, one set after the other.

    The backward pass forms the weights anew from each row's largest score and sum of exponentials
    (as in FlashAttention, arXiv:2205.14135, algorithm 4): neither scores nor weights are kept.
    """
    return _attend_forward(q, keys, values, place, order, stop)[0]


def _attend_forward(q, keys, values, place, order, stop):
    k, v = (_first(sets, stop) for sets in (keys, values))
    # A mask of constants alone would be made for all blocks at once, ahead of a loop over layers.
    rows, places = _barrier((q, place))
    scores = jnp.where(_seen(places, order[:stop]), _scores(rows, k), MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    out, top, total = checkpoint_name((out.astype(q.dtype), top, total), "attention")
    return out, (q, keys, values, place, order, top, total)


def _attend_backward(stop, kept, d_out):
    q, keys, values, place, order, top, total = kept
    k, v = (_first(sets, stop) for sets in (keys, values))
    # A row with nothing to see has no gradient: its weights are 0 here.
    weights = jnp.exp(_scores(q, k) - top) * (1 / total)
    weights = jnp.where(_seen(place, order[:stop]), weights, 0)
    d_weights = jnp.matmul(d_out, v.T, preferred_element_type=jnp.float32)
    mean = jnp.sum(d_weights * weights, axis=-1, keepdims=True)
    d_scores = weights * (d_weights - mean) * q.shape[-1] ** -0.5
    d_scores, weights = _barrier((d_scores.astype(q.dtype), weights.astype(v.dtype)))
    d_q = jnp.matmul(d_scores, k).astype(q.dtype)
    d_k, d_v = _transposed_product(d_scores, q), _transposed_product(weights, d_out)
    return d_q, _like(d_k, keys), _like(d_v, values), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _seen(place: Array, order: Array) -> Bool[Array, "D M"]:
    return order <= place[:, None]


def _scores(q: Array, k: Array) -> Float[Array, "D M"]:
    return jnp.matmul(q, k.T, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5


def _transposed_product(a: Float[Array, "D M"], b: Float[Array, "D H"]) -> Float[Array, "M H"]:
    """aᵀb as (bᵀa)ᵀ: the product runs at a third of the speed where the large operand is the
    transposed one. The barriers keep XLA from turning it around again."""
    return _barrier(jnp.matmul(_barrier(b.T), a)).T


def _first(sets: tuple[Array, ...], stop: int) -> Array:
    return (sets[0] if len(sets) == 1 else jnp.concatenate(sets))[:stop]


def _like(gradient: Array, sets: tuple[Array, ...]) -> tuple[Array, ...]:
    """The gradient of the first keys as that of all the sets."""
    sizes = [len(a) for a in sets]
    whole = jnp.pad(gradient, ((0, sum(sizes) - len(gradient)), (0, 0)))
    return tuple(jnp.split(whole, np.cumsum(sizes)[:-1]))
