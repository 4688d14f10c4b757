"""Decoding: one token a slot against resident prompts, with weights laid out for it.

    params ──decode_params──► DecodeParams ─┐        once a call, outside the loop
    tokens [S] ─────────────────────────────┴─decode_step──► hidden [S, D], suffix caches

A product with few rows costs the reading of its weights: q, k, v are one kernel, and so are gate and
up. Layers and caches are tuples, so that each layer's cache is updated in place inside a loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from evisrag_jax.models.decode_attention import Seats, slot_attention
from evisrag_jax.models.layers import RMSNorm, rotate
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig
from evisrag_jax.models.qwen25vl.text import KV, text_angles


class DecodeLayer(NamedTuple):
    """Weights of one layer. `qkv` and `gate_up` are tuples of kernels: one, or one a projection
    where heads are divided over devices. `bias` is None without one."""

    norm1: Any
    qkv: tuple[Array, ...]
    bias: tuple[Array, ...] | None
    o: Array
    norm2: Any
    gate_up: tuple[Array, ...]
    down: Array


class DecodeParams(NamedTuple):
    """What decoding reads of the decoder."""

    embedding: Float[Array, "V D"]
    layers: tuple[DecodeLayer, ...]
    norm: Any
    head: Float[Array, "D V"]


def decode_params(params: dict, config: Qwen25VLConfig, *, fuse: bool = True) -> DecodeParams:
    """The decoder's weights in decoding layout. `fuse` joins q/k/v and gate/up; not for heads that
    are divided over devices, which would move at every step."""
    text = params["text"]

    def joined(*parts):
        return (jnp.concatenate(parts, axis=-1),) if fuse else parts

    def layer(i: int) -> DecodeLayer:
        one = jax.tree.map(lambda a: a[i], text["layers"])
        qkv = [one[name]["kernel"] for name in "qkv"]
        bias = [one[name]["bias"].reshape(-1) for name in "qkv" if "bias" in one[name]]
        mlp = one["mlp"]
        return DecodeLayer(
            norm1=one["norm1"],
            qkv=joined(*(k.reshape(k.shape[0], -1) for k in qkv)),
            bias=joined(*bias) if bias else None,
            o=one["o"]["kernel"].reshape(-1, config.text.width),
            norm2=one["norm2"],
            gate_up=joined(mlp["gate"]["kernel"], mlp["up"]["kernel"]),
            down=mlp["down"]["kernel"],
        )

    embedding = text["embed"]["embedding"]
    return DecodeParams(
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.text.layers)),
        norm=text["norm"],
        head=embedding.T if config.text.tied else text["head"]["kernel"],
    )


def decode_step(
    params: DecodeParams,
    config: Qwen25VLConfig,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    count: Int[Array, " S"],
    seats: Seats,
    lengths: Int[Array, " R"],
    prefix: KV,
    suffix: KV,
) -> tuple[Float[Array, "S D"], KV]:
    """Feeds one token a slot, as number `count` of its suffix.

    prefix: tuples of [R, K, L, H] a layer.  suffix: tuples of [S, K, T, H] a layer, written at `count`.
    Returns the hidden state after the final norm, and the suffix.
    """
    cfg = config.text
    x = params.embedding[tokens]
    angles = text_angles(positions, cfg)
    keys, values = [], []
    for i, layer in enumerate(params.layers):
        q, k, v = _qkv(layer, cfg, RMSNorm(cfg.eps).apply({"params": layer.norm1}, x))
        k, v = rotate(k, *angles), v
        keys.append(_put(suffix.k[i], k, count))
        values.append(_put(suffix.v[i], v, count))
        out = slot_attention(
            rotate(q, *angles),
            prefix.k[i],
            prefix.v[i],
            lengths,
            keys[-1],
            values[-1],
            count,
            seats,
        )
        x = x + out.reshape(len(x), -1) @ layer.o
        h = RMSNorm(cfg.eps).apply({"params": layer.norm2}, x)
        gate, up = _split(layer.gate_up, h, (cfg.mlp, cfg.mlp))
        x = x + (jax.nn.silu(gate) * up) @ layer.down
    x = RMSNorm(cfg.eps).apply({"params": params.norm}, x)
    return x, KV(tuple(keys), tuple(values))


def decode_logits(params: DecodeParams, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
    """Float32 logits."""
    return jnp.matmul(hidden, params.head, preferred_element_type=jnp.float32)


def resident_kv(kv: KV) -> KV:
    """A prefill's stacked cache [layers, P, L, K, H] as tuples of [P, K, L, H]: heads first, so that a
    head's keys lie together."""
    return KV(*(tuple(a.transpose(0, 1, 3, 2, 4)) for a in kv))


def empty_kv(config: Qwen25VLConfig, rows: int, length: int, dtype) -> KV:
    """All-zero caches, tuples of [rows, K, length, H] a layer."""
    shape = (rows, config.text.kv_heads, length, config.text.head_dim)
    layers = range(config.text.layers)
    return KV(*(tuple(jnp.zeros(shape, dtype) for _ in layers) for _ in range(2)))


def _qkv(layer: DecodeLayer, cfg: TextConfig, h: Array) -> tuple[Array, Array, Array]:
    sizes = tuple(n * cfg.head_dim for n in (cfg.heads, cfg.kv_heads, cfg.kv_heads))
    parts = _split(layer.qkv, h, sizes, layer.bias)
    return tuple(a.reshape(len(a), -1, cfg.head_dim) for a in parts)


def _split(kernels: tuple, h: Array, sizes: tuple[int, ...], bias: tuple | None = None) -> tuple:
    """h through one kernel or several, as parts of the given widths."""
    out = [h @ kernel for kernel in kernels]
    if bias is not None:
        out = [a + b for a, b in zip(out, bias, strict=True)]
    if len(out) == len(sizes):
        return tuple(out)
    edges = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return tuple(jnp.split(out[0], edges, axis=-1))


def _put(cache: Array, new: Array, count: Array) -> Array:
    """cache [S, K, T, H] with new [S, K, H] at each slot's own place."""
    return cache.at[jnp.arange(len(count)), :, count].set(new.astype(cache.dtype), mode="drop")
