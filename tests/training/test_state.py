"""Flat states of a real (tiny) model: what trains, where it lies, and back through a checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models.lora import LoraConfig, add_adapters, is_adapter
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig
from evisrag_jax.models.qwen25vl.model import init_params
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.optimiser import OptimConfig, OptimError, for_adapters, make_optimiser
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


LAST = dataclasses.replace(OPTIM, last_layers=1)


@pytest.fixture(scope="module")
def last(params):
    return init_state(params, LAST, make_optimiser(LAST))


def test_last_layers_train_and_the_rest_of_the_stack_is_frozen(last, params):
    """Stacks are cut; embedding, norm and head train whole; moments are of what trains."""
    q = params["text"]["layers"]["q"]["kernel"]
    assert q.shape[0] == 2
    np.testing.assert_array_equal(last.frozen["text/layers/q/kernel"], q[:1])
    np.testing.assert_array_equal(last.trainable["text/layers/q/kernel"], q[1:])
    assert "text/embed/embedding" not in last.frozen and "vision/merger/fc1/bias" in last.frozen
    sizes = [a.size for a in jax.tree.leaves(last.opt_state) if a.ndim]
    assert sum(sizes) == 2 * sum(a.size for a in last.trainable.values())
    equal(full_params(last.trainable, last.frozen), params)


def test_all_layers_as_the_last_ones_cut_nothing(params, state):
    config = dataclasses.replace(OPTIM, last_layers=2)
    equal(init_state(params, config, make_optimiser(config)), state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"last_layers": 3}, "last_layers=3 of a decoder of 2"),
        ({"last_layers": 1, "train": "norm/scale$|head"}, "last_layers=1, but no decoder layer"),
    ],
)
def test_last_layers_that_cannot_be_are_refused(params, fields, message):
    config = dataclasses.replace(OPTIM, **fields)
    with pytest.raises(OptimError, match=message):
        init_state(params, config, make_optimiser(config))


def test_cut_stacks_are_whole_in_a_checkpoint(tmp_path, last, params):
    """And come back cut, on another number of devices, bitwise; the parameters can be read alone."""
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    saved = place(last, state_shardings(CONFIG, mesh, last))
    one = place(last, state_shardings(CONFIG, make_mesh(devices=jax.devices()[:1]), last))
    zeros = jax.tree.map(jnp.zeros_like, one)
    with Checkpoints(tmp_path, identity={}, background=False) as store:
        store.save(1, to_checkpoint(saved))
        back = from_checkpoint(store.restore(to_checkpoint(zeros)).state, zeros)
        again = from_checkpoint(store.restore(to_checkpoint(saved)).state, saved)
        alone = store.restore_params(jax.tree.map(jnp.zeros_like, params)).state
    equal(back, last)
    equal(alone, params)
    for made, like in ((back, zeros), (again, saved)):
        pairs = zip(jax.tree.leaves(made), jax.tree.leaves(like), strict=True)
        assert all(a.sharding == b.sharding for a, b in pairs)


def test_adapters_in_a_state(tmp_path, params):
    """Base weights, bfloat16 here, have no optimiser state; adapters and their moments are float32 and lie
    as their kernels do; all of it comes back from a checkpoint, bitwise."""
    lora = LoraConfig(rank=2)
    config = for_adapters(OPTIM, lora)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    adapted = add_adapters(half, CONFIG, lora, mesh, seed=0)
    state = init_state(adapted, config, make_optimiser(config))
    assert len(state.trainable) == 2 * 7 and all(is_adapter(path) for path in state.trainable)
    assert {a.dtype.name for a in state.frozen.values()} == {"bfloat16"}
    equal(nest(state.frozen), half)
    floats = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert {a.dtype.name for a in floats} == {"float32"}
    assert sum(a.size for a in floats) == 2 * sum(a.size for a in state.trainable.values())
    placed = place(state, state_shardings(CONFIG, mesh, state))
    assert tuple(placed.trainable["text/layers/q/lora_a"].sharding.spec) == (None, "fsdp")
    assert tuple(placed.trainable["text/layers/q/lora_b"].sharding.spec) == (None, None, "tensor")
    adam = next(s for s in placed.opt_state[0].inner if hasattr(s, "mu"))
    for path, leaf in placed.trainable.items():
        assert adam.mu[path].sharding == adam.nu[path].sharding == leaf.sharding
    with Checkpoints(tmp_path, identity={}, background=False) as store:
        store.save(1, to_checkpoint(placed))
        back = from_checkpoint(store.restore(to_checkpoint(placed)).state, placed)
    equal(back, placed)


def test_adapters_of_the_last_layers(params):
    """The first layers' adapters stay as they were drawn: zero products."""
    lora = LoraConfig(rank=2)
    config = for_adapters(LAST, lora)
    mesh = make_mesh(devices=jax.devices()[:1])
    adapted = add_adapters(params, CONFIG, lora, mesh, seed=0)
    state = init_state(adapted, config, make_optimiser(config))
    assert state.trainable["text/layers/q/lora_a"].shape[0] == 1
    assert not np.any(state.frozen["text/layers/q/lora_b"])
    assert "text/layers/q/kernel" not in state.trainable
    equal(full_params(state.trainable, state.frozen), adapted)
