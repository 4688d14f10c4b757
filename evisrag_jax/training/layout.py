"""Two layouts of the same parameters: sharded for training, in whole copies for sampling.

    training   one copy over all devices of all processes       data x fsdp x tensor
       │ reshard: one jitted copy, in the compute dtype
    sampling   a copy a `tensor` devices of each process        data x tensor

Decoding reads every weight for every token: shards that live elsewhere would move at each step. With a
copy at hand nothing crosses processes while responses are sampled, so each decodes its own prompts at
its own pace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime import mesh as meshes


class SamplingLayout:
    """Where the sampler's parameters lie.

    mesh: this process's devices, batches over all of them but for `tensor` at a time.
    local: shardings of the nested parameters on it.  wide: the same over all processes.
    same: whether training has this layout already, so that nothing need be copied.

    Args:
        config: the model's.
        mesh: of training.
        tensor: devices a copy is split over; 0 for as many as in training.
    """

    def __init__(self, config: Qwen25VLConfig, mesh: Mesh, tensor: int = 0):
        self.mesh = meshes.local_mesh(mesh, tensor)
        shapes = model.param_shapes(config)
        self.local = meshes.shardings(model.logical_axes(config), shapes, self.mesh)
        devices = np.array(list(mesh.devices.flat))
        wide = Mesh(
            devices.reshape(jax.process_count(), *self.mesh.devices.shape),
            ("process", *meshes.MESH_AXES),
            axis_types=(AxisType.Auto,) * 4,
        )
        self.wide = jax.tree.map(lambda s: NamedSharding(wide, s.spec), self.local)
        alike = mesh.shape["tensor"] == self.mesh.shape["tensor"] and mesh.shape["fsdp"] == 1
        self.same = jax.process_count() == 1 and alike

    def take(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays in the wide layout as this process's own; nothing is copied.

        params: the nested parameters, or some of their first-level parts.
        """

        def own(array: jax.Array, sharding: NamedSharding) -> jax.Array:
            parts = {shard.device: shard.data for shard in array.addressable_shards}
            ordered = [parts[device] for device in sharding.mesh.devices.flat]
            return jax.make_array_from_single_device_arrays(array.shape, sharding, ordered)

        return {name: jax.tree.map(own, params[name], self.local[name]) for name in params}

    def reshard(self, shardings: Mapping[str, Any], parts: tuple[str, ...]) -> Callable[[Any], Any]:
        """A function of some first-level parts of the parameters in training's layout that gives them in
        this one."""
        wide = {name: self.wide[name] for name in parts}
        copy = jax.jit(_copy, in_shardings=({n: shardings[n] for n in parts},), out_shardings=wide)
        return lambda params: self.take(copy(params))


def _copy(tree: Any) -> Any:
    return jax.tree.map(jax.numpy.copy, tree)
