"""The decoder: one layer declared in Linen, and the two passes that share it.

`prefill` runs right-padded prompts and returns their keys and values once a prompt; `extend` runs G
given responses a prompt against them (training, scoring), and `attention_mass` watches where those
look. Sampling token by token is `decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from evisrag_jax.models.attention import (
    causal_attention,
    group_attention,
    group_attention_mass,
)
from evisrag_jax.models.layers import (
    Embedding,
    Linear,
    RMSNorm,
    SwiGLU,
    rotary_frequencies,
    rotate,
    stack_init,
)
from evisrag_jax.models.qwen25vl.config import TextConfig
from evisrag_jax.models.remat import rematerialise
from evisrag_jax.runtime.mesh import gathered, over_batch


class KV(NamedTuple):
    """Keys and values of all layers: stacked [layers, P, L, K, H], or tuples of a layer's arrays."""

    k: Any
    v: Any


class DecoderLayer(nn.Module):
    """Pre-norm attention (grouped queries, biased q/k/v) and SwiGLU.

    `attend(q, k, v)` gets rotated queries and keys and returns (output, whatever it wants kept).
    """

    config: TextConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], cos: Array, sin: Array, attend: Callable):
        cfg = self.config
        h = RMSNorm(cfg.eps, name="norm1")(x)
        projections = (("q", cfg.heads, "heads"), ("k", cfg.kv_heads, "kv_heads"))
        projections += (("v", cfg.kv_heads, "kv_heads"),)
        q, k, v = (
            Linear(
                (n, cfg.head_dim), ("embed", axis, "head_dim"), use_bias=cfg.qkv_bias, name=name
            )(h)
            for name, n, axis in projections
        )
        out, kept = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + Linear((cfg.width,), ("heads", "head_dim", "embed"), inputs=2, name="o")(out)
        x = x + SwiGLU(cfg.mlp, name="mlp")(RMSNorm(cfg.eps, name="norm2")(x))
        return x, kept


def rotary_angles(
    positions: Int[Array, "P 3 L"], config: TextConfig
) -> tuple[Float[Array, "P L half"], Float[Array, "P L half"]]:
    """M-RoPE: frequency i turns with the axis its section belongs to (temporal, row, column)."""
    frequencies = rotary_frequencies(config.head_dim, config.theta)
    axis = np.repeat(np.arange(3), config.mrope_section)
    angles = jnp.moveaxis(positions[:, axis].astype(jnp.float32), 1, -1) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def text_angles(positions: Int[Array, "*B"], config: TextConfig) -> tuple[Array, Array]:
    """Angles of text tokens, whose three axes are equal."""
    angles = positions.astype(jnp.float32)[..., None] * rotary_frequencies(
        config.head_dim, config.theta
    )
    return jnp.cos(angles), jnp.sin(angles)


def init_text(config: TextConfig, key: Array) -> dict:
    """Boxed parameters {embed, layers (stacked), norm, head (untied only)}."""
    k_embed, k_layers, k_norm, k_head = jax.random.split(key, 4)
    x = jnp.zeros((1, 1, config.width))
    angles = jnp.zeros((1, 1, config.head_dim // 2))
    params = {
        "embed": Embedding(config.vocab, config.width).init(k_embed, jnp.zeros((1,), jnp.int32))[
            "params"
        ],
        "layers": stack_init(
            DecoderLayer(config),
            config.layers,
            k_layers,
            x,
            angles,
            angles,
            attend=lambda q, k, v: (jnp.zeros_like(q), None),
        ),
        "norm": RMSNorm(config.eps).init(k_norm, x)["params"],
    }
    if not config.tied:
        head = Linear((config.vocab,), ("embed", "vocab"))
        params["head"] = head.init(k_head, x)["params"]
    return params


def _run_layers(config: TextConfig, layers, x, angles, xs, attend, *, remat: str):
    """x through all layers. `attend(per_layer)` builds a layer's attention from its slice of xs."""
    module = DecoderLayer(config)

    def step(x, layer_and_cache):
        layer, cache = layer_and_cache
        return module.apply({"params": layer}, over_batch(x), *angles, attend(cache))

    return jax.lax.scan(rematerialise(step, remat), x, (layers, xs))


def prefill(
    params: dict,
    config: TextConfig,
    x: Float[Array, "P L D"],
    positions: Int[Array, "P 3 L"],
    lengths: Int[Array, " P"],
    *,
    remat: str = "none",
) -> tuple[Float[Array, "P L D"], KV]:
    """Prompt embeddings → hidden states after the final norm, and the prompts' keys and values."""

    def attend(_):
        return lambda q, k, v: (causal_attention(q, k, v, lengths), (k, v))

    angles = rotary_angles(positions, config)
    x, (k, v) = _run_layers(config, params["layers"], x, angles, None, attend, remat=remat)
    return RMSNorm(config.eps).apply({"params": params["norm"]}, x), KV(k, v)


def extend(
    params: dict,
    config: TextConfig,
    x: Float[Array, "P G T D"],
    positions: Int[Array, "P G T"],
    lengths: Int[Array, " P"],
    prefix: KV,
    *,
    remat: str = "none",
) -> Float[Array, "P G T D"]:
    """Hidden states of response embeddings against their prompt's (stacked) keys and values."""

    def attend(cache):
        return lambda q, k, v: (group_attention(q, *cache, lengths, k, v), None)

    angles = text_angles(positions, config)
    xs = (prefix.k, prefix.v)
    x, _ = _run_layers(config, params["layers"], x, angles, xs, attend, remat=remat)
    return RMSNorm(config.eps).apply({"params": params["norm"]}, x)


def attention_mass(
    params: dict,
    config: TextConfig,
    x: Float[Array, "P G T D"],
    positions: Int[Array, "P G T"],
    lengths: Int[Array, " P"],
    prefix: KV,
    key_sets: Bool[Array, "P sets L"],
) -> Float[Array, "layers P G T sets"]:
    """The layers of `extend`, and what each gives to sets of prompt tokens: attention mass of every
    response token's own row, mean over heads, float32. No map leaves a layer."""

    def attend(cache):
        def both(q, k, v):
            out = group_attention(q, *cache, lengths, k, v)
            return out, group_attention_mass(q, cache[0], lengths, k, key_sets)

        return both

    angles = text_angles(positions, config)
    xs = (prefix.k, prefix.v)
    _, mass = _run_layers(config, params["layers"], x, angles, xs, attend, remat="none")
    return mass


def head_logits(params: dict, config: TextConfig, hidden: Float[Array, "*B D"]) -> Array:
    """Float32 logits [..., V]; the tied head multiplies by the embedding's transpose."""
    if config.tied:
        kernel = gathered(params["embed"]["embedding"], ("vocab", "embed")).T
    else:
        kernel = gathered(params["head"]["kernel"], ("embed", "vocab"))
    kernel = kernel.astype(hidden.dtype)
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = jnp.matmul(flat, kernel, preferred_element_type=jnp.float32)
    return out.reshape(*hidden.shape[:-1], -1)
