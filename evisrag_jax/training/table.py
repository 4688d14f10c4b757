"""What a run prints at its start: how every parameter is divided, what it costs a device, why it stays whole."""

from __future__ import annotations

import math
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from evisrag_jax.models.lora import adapter_axes, is_adapter
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime.mesh import format_bytes, format_table, sharding_rows
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.training.state import TrainState


def sharding_table(config: Qwen25VLConfig, mesh: Mesh, state: Any, shardings: TrainState) -> str:
    """A table of the trainable and one of the frozen parameters, and the optimiser's bytes.

    Args:
        state: a TrainState of arrays or shapes.
        shardings: `training.state.state_shardings` of it.
    """
    named = jax.tree_util.tree_leaves_with_path(model.logical_axes(config), is_leaf=_is_axes)
    axes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named}
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    parts = [f"mesh {sizes}, {jax.process_count()} process(es)"]
    for title, flat in (("trainable", state.trainable), ("frozen", state.frozen)):
        if flat:
            own = {p: axes[p] for p in flat if not is_adapter(p)}
            own |= adapter_axes(config, [p for p in flat if is_adapter(p)])
            parts += [f"\n{title}", format_table(sharding_rows(own, dict(flat), mesh))]
    moments = jax.tree.leaves(jax.tree.map(_device_bytes, state.opt_state, shardings.opt_state))
    parts.append(f"\noptimiser state: {format_bytes(sum(moments))} a device")
    return "\n".join(parts) + "\n"


def announce(
    folder: RunFolder, config: Qwen25VLConfig, mesh: Mesh, state: Any, shardings: TrainState
) -> None:
    """Keeps the table in the run folder; with several devices it is also printed, by process 0."""
    table = sharding_table(config, mesh, state, shardings)
    folder.write_sharding(table)
    if mesh.size > 1 and folder.writes:
        print(table, file=sys.stderr)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(part is None or isinstance(part, str) for part in node)


def _device_bytes(leaf: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
