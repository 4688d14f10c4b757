"""Flat states of a real (tiny) model: what trains, where it lies, and back through a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig
from evisrag_jax.models.qwen25vl.model import init_params
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.optimiser import OptimConfig, OptimError, make_optimiser
from evisrag_jax.training.state import (
    flatten,
    from_checkpoint,
    full_params,
    init_state,
    nest,
    place,
    state_shardings,
    to_checkpoint,
)

CONFIG = Qwen25VLConfig(
    TextConfig(
        vocab=32,
        width=16,
        mlp=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=4,
        theta=100.0,
        mrope_section=(1, 1, 0),
        tied=False,
    ),
    VisionConfig(depth=2, width=16, mlp=16, heads=2, out_width=16, full_attention=(1,)),
)
OPTIM = OptimConfig(learning_rate=1e-2)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def state(params):
    return init_state(params, OPTIM, make_optimiser(OPTIM))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


def test_flat_paths_and_back(params):
    flat = flatten(params)
    assert "text/layers/q/kernel" in flat and "vision/merger/fc1/bias" in flat
    equal(nest(flat), params)


def test_moments_exist_for_trainable_parameters_only(params, state):
    assert all(path.startswith("text/") for path in state.trainable)
    assert all(path.startswith("vision/") for path in state.frozen)
    sizes = [a.size for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert sum(sizes) == 2 * sum(a.size for a in jax.tree.leaves(params["text"]))
    equal(full_params(state.trainable, state.frozen), params)


def test_nothing_trainable_is_refused(params):
    config = OptimConfig(train="nothing")
    with pytest.raises(OptimError, match="nothing trains"):
        init_state(params, config, make_optimiser(config))


def test_moments_lie_where_their_parameters_lie(state):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    shardings = state_shardings(CONFIG, mesh, state)
    placed = place(state, shardings)
    spec = placed.trainable["text/layers/q/kernel"].sharding.spec
    assert tuple(spec) == (None, "fsdp", "tensor")
    for name in ("mu", "nu"):
        adam = next(s for s in placed.opt_state[0].inner if hasattr(s, name))
        for path, moment in getattr(adam, name).items():
            assert moment.sharding == placed.trainable[path].sharding, path
    assert placed.step.sharding.is_fully_replicated
    equal(placed, state)


def test_checkpoint_holds_nested_parameters_and_gives_the_state_back(tmp_path, state, params):
    """On another number of devices too, bitwise; the parameters can be read alone."""
    saved = place(state, state_shardings(CONFIG, make_mesh(fsdp=2), state))
    saved = saved._replace(step=saved.step + 7)
    one = place(state, state_shardings(CONFIG, make_mesh(devices=jax.devices()[:1]), state))
    zeros = jax.tree.map(jnp.zeros_like, one)
    with Checkpoints(tmp_path, identity={}, background=False) as store:
        store.save(7, to_checkpoint(saved))
        back = from_checkpoint(store.restore(to_checkpoint(zeros)).state, zeros)
        alone = store.restore_params(jax.tree.map(jnp.zeros_like, params)).state
    equal(back, saved)
    assert back.trainable["text/norm/scale"].sharding == one.trainable["text/norm/scale"].sharding
    equal(alone, params)
