"""Device mesh and shardings: logical axis names map to mesh axes by rules that are data.

A parameter declares what its axes mean ("vocab", "embed", "heads", ...); the rules say which mesh
axis each meaning is split over. An axis that does not divide evenly, or whose mesh axis is already
taken within the same parameter, is replicated, and the table says so with its cost in bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Meaning of a parameter's axis -> the mesh axis it is split over (None: never split).
DEFAULT_RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "norm": None,
    "layers": None,
}

LogicalAxes = tuple[str | None, ...]


class MeshError(ValueError):
    """A mesh shape that the devices cannot fill, or axes that no rule knows."""


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with axes ("data", "fsdp", "tensor"), all of them Auto (the compiler partitions).

    Args:
        data, fsdp, tensor: sizes; at most one may be -1 and takes the devices that are left.
        devices: which devices; all of them by default.
    Raises:
        MeshError: sizes that do not multiply to the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor), strict=True))
    asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise MeshError(f"mesh {asked}: a size is a positive number, or -1 for the devices left")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise MeshError(f"mesh {asked}: only one size may be -1")
    if free:
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if len(found) % fixed:
            raise MeshError(f"mesh {asked}: {len(found)} devices do not divide by {fixed}")
        sizes[free[0]] = len(found) // fixed
    if math.prod(sizes.values()) != len(found):
        raise MeshError(
            f"mesh {asked}: needs {math.prod(sizes.values())} devices, {len(found)} are given"
        )
    shape, auto = tuple(sizes.values()), (AxisType.Auto,) * 3
    count = jax.process_count()
    if count == 1:
        return jax.make_mesh(shape, MESH_AXES, axis_types=auto, devices=found)
    local = len(found) // count
    if local * count != len(found) or local % sizes["tensor"]:
        raise MeshError(
            f"mesh {asked}: tensor={sizes['tensor']} must divide the {local} devices of each process"
        )
    # In the order of the processes: each owns neighbouring rows of a batch.
    found.sort(key=lambda device: device.process_index)
    return Mesh(np.array(found).reshape(shape), MESH_AXES, axis_types=auto)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """First axis over data and fsdp together, the rest whole: prompts and their groups."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def traced_on(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for jit, told while it is traced that its arrays are divided over the mesh: attention then
    takes the form that divides (`models.attention`)."""
    if mesh is None or mesh.size == 1:
        return function

    @functools.wraps(getattr(function, "func", function))
    def traced(*args: Any, **named: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **named)

    return traced


def batch_shards() -> int:
    """Into how many parts the rows of a batch are divided, for the program that is being traced."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in BATCH_AXES)


def over_batch(array: Any, axis: int = 0) -> Any:
    """An array of the program that is being traced, its rows (along `axis`) over data and fsdp.

    Without it the compiler may divide activations as the kernels are divided, over their width, and every
    device would work on the rows of all.
    """
    if batch_shards() == 1:
        return array
    spec = [PartitionSpec.UNCONSTRAINED] * array.ndim
    spec[axis] = BATCH_AXES
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*spec))


def gathered(kernel: Any, axes: LogicalAxes, *, looked_up: bool = False) -> Any:
    """A parameter of the program that is being traced, whole along fsdp: every device gathers it where it is
    used, and its gradient is added up into each device's own part.

    looked_up: it is a table that rows are taken from. Its gradient is then added up whole before it is cut:
    cut at once, the compiler would bring the gradients of all devices' rows to each of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get("fsdp", 1) == 1:
        return kernel
    rules = {name: None if axis == "fsdp" else axis for name, axis in DEFAULT_RULES.items()}
    whole, part = (param_spec(axes, kernel.shape, mesh, r)[0] for r in (rules, DEFAULT_RULES))
    return _gather(kernel, whole, (whole, part) if looked_up else (part,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(kernel: Any, whole: PartitionSpec, back: tuple[PartitionSpec, ...]) -> Any:
    return jax.lax.with_sharding_constraint(kernel, whole)


def _gather_forward(
    kernel: Any, whole: PartitionSpec, back: tuple[PartitionSpec, ...]
) -> tuple[Any, None]:
    return _gather(kernel, whole, back), None


def _gather_backward(
    whole: PartitionSpec, back: tuple[PartitionSpec, ...], _: None, grad: Any
) -> tuple[Any]:
    for spec in back:
        grad = jax.lax.with_sharding_constraint(grad, spec)
    return (grad,)


_gather.defvjp(_gather_forward, _gather_backward)


def put_rows(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays on their devices, split over the first axis alone; None leaves stay None.

    Every process gives its own rows: row r of the whole belongs to process r // (rows / processes). An
    explicit transfer: it works under a transfer guard on "disallow".
    """
    count = jax.process_count()
    if count == 1:
        return jax.device_put(tree, sharding)

    def put(rows: Any) -> jax.Array:
        if isinstance(rows, jax.Array):  # placed before
            return jax.device_put(rows, sharding)
        shape = (len(rows) * count, *np.shape(rows)[1:])
        first = len(rows) * jax.process_index()
        places = sharding.addressable_devices_indices_map(shape)
        parts = {}
        for device, index in places.items():
            begin, end, _ = index[0].indices(shape[0])
            if begin < first or end > first + len(rows):
                raise MeshError(
                    f"rows {begin} to {end} of {shape[0]} lie on {device}, which is not of the process "
                    "that has them; let the axes data x fsdp divide by the processes"
                )
            parts[device] = rows[begin - first : end - first]
        placed = jax.device_put(list(parts.values()), list(parts))
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    return jax.tree.map(put, tree)


def local_mesh(mesh: Mesh, tensor: int = 0) -> Mesh:
    """This process's devices of a mesh, batches over all of them but for `tensor` at a time.

    Args:
        tensor: devices a copy of the parameters is split over; 0 for as many as in `mesh`.
    Raises:
        MeshError: they do not divide this process's devices.
    """
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    tensor = tensor or mesh.shape["tensor"]
    if len(own) % tensor:
        raise MeshError(f"tensor={tensor} does not divide the {len(own)} devices of a process")
    shape = (len(own) // tensor, 1, tensor)
    return Mesh(np.array(own).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def param_spec(
    axes: LogicalAxes,
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, str | None] = DEFAULT_RULES,
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Which mesh axis every axis of one parameter is split over.

    Args:
        axes: the meaning of every axis; None for an axis without a name.
        shape: the parameter's sizes, as many as ``axes``.
    Returns:
        The spec, and a reason for every axis that stays whole although its rule would split it.
    Raises:
        MeshError: a name without a rule, a rule naming an axis that the mesh lacks, a wrong rank.
    """
    if len(axes) != len(shape):
        raise MeshError(f"axes {axes} do not fit the shape {tuple(shape)}")
    spec: list[str | None] = []
    reasons: list[str] = []
    for name, size in zip(axes, shape, strict=True):
        target = None
        if name is not None:
            if name not in rules:
                raise MeshError(f"no sharding rule for axis {name!r}; rules: {', '.join(rules)}")
            target = rules[name]
        if target is not None:
            if target not in mesh.shape:
                raise MeshError(f"rule {name} -> {target}: the mesh has axes {mesh.axis_names}")
            parts = mesh.shape[target]
            if parts == 1:
                target = None
            elif target in spec:
                reasons.append(f"{name}: {target} is taken by an earlier axis")
                target = None
            elif size % parts:
                reasons.append(f"{name}: {size} does not divide by {target}={parts}")
                target = None
        spec.append(target)
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec), tuple(reasons)


def _is_axes(node: Any) -> bool:
    if isinstance(node, PartitionSpec):
        return True
    return type(node) is tuple and all(part is None or isinstance(part, str) for part in node)


def _pair(logical_axes: Any, params: Any) -> list[tuple[str, LogicalAxes, Any]]:
    """(path, axes, leaf) of every parameter; the two trees must hold the same paths."""

    def name(path: Any) -> str:
        return jax.tree_util.keystr(path, simple=True, separator="/")

    named = jax.tree_util.tree_leaves_with_path(logical_axes, is_leaf=_is_axes)
    axes = {name(path): tuple(leaf) for path, leaf in named}
    leaves = {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    lacking = sorted(leaves.keys() ^ axes.keys())
    if lacking:
        side = "axes" if lacking[0] in leaves else "a parameter"
        raise MeshError(f"{len(lacking)} paths differ; {lacking[0]} is without {side}")
    return [(path, axes[path], leaf) for path, leaf in leaves.items()]


def shardings(
    logical_axes: Any,
    params: Any,
    mesh: Mesh,
    rules: Mapping[str, str | None] = DEFAULT_RULES,
) -> Any:
    """A NamedSharding for every parameter, in the tree structure of ``params``.

    Args:
        logical_axes: the same tree with a tuple of axis names (or a PartitionSpec of them) a leaf.
        params: arrays or ShapeDtypeStructs; only shapes are read.
    """
    out = []
    for path, axes, leaf in _pair(logical_axes, params):
        try:
            spec, _ = param_spec(axes, leaf.shape, mesh, rules)
        except MeshError as error:
            raise MeshError(f"{path}: {error}") from error
        out.append(NamedSharding(mesh, spec))
    return jax.tree.unflatten(jax.tree.structure(params), out)


@dataclasses.dataclass(frozen=True)
class ShardingRow:
    """One parameter of the table.

    device_bytes: bytes on each device; total_bytes: bytes of the whole array.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    device_bytes: int
    total_bytes: int
    reasons: tuple[str, ...]


def sharding_rows(
    logical_axes: Any,
    params: Any,
    mesh: Mesh,
    rules: Mapping[str, str | None] = DEFAULT_RULES,
) -> list[ShardingRow]:
    """What every parameter is split over, what it costs a device, and why an axis stays whole."""
    rows = []
    for path, axes, leaf in _pair(logical_axes, params):
        spec, reasons = param_spec(axes, leaf.shape, mesh, rules)
        shape, width = tuple(leaf.shape), np.dtype(leaf.dtype).itemsize
        local = NamedSharding(mesh, spec).shard_shape(shape)
        rows.append(
            ShardingRow(
                path=path,
                shape=shape,
                dtype=np.dtype(leaf.dtype).name,
                spec=spec,
                device_bytes=math.prod(local) * width,
                total_bytes=math.prod(shape) * width,
                reasons=reasons,
            )
        )
    return rows


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def format_table(rows: Sequence[ShardingRow]) -> str:
    """The rows as aligned plain text, with totals, to be printed at start-up."""
    head = ("parameter", "shape", "dtype", "split over", "a device", "why whole")
    lines = [
        (
            row.path,
            "x".join(map(str, row.shape)) or "scalar",
            row.dtype,
            ", ".join(part or "-" for part in row.spec) or "-",
            format_bytes(row.device_bytes),
            "; ".join(row.reasons),
        )
        for row in rows
    ]
    device = sum(row.device_bytes for row in rows)
    total = sum(row.total_bytes for row in rows)
    lines.append(("total", "", "", "", format_bytes(device), f"{format_bytes(total)} in all"))
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *lines]
    )
