"""Log-probs of a group's responses under each intervention, at the price of a few prompt prefills.

    pages ─tower once─► features ─┬─ as they are ────┐
                                  ├─ evidence out ───┼─ prefill once each ─► KV ─ extend by G responses ─► logp
                                  └─ K controls out ─┘

K + 2 prefills and (K + 2)·G short extensions, where plain forwards would be (K + 2)·G whole passes
(CED spec 1.3, cost). No gradient.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.rewards.ced.neutralise import Regions, hide_pixels, neutralise
from evisrag_jax.training.forward import GroupBatch, score_responses


@partial(jax.jit, static_argnames=("config", "neutraliser", "chunk"))
def intervention_logps(
    params: dict,
    config: Qwen25VLConfig,
    batch: GroupBatch,
    regions: Regions,
    salts: UInt32[Array, " P"],
    *,
    neutraliser: str = "mean",
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 2048,
) -> Float[Array, "V P G T"]:
    """Log-prob of every response token: V = 1 + R, first with the pages as they are, then with each region
    out (float32; padding positions included).

    Args:
        params: in the compute dtype.
        batch: prompts with images or features; "pixel" needs the images.
        regions: the evidence and its controls, `make_regions`.
        salts: a number a prompt, of the neutraliser "noise".
        temperature: of the softmax; the support of an answer is taken at 1.

    The variants run one after another, so that the memory is that of one.
    """
    P, R, I, M = regions.inside.shape
    if neutraliser == "pixel" and batch.images is None:
        raise ValueError("neutraliser 'pixel' needs a batch that holds images, not only features")

    def scored(features):
        rows = GroupBatch(batch.prompt, None, batch.tokens, batch.lengths, features)
        score = score_responses(
            params, config, rows, temperature=temperature, remat="none", chunk=chunk
        )
        return score.logp

    features = batch.features
    if features is None:
        features = model.encode_images(params, config, batch.images)
    wide = features.reshape(P, I, M, -1)

    def without(r):
        inside, source, near = (
            jax.lax.dynamic_index_in_dim(jnp.asarray(a), r, axis=1, keepdims=False) for a in regions
        )
        if neutraliser == "pixel":
            new = model.encode_images(params, config, hide_pixels(batch.images, inside, source))
        else:
            out = partial(neutralise, neutraliser=neutraliser)
            seeds = salts + jnp.uint32(r)
            new = jax.vmap(lambda f, i, s, n, z: out(f, i, s, n, salt=z))(
                wide, inside, source, near, seeds
            )
        return new.reshape(features.shape)

    def variant(v):
        own = jax.lax.cond(v == 0, lambda: features, lambda: without(jnp.maximum(v - 1, 0)))
        return scored(own)

    if not R:
        return scored(features)[None]
    return jax.lax.map(variant, jnp.arange(1 + R))
