"""Blocks shared by the vision tower and the decoder: Linen parameter declarations, rotary maths.

Letters: B any batch, D model width, F mlp width, H head width. Every kernel carries logical axis
names (`nn.with_logical_partitioning`), from which `runtime.mesh` derives shardings.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from evisrag_jax.runtime.mesh import gathered

Axes = tuple[str | None, ...]
ADAPTERS = ("lora_a", "lora_b")


def _init(stddev: float, axes: Axes):
    return nn.with_logical_partitioning(nn.initializers.normal(stddev), axes)


class RMSNorm(nn.Module):
    """x / rms(x) · scale, the mean square taken in float32 whatever the dtype of x.

    The normalised value is rounded to x's dtype before the scale, as the reference does.
    """

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", init, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


class Linear(nn.Module):
    """Contracts the last `inputs` axes of x with a kernel of shape in_shape + features.

    The product itself is one 2-D matmul, which is what every backend runs fastest. Where the module's
    parameters hold adapters (`models.lora`, scaled), their low-rank product is added.
    """

    features: Sequence[int]
    axes: Axes
    inputs: int = 1
    use_bias: bool = False
    stddev: float = 0.02

    @nn.compact
    def __call__(self, x: Array) -> Array:
        split = x.ndim - self.inputs
        in_shape, out_shape = x.shape[split:], tuple(self.features)
        kernel = self.param("kernel", _init(self.stddev, self.axes), in_shape + out_shape)
        kernel = gathered(kernel, self.axes)
        n_in, n_out = _size(in_shape), _size(out_shape)
        flat = x.reshape(-1, n_in)
        y = flat @ kernel.astype(x.dtype).reshape(n_in, n_out)
        if self.has_variable("params", "lora_a"):
            a, b = (self.get_variable("params", name).astype(x.dtype) for name in ADAPTERS)
            a = gathered(a, (*self.axes[: self.inputs], None))
            b = gathered(b, (None, *self.axes[self.inputs :]))
            y = y + (flat @ a.reshape(n_in, -1)) @ b.reshape(-1, n_out)
        if self.use_bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.inputs :])
            bias = self.param("bias", init, out_shape)
            y = y + bias.astype(x.dtype).reshape(n_out)
        return y.reshape(x.shape[:split] + out_shape)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), the gated MLP of both towers."""

    width: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        gate = Linear((self.width,), ("embed", "mlp"), use_bias=self.use_bias, name="gate")(x)
        up = Linear((self.width,), ("embed", "mlp"), use_bias=self.use_bias, name="up")(x)
        down = Linear((x.shape[-1],), ("mlp", "embed"), use_bias=self.use_bias, name="down")
        return down(jax.nn.silu(gate) * up)


class Embedding(nn.Module):
    """A [V, D] table; the tied head multiplies by its transpose."""

    vocab: int
    width: int

    def setup(self):
        self.embedding = self.param(
            "embedding", _init(0.02, ("vocab", "embed")), (self.vocab, self.width)
        )

    def __call__(self, tokens: Array) -> Array:
        return self.embedding[tokens]


def rotary_frequencies(width: int, theta: float) -> Float32[np.ndarray, " half"]:
    """theta^(-2i/width) for i in [0, width/2).

    Computed on the host and rounded where the reference rounds (exponent, power, reciprocal): one
    unit in the last place is 0.002 rad at position 30,000, and compilers differ by one.
    """
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1) / np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def rotate(
    x: Float[Array, "*B N H"], cos: Float[Array, "*B half"], sin: Float[Array, "*B half"]
) -> Float[Array, "*B N H"]:
    """Rotary embedding, half-split convention: pair i is (x[i], x[i + H/2]).

    cos and sin are float32 (bf16 angles are off by 0.117 at 100 rows) and the rotation is done in
    float32; the result has the dtype of x.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def stack_init(module: nn.Module, depth: int, key: Array, *args, **kwargs):
    """Boxed parameters of `depth` copies of a layer, stacked on a leading "layers" axis."""

    def init(k):
        return module.init(k, *args, **kwargs)["params"]

    boxed = jax.vmap(init)(jax.random.split(key, depth))
    return jax.tree.map(
        lambda box: box.add_axis(0, {nn.PARTITION_NAME: "layers"}),
        boxed,
        is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata),
    )
