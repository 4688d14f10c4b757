"""Mesh and shardings: sizes, rules, divisibility, and the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from evisrag_jax.runtime import mesh as m

AXES = {
    "embed": ("vocab", "embed"),
    "layers": {"q": ("layers", "embed", "heads"), "norm": ("layers", None)},
    "odd": ("mlp", "embed"),
    "twice": ("heads", "mlp"),
    "scale": (),
}


def shapes():
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {
        "embed": leaf(16, 8),
        "layers": {"q": leaf(3, 8, 12), "norm": leaf(3, 8)},
        "odd": leaf(7, 8),
        "twice": leaf(4, 6),
        "scale": leaf(),
    }


def test_mesh_sizes_and_auto_axes():
    mesh = m.make_mesh()
    assert dict(mesh.shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert dict(m.make_mesh(fsdp=4, tensor=2).shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert dict(m.make_mesh(2, -1, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert m.make_mesh(devices=jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, -1, 1), "only one size may be -1"),
        ((-1, 3, 1), "8 devices do not divide by 3"),
        ((2, 2, 1), "needs 4 devices, 8 are given"),
        ((0, 1, 1), "a size is a positive number"),
    ],
)
def test_wrong_mesh_sizes_are_refused(sizes, message):
    with pytest.raises(m.MeshError, match=message):
        m.make_mesh(*sizes)


def test_rules_split_and_replicate_with_reasons():
    mesh = m.make_mesh(data=1, fsdp=4, tensor=2)
    assert m.param_spec(("vocab", "embed"), (16, 8), mesh) == (PartitionSpec("tensor", "fsdp"), ())
    spec, reasons = m.param_spec(("mlp", "embed"), (7, 8), mesh)
    assert spec == PartitionSpec(None, "fsdp")
    assert reasons == ("mlp: 7 does not divide by tensor=2",)
    spec, reasons = m.param_spec(("heads", "mlp"), (4, 6), mesh)
    assert spec == PartitionSpec("tensor")
    assert reasons == ("mlp: tensor is taken by an earlier axis",)
    # One device a mesh axis: nothing to split, nothing to explain.
    assert m.param_spec(("mlp",), (7,), m.make_mesh()) == (PartitionSpec(), ())


def test_shardings_place_arrays_and_keep_values():
    mesh = m.make_mesh(data=1, fsdp=4, tensor=2)
    params = jax.tree.map(lambda s: jnp.arange(s.size, dtype=s.dtype).reshape(s.shape), shapes())
    placed = jax.device_put(params, m.shardings(AXES, params, mesh))
    assert placed["embed"].addressable_shards[0].data.shape == (8, 2)
    assert placed["layers"]["q"].addressable_shards[0].data.shape == (3, 2, 6)
    assert placed["odd"].addressable_shards[0].data.shape == (7, 2)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(placed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_table_counts_real_device_bytes():
    mesh = m.make_mesh(data=1, fsdp=4, tensor=2)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes())
    placed = jax.device_put(params, m.shardings(AXES, params, mesh))
    rows = {row.path: row for row in m.sharding_rows(AXES, params, mesh)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert rows[name].device_bytes == leaf.addressable_shards[0].data.nbytes
        assert rows[name].total_bytes == leaf.nbytes
    table = m.format_table(list(rows.values()))
    assert "mlp: 7 does not divide by tensor=2" in table
    assert "layers/q" in table and "total" in table.splitlines()[-1]
    assert m.format_bytes(1536) == "1.5 KiB" and m.format_bytes(12) == "12 B"


def test_unknown_names_and_differing_trees_are_refused():
    mesh = m.make_mesh()
    with pytest.raises(m.MeshError, match="no sharding rule for axis 'hats'"):
        m.param_spec(("hats",), (4,), mesh)
    with pytest.raises(m.MeshError, match="do not fit the shape"):
        m.param_spec(("mlp",), (4, 4), mesh)
    with pytest.raises(m.MeshError, match="a/w is without axes"):
        m.shardings({"a": {}}, {"a": {"w": jnp.zeros(2)}}, mesh)
    with pytest.raises(m.MeshError, match="a/w: no sharding rule"):
        m.shardings({"a": {"w": ("hats",)}}, {"a": {"w": jnp.zeros(2)}}, mesh)


def test_batch_sharding_spreads_the_first_axis_over_data_and_fsdp():
    mesh = m.make_mesh(data=2, fsdp=2, tensor=2)
    batch = jax.device_put(jnp.zeros((8, 3)), m.batch_sharding(mesh))
    assert batch.addressable_shards[0].data.shape == (2, 3)
    whole = jax.device_put(jnp.zeros((8, 3)), m.replicated(mesh))
    assert whole.addressable_shards[0].data.shape == (8, 3)
