"""The vision tower: patches in window order → merged features in reading order.

Images arrive as [I, W, S, C]: I images, W windows, S = 64 slots a window (8×8 patches, 112 px), C
pixel values of one patch. Windows at an image's edge have masked slots, and images smaller than the
bucket have masked windows. Window layers see [I·W, S], full layers see [I, W·S]; neither can see
another image. Shapes depend on the bucket only.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from evisrag_jax.models.attention import masked_attention
from evisrag_jax.models.layers import (
    Linear,
    RMSNorm,
    SwiGLU,
    rotary_frequencies,
    rotate,
    stack_init,
)
from evisrag_jax.models.qwen25vl.config import VisionConfig
from evisrag_jax.models.remat import rematerialise
from evisrag_jax.runtime.mesh import gathered, over_batch


class PatchEmbed(nn.Module):
    """The 3-D convolution over one patch as a matrix product.

    A still image repeats one frame over the temporal axis, so the kernel is summed over that axis
    and each patch is read once: half the bytes and products of the reference, the same sum.
    """

    config: VisionConfig

    @nn.compact
    def __call__(self, patches: Float[Array, "*B C"]) -> Float[Array, "*B D"]:
        cfg = self.config
        shape = (cfg.channels, cfg.temporal_patch, cfg.patch**2, cfg.width)
        axes = (None, None, None, "embed")
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)
        kernel = gathered(self.param("kernel", init, shape), axes)
        kernel = kernel.sum(1).reshape(-1, cfg.width)
        return patches @ kernel.astype(patches.dtype)


class VisionBlock(nn.Module):
    """Pre-norm attention and SwiGLU, all projections with bias."""

    config: VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], cos: Array, sin: Array, attend: Callable) -> Array:
        cfg = self.config
        h = RMSNorm(cfg.eps, name="norm1")(x)
        features = (3, cfg.heads, cfg.head_dim)
        axes = ("embed", None, "heads", "head_dim")
        qkv = Linear(features, axes, use_bias=True, name="qkv")(h)
        q, k, v = (qkv[..., i, :, :] for i in range(3))
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        axes = ("heads", "head_dim", "embed")
        x = x + Linear((cfg.width,), axes, inputs=2, use_bias=True, name="proj")(out)
        return x + SwiGLU(cfg.mlp, use_bias=True, name="mlp")(RMSNorm(cfg.eps, name="norm2")(x))


class PatchMerger(nn.Module):
    """Four neighbouring patches → one token of the decoder's width; exact (erf) GELU between."""

    config: VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B U D"]) -> Float[Array, "*B O"]:
        cfg = self.config
        x = RMSNorm(cfg.eps, name="norm")(x)
        x = x.reshape(*x.shape[:-2], -1)
        x = Linear((x.shape[-1],), ("embed", "mlp"), use_bias=True, name="fc1")(x)
        x = jax.nn.gelu(x, approximate=False)
        return Linear((cfg.out_width,), ("mlp", "embed"), use_bias=True, name="fc2")(x)


def rotary_angles(
    rowcol: Int[Array, "*B 2"], config: VisionConfig
) -> tuple[Float[Array, "*B half"], Float[Array, "*B half"]]:
    """cos and sin, float32: half of the frequencies turn with the row, half with the column."""
    frequencies = rotary_frequencies(config.head_dim // 2, config.theta)
    angles = rowcol.astype(jnp.float32)[..., None] * frequencies
    angles = angles.reshape(*angles.shape[:-2], -1)
    return jnp.cos(angles), jnp.sin(angles)


def attention_period(config: VisionConfig) -> int:
    """The smallest period of the window/full pattern; the depth itself where there is none."""
    full = set(config.full_attention)
    for period in range(1, config.depth + 1):
        if config.depth % period == 0 and all(
            (i in full) == (i % period in full) for i in range(config.depth)
        ):
            return period
    raise ValueError(f"a vision tower of depth {config.depth} has no layers")


def init_vision(config: VisionConfig, key: Array) -> dict:
    """Boxed parameters {patch_embed, blocks (stacked on "layers"), merger}."""
    k_embed, k_blocks, k_merger = jax.random.split(key, 3)
    patch = jnp.zeros((1, config.channels * config.patch**2))
    x = jnp.zeros((1, 1, config.width))
    angles = jnp.zeros((1, 1, config.head_dim // 2))

    block = VisionBlock(config)
    return {
        "patch_embed": PatchEmbed(config).init(k_embed, patch)["params"],
        "blocks": stack_init(
            block, config.depth, k_blocks, x, angles, angles, attend=lambda q, k, v: v
        ),
        "merger": PatchMerger(config).init(k_merger, jnp.zeros((1, config.merge**2, config.width)))[
            "params"
        ],
    }


def encode(
    params: dict,
    config: VisionConfig,
    patches: Float[Array, "I W S C"],
    mask: Bool[Array, "I W S"],
    rowcol: Int[Array, "I W S 2"],
    merged_index: Int[Array, "I M"],
    *,
    remat: str = "none",
) -> Float[Array, "I M O"]:
    """Merged features in reading order (row-major over the merged grid), 0-padded index → slot 0's.

    `remat`: see `models.remat` (a trainable tower at full size needs "full").
    """
    I, W, S, _ = patches.shape
    x = PatchEmbed(config).apply({"params": params["patch_embed"]}, patches)
    cos, sin = rotary_angles(rowcol, config)
    block = VisionBlock(config)

    def attend_windows(q, k, v):
        flat = (a.reshape(I * W, S, *a.shape[3:]) for a in (q, k, v))
        return masked_attention(*flat, mask.reshape(I * W, S)).reshape(q.shape)

    def attend_image(q, k, v):
        flat = (a.reshape(I, W * S, *a.shape[3:]) for a in (q, k, v))
        return masked_attention(*flat, mask.reshape(I, W * S)).reshape(q.shape)

    def run_block(layer, x, full: bool):
        attend = attend_image if full else attend_windows
        x = over_batch(x)
        return block.apply({"params": layer}, x, cos, sin, attend)

    run_block = rematerialise(run_block, remat, static_argnums=(2,))
    period = attention_period(config)

    def run_period(x, layers):
        for i in range(period):
            layer = jax.tree.map(lambda a: a[i], layers)  # noqa: B023
            x = run_block(layer, x, i in config.full_attention)
        return x, None

    stacked = jax.tree.map(
        lambda a: a.reshape(config.depth // period, period, *a.shape[1:]), params["blocks"]
    )
    x, _ = jax.lax.scan(run_period, x, stacked)
    units = x.reshape(I, W * S // config.merge**2, config.merge**2, config.width)
    merged = PatchMerger(config).apply({"params": params["merger"]}, units)
    return jnp.take_along_axis(merged, merged_index[..., None], axis=1)
