"""How the next token is drawn, as pure functions over rows of logits with per-row settings.

One uniform number a row is pushed through the inverse cumulative distribution in id order, so that a
filter only removes probability and never reorders tokens: whether other rows of the batch use top-p or
top-k cannot change a draw.

Two distributions matter. The *draw* uses softmax(penalised logits / T) without banned ids, cut by top-k,
then top-p. The *reported* log-prob is that of softmax(logits / T) over the whole vocabulary, which is
what a trainer recomputes from a forward pass; with T = 0 it is taken at T = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from evisrag_jax.runtime.prng import fold_tokens

BLOCK = 256  # width of the inner level of the two-level inverse distribution
SLACK = 1e-6  # share of the mass by which a float32 sum may miss top_p
INFINITY_BITS = 0x7F800000  # float32 infinity, the largest key
TINY = float(np.finfo(np.float32).tiny)


class SamplingError(ValueError):
    """A sampling setting outside its range; the message names the setting and the range."""


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of one request.

    temperature 0 means greedy (ties go to the lowest id). top_p keeps the smallest set of most likely
    tokens whose mass reaches it; 0 is greedy, 1 is off. top_k keeps the k most likely; 0 and -1 are off,
    and so is a k above the vocabulary. repetition_penalty (1 is off) divides positive logits and multiplies
    negative ones of every token of the prompt and the response so far. max_tokens counts the end token.
    """

    temperature: float | int = 1.0
    top_p: float | int = 1.0
    top_k: int = 0
    repetition_penalty: float | int = 1.0
    max_tokens: int = 512

    def __post_init__(self):
        for name in ("temperature", "top_p", "repetition_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise SamplingError(f"{name}={getattr(self, name)} is not a finite number")
        if self.temperature < 0:
            raise SamplingError(f"temperature={self.temperature} is negative; 0 is greedy")
        if not 0 <= self.top_p <= 1:
            raise SamplingError(f"top_p={self.top_p} is outside [0, 1]")
        if self.top_k != int(self.top_k) or self.top_k < -1:
            raise SamplingError(
                f"top_k={self.top_k} is not a whole number >= -1 (0 and -1 are off)"
            )
        if self.repetition_penalty <= 0:
            raise SamplingError(f"repetition_penalty={self.repetition_penalty} is not positive")
        if self.max_tokens != int(self.max_tokens) or self.max_tokens < 1:
            raise SamplingError(f"max_tokens={self.max_tokens} is not a whole number >= 1")


class Controls(NamedTuple):
    """Settings of every row as arrays, so that new values never recompile."""

    temperature: Float[Array, "*B"]
    top_p: Float[Array, "*B"]
    top_k: Int[Array, "*B"]
    repetition_penalty: Float[Array, "*B"]


class Draw(NamedTuple):
    """One token a row. A failed row (logits that are NaN or infinite, or nothing left to draw) has token -1."""

    token: Int[Array, "*B"]
    logp: Float[Array, "*B"]
    failed: Bool[Array, "*B"]


def stack_controls(configs: Sequence[SamplingConfig]) -> Controls:
    """Host arrays [B] of B settings."""
    limit = np.iinfo(np.int32).max
    return Controls(
        np.asarray([c.temperature for c in configs], np.float32),
        np.asarray([c.top_p for c in configs], np.float32),
        np.asarray([min(int(c.top_k), limit) for c in configs], np.int32),
        np.asarray([c.repetition_penalty for c in configs], np.float32),
    )


def token_uniforms(keys: Key[Array, "*B"], index: Int[Array, "*#B"]) -> Float[Array, "*B"]:
    """One uniform number in [0, 1) a response, for its token with this index.

    `keys` are those of `runtime.prng.sample_keys`: what they fold is all that a draw depends on.
    """
    flat = fold_tokens(keys, index).reshape(-1)
    return jax.vmap(lambda key: jax.random.uniform(key, ()))(flat).reshape(keys.shape)


def penalise(
    logits: Float[Array, "*B V"], seen: Bool[Array, "*B V"], penalty: Float[Array, "*B"]
) -> Float[Array, "*B V"]:
    """Repetition penalty: a seen token's logit is divided by it where positive, else multiplied."""
    penalty = penalty[..., None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_mask(
    scores: Float[Array, "*B V"], top_p: Float[Array, "*B"], top_k: Int[Array, "*B"]
) -> Bool[Array, "*B V"]:
    """Tokens that survive top-k, then top-p of what top-k left. Ties at the edge go to the lowest ids.

    `scores` are logits / T minus their maximum. The most likely token always survives.
    """
    k = jnp.where(top_k <= 0, scores.shape[-1], top_k).astype(jnp.float32)

    def cut(kept, stage):
        weights = jnp.where(kept, jnp.where(stage == 0, 1.0, jnp.exp(scores)), 0.0)
        share = jnp.where(top_p >= 1.0, jnp.inf, (top_p - SLACK) * jnp.sum(weights, -1))
        return kept & _smallest_set(scores, weights, jnp.where(stage == 0, k, share)), None

    return jax.lax.scan(cut, jnp.ones(scores.shape, bool), jnp.arange(2))[0]


def _smallest_set(scores: Array, weights: Array, need: Array) -> Array:
    """The best-scored tokens, as few as bring the sum of their weights to `need`; never less than one.

    The edge is found by bisection over the bit patterns of the (non-positive) scores, a tie by bisection over
    ids: a few dozen sums over the row, several times faster than sorting a vocabulary.
    """
    keys = jax.lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)  # rises as the score falls
    edge = _least_bound(keys, weights, need, INFINITY_BITS)[..., None]
    missing = need - jnp.sum(jnp.where(keys < edge, weights, 0.0), -1)
    each = jnp.max(jnp.where(keys == edge, weights, 0.0), -1)
    places = jnp.maximum(jnp.ceil(missing / jnp.maximum(each, TINY)), 1.0)
    ids = jnp.broadcast_to(jnp.arange(scores.shape[-1]), scores.shape)
    tied = (keys == edge).astype(jnp.float32)
    last = _least_bound(ids, tied, places, scores.shape[-1])[..., None]
    return (keys < edge) | ((keys == edge) & (ids <= last))


def _least_bound(keys: Array, weights: Array, need: Array, top: int) -> Array:
    """The least bound up to `top` for which the weights of keys <= bound add up to `need`; `top` if none does."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(keys <= middle[..., None], weights, 0.0), -1) >= need
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros(need.shape, jnp.int32)
    return jax.lax.fori_loop(0, top.bit_length(), halve, (low, jnp.full_like(low, top)))[1]


def inverse_cdf(weights: Float[Array, "*B V"], uniform: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The id at which the running sum of the weights, in id order, passes uniform · total.

    Two levels (blocks, then inside the block), so the large axis is only summed, never scanned. An id of
    weight 0 is never returned while any weight is positive.
    """
    vocab = weights.shape[-1]
    width = min(BLOCK, vocab)
    pad = -vocab % width
    blocks = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, pad)])
    blocks = blocks.reshape(*weights.shape[:-1], -1, width)
    sums = jnp.sum(blocks, -1)
    running = jnp.cumsum(sums, -1)
    target = uniform * running[..., -1]
    block = _first_above(running, sums, target)
    earlier = jnp.where(jnp.arange(sums.shape[-1]) < block[..., None], sums, 0.0)
    inner = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    rest = target - jnp.sum(earlier, -1)
    return block * width + _first_above(jnp.cumsum(inner, -1), inner, rest)


def _first_above(running: Array, weights: Array, target: Array) -> Array:
    """First positive weight whose running sum is above the target; the last positive one if none is."""
    positive = weights > 0
    hit = positive & (running > target[..., None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[..., ::-1], -1)
    return jnp.where(jnp.any(hit, -1), jnp.argmax(hit, -1), last)


def sample(
    logits: Float[Array, "*B V"],
    uniform: Float[Array, "*B"],
    seen: Bool[Array, "*B V"],
    banned: Bool[Array, " V"],
    controls: Controls,
) -> Draw:
    """Draws one token a row.

    Args:
      logits: the model's logits; the arithmetic is float32.
      uniform: one number in [0, 1) a row.
      seen: tokens of the prompt and the response so far, for the repetition penalty.
      banned: ids that are never drawn (image slots, padding, rows beyond the tokenizer).
      controls: per-row settings.

    Returns:
      Draw; logp is log softmax(logits / T)[token], before penalty, ban and filters.
    """
    raw = logits.astype(jnp.float32)
    warm = controls.temperature > 0
    temperature = jnp.where(warm, controls.temperature, 1.0)[..., None]
    full = (raw - jnp.max(raw, -1, keepdims=True)) / temperature
    log_total = jnp.log(jnp.sum(jnp.exp(full), -1))

    penalty = controls.repetition_penalty
    allowed = jax.lax.cond(
        jnp.any(penalty != 1.0), lambda: penalise(raw, seen, penalty), lambda: raw
    )
    allowed = jnp.where(banned, -jnp.inf, allowed)
    top = jnp.max(allowed, -1)
    scores = (allowed - top[..., None]) / temperature
    filtered = (controls.top_p < 1.0) | (controls.top_k > 0)
    keep = jax.lax.cond(
        jnp.any(filtered & warm),
        lambda: keep_mask(scores, controls.top_p, controls.top_k),
        lambda: jnp.ones(scores.shape, bool),
    )
    drawn = inverse_cdf(jnp.where(keep, jnp.exp(scores), 0.0), uniform)
    token = jnp.where(warm, drawn, jnp.argmax(allowed, -1))

    failed = ~jnp.isfinite(log_total) | ~jnp.isfinite(top)
    logp = jnp.take_along_axis(full, token[..., None], axis=-1)[..., 0] - log_total
    token = jnp.where(failed, -1, token).astype(jnp.int32)
    return Draw(token, jnp.where(failed, 0.0, logp), failed)
