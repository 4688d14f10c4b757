"""Low-rank adapters: small matrices beside frozen kernels, y = x W + (x A) B · alpha / r.

    "q": {"kernel": [layers, D, N, H], "lora_a": [layers, D, r], "lora_b": [layers, r, N, H]}
                     └ in ┘ └ out ┘             └ in ┘                        └ out ┘

Adapters are parameters like any other: stacked as their kernels are, sharded by the same axis names,
in the same checkpoint. `layers.Linear` adds their product wherever it finds them, so nothing else of
the model knows about them. A starts as PEFT draws it and B at zero, so a fresh model is the base.

    training  scale_adapters: B · alpha / r, the low-rank product in the forward
    sampling, export          merge: W + A B · alpha / r, a model without adapters

There is no dropout: the log-probs that a ratio compares must come from one deterministic forward.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from evisrag_jax.models.layers import ADAPTERS, Axes
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.tensors import entries
from evisrag_jax.runtime import mesh as meshes

# PEFT's usual choice for this family: every projection of the decoder.
DECODER = "^text/layers/(q|k|v|o|mlp/(gate|up|down))$"
MATRICES = ("kernel", "embedding")


class LoraError(ValueError):
    """Adapter settings that cannot be; the message names the field."""


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of a run.

    rank: of every adapter; 0 for none, and all parameters train as `optim` says.  alpha: the product
    is scaled by alpha / rank.  targets: regular expression searched in the "/"-joined paths of linear
    layers, such as "text/layers/q" or "vision/blocks/qkv".  also: regular expression searched in the
    paths of base parameters, such as "text/norm/scale"; what it matches trains beside the adapters
    ("" for nothing; `optim.train` and `optim.freeze` do not count with adapters).
    """

    rank: int = 0
    alpha: float = 16.0
    targets: str = DECODER
    also: str = ""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise LoraError(f"lora.rank={self.rank} must not be negative (0 for no adapters)")
        if not 0 < self.alpha < math.inf:
            raise LoraError(
                f"lora.alpha={self.alpha} must be a positive number: it scales adapters"
            )
        for name in ("targets", "also"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise LoraError(
                    f"lora.{name}={getattr(self, name)!r} is no regular expression ({error})"
                ) from error

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Target:
    """A linear layer that can have an adapter.

    path: its module, "text/layers/q".  shape, axes: of its kernel, stacked layers first.  stacked: how
    many of those axes are layers, 0 or 1.  inputs: input axes.  names: its modules in the published
    layout, one a layer.
    """

    path: str
    shape: tuple[int, ...]
    axes: Axes
    stacked: int
    inputs: int
    names: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of the matrix."""
        edge = self.stacked + self.inputs
        return math.prod(self.shape[self.stacked : edge]), math.prod(self.shape[edge:])

    def split(self, whole: tuple, middle: Any) -> tuple[tuple, tuple]:
        """Shapes or axes of A and B from those of the kernel, with `middle` for the rank."""
        edge = self.stacked + self.inputs
        return (*whole[:edge], middle), (*whole[: self.stacked], middle, *whole[edge:])


@cache
def linear_layers(config: Qwen25VLConfig) -> tuple[Target, ...]:
    """Every linear layer of a model that runs as one; the head does not (its kernel may be tied)."""
    names: dict[tuple[str, ...], list[str]] = {}
    facts: dict[tuple[str, ...], tuple[int, int]] = {}
    for entry in entries(config):
        if entry.inputs is not None and entry.path != ("text", "head", "kernel"):
            names.setdefault(entry.path, []).append(entry.name.removesuffix(".weight"))
            facts[entry.path] = (int(entry.layer is not None), entry.inputs)
    shapes, axes = model.param_shapes(config), model.logical_axes(config)
    return tuple(
        Target(
            path="/".join(path[:-1]),
            shape=tuple(_leaf(shapes, path).shape),
            axes=_leaf(axes, path),
            stacked=facts[path][0],
            inputs=facts[path][1],
            names=tuple(names[path]),
        )
        for path in names
    )


def find_targets(config: Qwen25VLConfig, lora: LoraConfig) -> tuple[Target, ...]:
    """The linear layers that get an adapter.

    Raises LoraError when `targets` matches none, or something with a matrix that can have none (an
    embedding, the patch embedding, the head), when the rank is larger than a matrix, and when `also`
    matches no parameter.
    """
    every = linear_layers(config)
    found = tuple(target for target in every if re.search(lora.targets, target.path))
    known = ", ".join(target.path for target in every)
    paths = [path for path, _ in _named(model.param_shapes(config))]
    modules = [p.rsplit("/", 1)[0] for p in paths if p.rsplit("/", 1)[1] in MATRICES]
    others = sorted(set(modules) - {target.path for target in every})
    wrong = [path for path in others if re.search(lora.targets, path)]
    if wrong:
        raise LoraError(
            f"lora.targets={lora.targets!r} matches {', '.join(wrong)}, which cannot have an "
            f"adapter; these can: {known}"
        )
    if not found:
        raise LoraError(f"lora.targets={lora.targets!r} matches no linear layer; there are {known}")
    for target in found:
        if lora.rank > min(target.sizes):
            raise LoraError(
                f"lora.rank={lora.rank} is larger than {target.path}, a matrix of "
                f"{target.sizes[0]} x {target.sizes[1]}"
            )
    if lora.also and not any(re.search(lora.also, path) for path in paths):
        raise LoraError(f"lora.also={lora.also!r} matches no parameter; paths look like {paths[0]}")
    return found


def is_adapter(path: str) -> bool:
    """Whether a "/"-joined parameter path is that of an adapter."""
    return path.rsplit("/", 1)[-1] in ADAPTERS


def adapter_axes(config: Qwen25VLConfig, paths: Iterable[str]) -> dict[str, Axes]:
    """Logical axis names of adapters: those of their kernels, the rank whole."""
    by_path = {target.path: target for target in linear_layers(config)}
    out = {}
    for path in paths:
        module, name = path.rsplit("/", 1)
        target = by_path[module]
        out[path] = target.split(target.axes, None)[ADAPTERS.index(name)]
    return out


def init_adapters(config: Qwen25VLConfig, lora: LoraConfig, seed: int) -> dict[str, Array]:
    """Fresh float32 adapters by path. A is uniform within 1 / sqrt(inputs), PEFT's kaiming rule; B is
    zero. A kernel's draw depends on the seed and its path alone."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"lora"))
    out = {}
    for target in find_targets(config, lora):
        a, b = target.split(target.shape, lora.rank)
        own = jax.random.fold_in(key, zlib.crc32(target.path.encode()))
        bound = target.sizes[0] ** -0.5
        out[f"{target.path}/lora_a"] = jax.random.uniform(own, a, minval=-bound, maxval=bound)
        out[f"{target.path}/lora_b"] = jnp.zeros(b)
    return out


def add_adapters(
    params: Mapping[str, Any], config: Qwen25VLConfig, lora: LoraConfig, mesh: Mesh, *, seed: int
) -> dict[str, Any]:
    """Nested base parameters with fresh adapters beside their kernels, drawn where they lie."""
    draw = partial(init_adapters, config, lora, seed)
    shapes = jax.eval_shape(draw)
    placed = meshes.shardings(adapter_axes(config, shapes), shapes, mesh)
    out = _copy(params)
    for path, leaf in jax.jit(draw, out_shardings=placed)().items():
        *folders, name = path.split("/")
        _leaf(out, folders)[name] = leaf
    return out


def scale_adapters(params: Mapping[str, Any], lora: LoraConfig) -> dict[str, Any]:
    """Nested parameters whose B are multiplied by alpha / r, as `layers.Linear` takes them.

    A product over [r, out], not over activations; exact where alpha / r is a power of two.
    """
    return _map_adapted(params, lambda one: one | {"lora_b": one["lora_b"] * lora.scale})


def merge(params: Mapping[str, Any], lora: LoraConfig, dtype: Any = None) -> dict[str, Any]:
    """Nested parameters without adapters: kernels W + A B · alpha / r in `dtype` (default: theirs).

    Summed in float32 and rounded once; in bfloat16 what is small beside a weight is rounded away,
    which the metric `rollout/logp_gap_mean` shows. One layer's sum at a time is held in float32.
    """

    def module(one: dict[str, Any]) -> dict[str, Any]:
        kernel, a, b = (one[name] for name in ("kernel", *ADAPTERS))
        out = merge_kernel(kernel, a, b, scale=lora.scale, dtype=jnp.dtype(dtype or kernel.dtype))
        return {name: leaf for name, leaf in one.items() if name not in ADAPTERS} | {"kernel": out}

    return _map_adapted(params, module)


@partial(jax.jit, static_argnames=("scale", "dtype"))
def merge_kernel(
    kernel: Float[Array, "..."],
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    *,
    scale: float,
    dtype: Any,
) -> Float[Array, "..."]:
    """W + A B · scale of one module; a layer at a time where its kernels are stacked."""
    stacked = a.ndim + b.ndim - 2 - kernel.ndim

    def one(parts: tuple[Array, Array, Array]) -> Array:
        w, a, b = (part.astype(jnp.float32) for part in parts)
        left, right = a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1)
        product = jnp.matmul(left, right, precision="highest").reshape(w.shape)
        return (w + product * scale).astype(dtype)

    return jax.lax.map(one, (kernel, a, b)) if stacked else one((kernel, a, b))


def merged_shardings(shardings: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of shardings without those of adapters: where merged parameters lie."""
    return _map_adapted(
        shardings, lambda one: {name: leaf for name, leaf in one.items() if name not in ADAPTERS}
    )


def _map_adapted(tree: Mapping[str, Any], change: Callable[[dict], dict]) -> dict[str, Any]:
    """The tree with every module dict that holds adapters changed."""
    if "lora_a" in tree:
        return change(dict(tree))
    return {
        name: _map_adapted(node, change) if isinstance(node, Mapping) else node
        for name, node in tree.items()
    }


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(node) if isinstance(node, Mapping) else node for name, node in tree.items()}


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _leaf(tree: Any, path: Iterable[str]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
