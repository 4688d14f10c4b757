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
) -> Float[Array, "R P G T"]:
    """Log-prob of every response token with each region out (float32; padding positions included). With an
    empty region the pages are as they are.

    Args:
        params: in the compute dtype.
        batch: prompts with images or features; "pixel" needs the images.
        regions: what is taken out, `make_regions`.
        salts: a number a prompt, of the neutraliser "noise".
        temperature: of the softmax; the support of an answer is taken at 1.

    The variants run one after another, so that the memory is that of one.
    """
    P, _, I, M = regions.inside.shape
    pixels = neutraliser == "pixel"
    if pixels and batch.images is None:
        raise ValueError("neutraliser 'pixel' needs a batch that holds images, not only features")
    features = batch.features
    if features is None and not pixels:
        features = model.encode_images(params, config, batch.images)

    def variant(own):
        number, inside, source, near = own
        if pixels:
            new = model.encode_images(params, config, hide_pixels(batch.images, inside, source))
        else:
            wide, seeds = features.reshape(P, I, M, -1), salts + number
            out = jax.vmap(partial(neutralise, neutraliser=neutraliser))
            new = out(wide, inside, source, near, salt=seeds).reshape(features.shape)
        rows = batch._replace(images=None, features=new)
        scores = score_responses(
            params, config, rows, temperature=temperature, remat="none", chunk=chunk
        )
        return scores.logp

    numbers = jnp.arange(regions.inside.shape[1], dtype=jnp.uint32)
    by_region = (jnp.asarray(a).swapaxes(0, 1) for a in regions)
    return jax.lax.map(variant, (numbers, *by_region))
