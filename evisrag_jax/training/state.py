"""The state of a training run: what trains, what is frozen, the optimiser, and their shardings.

Parameters are held flat, "text/layers/q/kernel" → array, in two dicts, so that gradients and moments
exist for the trainable ones alone; `full_params` gives the model its nested tree back. Checkpoints
hold that nested tree under "params", so they can be read without the optimiser.

    optim.last_layers = 2 of 5:   frozen["text/layers/q/kernel"]     layers 0 1 2
                                  trainable["text/layers/q/kernel"]        3 4   gradient, moments

A stack of which only the last layers train is in both dicts under its one path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from evisrag_jax.models.lora import LoraConfig, adapter_axes, is_adapter, merge, scale_adapters
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.optimiser import LAYERS, OptimConfig, OptimError, trainable_paths

Flat = dict[str, Any]


class TrainState(NamedTuple):
    """What an update reads and writes.

    step: updates done.  trainable, frozen: parameters by path; a path in both is a stack whose first
    layers are frozen.  opt_state: the optimiser's, for the trainable parameters only.
    """

    step: Int[Array, ""]
    trainable: Flat
    frozen: Flat
    opt_state: Any


def flatten(params: Mapping[str, Any]) -> Flat:
    """A nested dict as {"a/b/c": leaf}, in sorted order."""
    named = jax.tree_util.tree_leaves_with_path(dict(params))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named}


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b/c": leaf} as a nested dict."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def full_params(trainable: Flat, frozen: Flat) -> dict[str, Any]:
    """The model's nested parameters (or their shardings); nothing is copied but stacks whose last
    layers alone train, which are joined.

    In a training forward that copy lives as long as the forward does, beside the cast that it is
    mostly part of, and the backward pass forms the joined stack's gradient before its first layers
    are dropped: `last_layers` saves moments, accumulated gradients and updates, not products.
    """
    joined = {path: _join(frozen[path], trainable[path]) for path in trainable.keys() & frozen}
    return nest({**trainable, **frozen, **joined})


def _join(first: Any, last: Any) -> Any:
    if isinstance(last, NamedSharding):  # layers are never divided over devices
        return last
    if isinstance(last, jax.ShapeDtypeStruct):
        shape = (first.shape[0] + last.shape[0], *last.shape[1:])
        return jax.ShapeDtypeStruct(shape, last.dtype, sharding=last.sharding)
    return jnp.concatenate([first, last])


def forward_params(trainable: Flat, frozen: Flat, lora: LoraConfig, dtype: Any) -> dict[str, Any]:
    """What the training forward computes with, in `dtype`: adapters stay low-rank products."""
    params = full_params(trainable, frozen)
    return model.cast_params(scale_adapters(params, lora) if lora.rank else params, dtype)


def merged_params(trainable: Flat, frozen: Flat, lora: LoraConfig, dtype: Any) -> dict[str, Any]:
    """The same model without adapters, in `dtype`: what sampling computes with, and with adapters a copy
    of the model for as long as it samples."""
    params = full_params(trainable, frozen)
    return model.cast_params(merge(params, lora, dtype) if lora.rank else params, dtype)


def init_state(
    params: Mapping[str, Any], config: OptimConfig, tx: optax.GradientTransformation
) -> TrainState:
    """A state at step 0 around nested parameters. OptimError when nothing trains, or `last_layers`
    does not fit the decoder.

    Works on arrays, and under `jax.eval_shape` on shapes.
    """
    flat = flatten(params)
    chosen = set(trainable_paths(flat, config))
    trainable = {path: leaf for path, leaf in flat.items() if path in chosen}
    frozen = {path: leaf for path, leaf in flat.items() if path not in chosen}
    if config.last_layers:
        stacks = [path for path in trainable if path.startswith(LAYERS)]
        if not stacks:
            raise OptimError(f"optim.last_layers={config.last_layers}, but no decoder layer trains")
        layers = flat[stacks[0]].shape[0]
        if config.last_layers > layers:
            raise OptimError(f"optim.last_layers={config.last_layers} of a decoder of {layers}")
        for path in stacks if config.last_layers < layers else ():
            frozen[path], trainable[path] = _cut(flat[path], layers - config.last_layers)
    return TrainState(jnp.zeros((), jnp.int32), trainable, frozen, tx.init(trainable))


def _cut(stack: Any, first: int) -> tuple[Any, Any]:
    """The first layers of a stack, and those behind them."""
    return (
        jax.lax.slice_in_dim(stack, 0, first),
        jax.lax.slice_in_dim(stack, first, stack.shape[0]),
    )


def state_shardings(config: Qwen25VLConfig, mesh: Mesh, state: TrainState) -> TrainState:
    """A NamedSharding for every leaf of a state (arrays or shapes).

    Parameters and adapters follow the model's logical axes; a moment lies where its parameter lies;
    counters are replicated.
    """
    shapes = model.param_shapes(config)
    by_path = flatten(meshes.shardings(model.logical_axes(config), shapes, mesh))
    adapters = {path: leaf for path, leaf in state.trainable.items() if is_adapter(path)}
    by_path |= meshes.shardings(adapter_axes(config, adapters), adapters, mesh)
    whole = meshes.replicated(mesh)

    def moment(path: Any, leaf: Any) -> Any:
        name = getattr(path[-1], "key", None) if path else None
        known = name in state.trainable and leaf.shape == state.trainable[name].shape
        return by_path[name] if known else whole

    return TrainState(
        step=whole,
        trainable={path: by_path[path] for path in state.trainable},
        frozen={path: by_path[path] for path in state.frozen},
        opt_state=jax.tree_util.tree_map_with_path(moment, state.opt_state),
    )


def place(state: TrainState, shardings: TrainState) -> TrainState:
    """The state on its devices."""
    return jax.device_put(state, shardings)


def to_checkpoint(state: TrainState) -> dict[str, Any]:
    """The state as `runtime.checkpoints.Checkpoints.save` takes it; also the template to restore.

    Stacks of which the last layers alone train are copied: they are whole in a checkpoint.
    """
    params = flatten(full_params(state.trainable, state.frozen))
    for path in state.trainable.keys() & state.frozen:
        params[path] = _like(params[path], state.trainable[path])
    return {"params": nest(params), "step": state.step, "opt_state": state.opt_state}


def from_checkpoint(saved: Mapping[str, Any], like: TrainState) -> TrainState:
    """The state back from what `to_checkpoint` gave, divided as `like` is."""
    flat = flatten(saved["params"])
    trainable = {path: flat[path] for path in like.trainable}
    frozen = {path: flat[path] for path in like.frozen}
    for path in trainable.keys() & frozen:
        first, last = _cut(flat[path], like.frozen[path].shape[0])
        frozen[path] = _like(first, like.frozen[path])
        trainable[path] = _like(last, like.trainable[path])
    return TrainState(saved["step"], trainable, frozen, saved["opt_state"])


def _like(leaf: Any, place: Any) -> Any:
    """The array where another one lies: joining and cutting leave that to the compiler."""
    return jax.device_put(leaf, place.sharding) if isinstance(leaf, jax.Array) else leaf
