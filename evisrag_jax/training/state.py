"""The state of a training run: what trains, what is frozen, the optimiser, and their shardings.

Parameters are held flat, "text/layers/q/kernel" → array, in two dicts, so that gradients and moments
exist for the trainable ones alone; `full_params` gives the model its nested tree back. Checkpoints
hold that nested tree under "params", so they can be read without the optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.optimiser import OptimConfig, trainable_paths

Flat = dict[str, Any]


class TrainState(NamedTuple):
    """What an update reads and writes.

    step: updates done.  trainable, frozen: parameters by path.  opt_state: the optimiser's, for the
    trainable parameters only.
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
    """The model's nested parameters; nothing is copied."""
    return nest({**trainable, **frozen})


def init_state(
    params: Mapping[str, Any], config: OptimConfig, tx: optax.GradientTransformation
) -> TrainState:
    """A state at step 0 around nested parameters. OptimError when nothing trains.

    Works on arrays, and under `jax.eval_shape` on shapes.
    """
    flat = flatten(params)
    chosen = set(trainable_paths(flat, config))
    trainable = {path: leaf for path, leaf in flat.items() if path in chosen}
    frozen = {path: leaf for path, leaf in flat.items() if path not in chosen}
    return TrainState(jnp.zeros((), jnp.int32), trainable, frozen, tx.init(trainable))


def state_shardings(config: Qwen25VLConfig, mesh: Mesh, state: TrainState) -> TrainState:
    """A NamedSharding for every leaf of a state (arrays or shapes).

    Parameters follow the model's logical axes; a moment lies where its parameter lies; counters are
    replicated.
    """
    shapes = flatten(model.param_shapes(config))
    split = meshes.shardings(model.logical_axes(config), model.param_shapes(config), mesh)
    by_path = flatten(split)
    whole = meshes.replicated(mesh)

    def moment(path: Any, leaf: Any) -> Any:
        name = getattr(path[-1], "key", None) if path else None
        known = name in by_path and leaf.shape == shapes[name].shape
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
    """The state as `runtime.checkpoints.Checkpoints.save` takes it; also the template to restore."""
    return {
        "params": full_params(state.trainable, state.frozen),
        "step": state.step,
        "opt_state": state.opt_state,
    }


def from_checkpoint(saved: Mapping[str, Any], like: TrainState) -> TrainState:
    """The state back from what `to_checkpoint` gave, divided as `like` is."""
    flat = flatten(saved["params"])
    return TrainState(
        step=saved["step"],
        trainable={path: flat[path] for path in like.trainable},
        frozen={path: flat[path] for path in like.frozen},
        opt_state=saved["opt_state"],
    )
