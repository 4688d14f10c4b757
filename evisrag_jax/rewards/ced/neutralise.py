"""Regions taken out of a prompt's image features, or of its pages' pixels.

Replacing rows of the merged features leaves positions and the tower's other outputs as they are; the
tower runs once for all regions. Features of other tokens have seen the region, though, through the
tower's full-attention layers: neutraliser "pixel" hides it before the tower. Source: CED spec 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from evisrag_jax.pages.patches import ImageArrays
from evisrag_jax.pages.regions import Grid, feature_rows, ring
from evisrag_jax.rewards.ced.config import RegionConfig


class Region(NamedTuple):
    """What is taken out: tokens of each image.  spared: tokens that its rings leave out (of a control, the
    evidence, which would else be copied there)."""

    grids: tuple[Grid, ...]
    spared: tuple[Grid, ...] | None = None


#: Nothing is taken out.
NOTHING = Region(())


class Regions(NamedTuple):
    """R regions of each prompt, on its I padded images of M tokens.

    inside  the tokens that are neutralised.  source  the tokens whose mean stands in for them, on the
    same image.  near  for mean_local: rows I·M of each token's own ring, -1 for none (N = 0 otherwise).
    """

    inside: Bool[np.ndarray, "P R I M"]
    source: Bool[np.ndarray, "P R I M"]
    near: Int32[np.ndarray, "P R IM N"]


def make_regions(
    regions: Sequence[Sequence[Region]], images: int, tokens: int, config: RegionConfig
) -> Regions:
    """Arrays of each prompt's regions, on `images` padded images of `tokens` tokens.

    A prompt may have fewer regions than the others; what is missing is empty and changes nothing.
    """
    P, R = len(regions), max((len(one) for one in regions), default=0)
    local = config.neutraliser == "mean_local"
    neighbours = (2 * config.ring + 1) ** 2 if local else 0
    inside = np.zeros((P, R, images, tokens), bool)
    source = np.zeros_like(inside)
    near = np.full((P, R, images * tokens, neighbours), -1, np.int32)
    for p, own in enumerate(regions):
        for r, (grids, spared) in enumerate(own):
            barred = spared or (None,) * len(grids)
            pairs = list(zip(grids, barred, strict=True))
            inside[p, r] = feature_rows(grids, images, tokens)
            rings = [ring(grid, config.ring, exclude=bar) for grid, bar in pairs]
            source[p, r] = feature_rows(rings, images, tokens)
            for n, (grid, bar) in enumerate(pairs):
                if local and grid.any():
                    _fill_near(near[p, r], grid, bar, n * tokens, config.ring)
    return Regions(inside, source, near)


def _fill_near(near: np.ndarray, grid: Grid, barred: Grid | None, base: int, width: int) -> None:
    """The own ring of each token of a region: the usable tokens up to `width` from it."""
    usable = ~grid if barred is None else ~(grid | barred)
    numbers = np.arange(grid.size).reshape(grid.shape)
    for row, col in np.argwhere(grid):
        window = np.s_[max(0, row - width) : row + width + 1, max(0, col - width) : col + width + 1]
        found = numbers[window][usable[window]]
        near[base + numbers[row, col], : len(found)] = base + found


def neutralise(
    features: Float[Array, "I M D"],
    inside: Bool[Array, "I M"],
    source: Bool[Array, "I M"],
    near: Int32[Array, "IM N"],
    neutraliser: str,
    salt: UInt32[Array, ""] | None = None,
) -> Float[Array, "I M D"]:
    """Features of one prompt with one region taken out; sums are float32.

    mean        v = mean over `source` on the same image, one vector for the whole region
    mean_local  each token the mean of its own ring, and v where that is empty
    zero        0
    noise       normal, with the standard deviation of all the region's values on the image; `salt` names
                the draw
    """
    wide = features.astype(jnp.float32)
    if neutraliser == "zero":
        new = jnp.zeros_like(wide)
    elif neutraliser == "noise":
        spread = jnp.std(wide, axis=(1, 2), keepdims=True, where=inside[..., None])
        spread = jnp.where(jnp.any(inside, 1)[:, None, None], spread, 0.0)
        new = spread * jax.random.normal(jax.random.key(salt), wide.shape)
    else:
        count = jnp.maximum(jnp.sum(source, 1), 1)[:, None, None]
        new = jnp.sum(jnp.where(source[..., None], wide, 0.0), 1, keepdims=True) / count
        if neutraliser == "mean_local":
            flat = wide.reshape(-1, wide.shape[-1])

            def add(total, index):
                return total + jnp.where((index >= 0)[:, None], flat[jnp.maximum(index, 0)], 0.0), 0

            total, _ = jax.lax.scan(add, jnp.zeros_like(flat), near.T)
            own = jnp.sum(near >= 0, 1)[:, None]
            local = (total / jnp.maximum(own, 1)).reshape(wide.shape)
            new = jnp.where((own > 0).reshape(*inside.shape, 1), local, new)
    return jnp.where(inside[..., None], new.astype(features.dtype), features)


def hide_pixels(
    pages: ImageArrays,
    inside: Bool[Array, "P I M"],
    source: Bool[Array, "P I M"],
    *,
    merge: int = 2,
) -> ImageArrays:
    """The pages with every pixel of a region in the mean colour of its ring (float32 mean of the
    normalised samples), before the tower."""
    patches = jnp.asarray(pages.patches)
    P, I, W, S, C = patches.shape
    side = merge * merge  # a merged token's patches lie side by side in the slots
    units = W * S // side
    index = jnp.asarray(pages.merged_index)
    # Padded tokens share index 0 with a real one; they are in no region.
    at = (jnp.arange(P)[:, None, None], jnp.arange(I)[None, :, None], index)
    hidden = jnp.zeros((P, I, units), bool).at[at].max(inside)
    ringed = jnp.zeros((P, I, units), bool).at[at].max(source)
    pixels = patches.reshape(P, I, units, side, 3, C // 3).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(ringed, -1), 1) * side * (C // 3)
    colour = jnp.sum(jnp.where(ringed[..., None, None, None], pixels, 0.0), (2, 3, 5))
    colour = (colour / count[..., None])[:, :, None, None, :, None]
    new = jnp.where(hidden[..., None, None, None], colour, pixels)
    return pages._replace(patches=new.reshape(P, I, W, S, C).astype(patches.dtype))
