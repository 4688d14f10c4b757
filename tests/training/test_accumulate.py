"""Accumulated sums against the whole batch, for every micro-batch size and number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.runtime.mesh import batch_sharding, make_mesh
from evisrag_jax.training.accumulate import accumulate, sum_over


def objective(w, rows):
    """A token sum of unequal lengths, as an update's."""
    seen = jnp.arange(rows["x"].shape[1]) < rows["n"][:, None]
    loss = jnp.where(seen, jnp.tanh(rows["x"] @ w["a"]).sum(-1) ** 2, 0.0)
    return loss.sum(), {"weight": seen.sum(), "first": loss[:, 0].sum()}


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(8, 6, 3)).astype(np.float32),
        "n": np.array([1, 2, 3, 4, 5, 6, 0, 2], np.int32),
        "none": None,
    }
    return {"a": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}, batch


def test_any_micro_size_gives_the_gradient_of_the_sum(case):
    """B53: micro 8, 4, 2, 1 equal jax.grad of the whole, relative 1e-6; counts exactly."""
    w, batch = case
    (total, aux), grads = jax.value_and_grad(objective, has_aux=True)(w, batch)
    for micro in (8, 4, 2, 1):
        got, value, sums = jax.jit(
            lambda w, b, m=micro: accumulate(objective, w, b, m),
        )(w, batch)
        np.testing.assert_allclose(got["a"], grads["a"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(value, total, rtol=1e-6)
        np.testing.assert_allclose(sums["first"], aux["first"], rtol=1e-6)
        assert int(sums["weight"]) == int(aux["weight"]) == 23


def test_sums_without_a_gradient(case):
    w, batch = case
    total, aux = sum_over(lambda rows: objective(w, rows), batch, 2)
    expected, _ = objective(w, batch)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert int(aux["weight"]) == 23


@pytest.mark.parametrize(("devices", "micro"), [(1, 2), (2, 4), (4, 4), (8, 8), (8, 2)])
def test_any_number_of_devices(case, devices, micro):
    """B53 on 1, 2, 4 and 8 virtual devices, also with slices smaller than the mesh, relative 1e-5."""
    w, batch = case
    mesh = make_mesh(devices=jax.devices()[:devices])
    placed = jax.device_put(batch, batch_sharding(mesh))
    grads = jax.grad(lambda w: objective(w, batch)[0])(w)
    w = jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    got, _, _ = jax.jit(lambda w, b: accumulate(objective, w, b, micro))(w, placed)
    np.testing.assert_allclose(got["a"], grads["a"], rtol=1e-5, atol=1e-6)


def test_gradient_of_bfloat16_parameters_adds_up_in_float32(case):
    w, batch = case
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
    got, _, _ = accumulate(objective, low, batch, 2)
    assert got["a"].dtype == jnp.float32


def test_batch_that_does_not_divide_names_both_numbers(case):
    w, batch = case
    with pytest.raises(ValueError, match="8 prompts.*micro=3"):
        accumulate(objective, w, batch, 3)
    with pytest.raises(ValueError, match="micro=0"):
        accumulate(objective, w, batch, 0)


def test_leaves_of_different_batches_are_refused(case):
    w, batch = case
    with pytest.raises(ValueError, match=r"\[4, 8\]"):
        accumulate(objective, w, {**batch, "n": batch["n"][:4]}, 1)
