"""Passes without gradient (reference, blackened pages), and whole runs of the recipes that need them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.models.lora import LoraConfig, add_adapters
from evisrag_jax.pages.patches import ImageArrays
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.rl.interference import compile_interference
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.rl.masked import MaskedConfig, blacken
from evisrag_jax.rl.passes import (
    UpdateConfig,
    compile_masked_log_probs,
    compile_old_log_probs,
    compile_reference_log_probs,
    hold_reference,
)
from evisrag_jax.rl.run import train
from evisrag_jax.rl.update import rl_gradient
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.batching import put_batch
from evisrag_jax.training.optimiser import for_adapters, make_optimiser
from evisrag_jax.training.state import flatten, init_state, nest, place, state_shardings
from tests.rl import update_case as u
from tests.rl.tiny import code_config, few_devices, run_config, write_model  # noqa: F401  (a fixture)

LORA = LoraConfig(rank=2, alpha=4.0)
MASKED = MaskedConfig(share=0.5, coef=0.1)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return u.make_case(tmp_path_factory.mktemp("case"))


def placed(case, mesh, lora=None, params=None):
    """(state, shardings, optimiser settings) of the case's parameters, with adapters where `lora`."""
    lora = lora or LoraConfig()
    params = case.params if params is None else params
    optim = for_adapters(u.OPTIM, lora)
    state = init_state(params, optim, make_optimiser(optim))
    shardings = state_shardings(case.config, mesh, state)
    return place(jax.tree.map(jnp.array, state), shardings), shardings


def test_the_reference_is_the_model_at_the_start(case):
    """Held on fsdp = tensor = 2 where the parameters lie; the same numbers after these moved away."""
    mesh = make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    settings = UpdateConfig(u.rl_config("paper"), remat="none", chunk=64)
    groups = put_batch(u.host_batch(case, "paper").groups, mesh)
    state, shardings = placed(case, mesh)
    reference = hold_reference(state, shardings, settings)
    assert reference.keys() == state.trainable.keys()
    for path, leaf in reference.items():
        assert leaf.sharding == state.trainable[path].sharding, path
    old = compile_old_log_probs(case.config, settings, mesh, shardings)
    ref = compile_reference_log_probs(case.config, settings, mesh, shardings)
    start = np.asarray(old(state.trainable, state.frozen, groups))
    moved = jax.tree.map(lambda a: a + 0.05, state.trainable)
    shown = np.arange(u.T) < u.LENGTHS[..., None]
    got = np.asarray(ref(reference, state.frozen, groups))
    assert np.abs(got - start)[shown].max() <= 1e-5
    there = np.asarray(old(moved, state.frozen, groups))
    assert np.abs(there - start)[shown].max() > 1e-2


def test_the_reference_of_adapters_is_the_base_without_them(case):
    """Nothing is held: adapters are left off."""
    mesh = make_mesh(devices=jax.devices()[:1])
    settings = UpdateConfig(u.rl_config("paper"), remat="none", chunk=64, lora=LORA)
    flat = flatten(jax.device_get(add_adapters(case.params, case.config, LORA, mesh, seed=0)))
    rng = np.random.default_rng(0)
    for path, leaf in flat.items():
        if path.endswith("lora_b"):
            flat[path] = 0.1 * rng.standard_normal(leaf.shape).astype(np.float32)
    state, shardings = placed(case, mesh, LORA, nest(flat))
    reference = hold_reference(state, shardings, settings)
    assert reference == {}
    groups = put_batch(u.host_batch(case, "paper").groups, mesh)
    ref = compile_reference_log_probs(case.config, settings, mesh, shardings)
    got = np.asarray(ref(reference, state.frozen, groups))
    want = u.log_probs(case, u.host_batch(case, "paper"), u.rl_config("paper"))
    shown = np.arange(u.T) < u.LENGTHS[..., None]
    assert np.abs(got - want)[shown].max() <= 1e-5


def test_black_patches():
    """The share of real patches, black after normalisation; a prompt's draw is its own."""
    layout = VisionLayout()
    shape = (2, 3, 50, 4)
    mask = np.ones(shape, bool)
    mask[:, :, 40:] = False
    patches = np.where(mask[..., None], 0.25, 0.0) * np.ones(3 * 196, np.float32)
    pages = ImageArrays(
        jnp.asarray(patches, jnp.float32),
        jnp.asarray(mask),
        jnp.zeros((*shape, 2), jnp.int32),
        jnp.zeros((2, 3, 5), jnp.int32),
    )
    salts = jnp.asarray([5, 9], jnp.uint32)
    got = np.asarray(blacken(pages, salts, 0.6, layout).patches)
    black = np.repeat(-np.asarray(layout.mean) / np.asarray(layout.std), 196).astype(np.float32)
    hidden = np.isclose(got, black, rtol=1e-6, atol=0).all(-1)
    assert not hidden[~mask].any() and ((got == patches).all(-1) | hidden).all()
    assert abs(hidden[mask].mean() - 0.6) < 0.06
    assert (hidden[0] != hidden[1]).any()
    swapped = blacken(pages, salts[::-1], 0.6, layout).patches
    np.testing.assert_array_equal(np.asarray(swapped)[::-1], got)


def test_a_masked_pass_inside_the_update_equals_the_one_before_it(case):
    """PAPO's value with the pass in the update and ahead of it: the same log-probs; only inside does the
    entropy of the masked pass have a gradient. Features in place of pages change nothing."""
    mesh = make_mesh(devices=jax.devices()[:1])
    salts = np.arange(u.P, dtype=np.uint32) + 3
    rl = dataclasses.replace(u.rl_config("paper"), masked=MASKED)
    inside = dataclasses.replace(rl, masked=dataclasses.replace(MASKED, gradient=True))
    state, shardings = placed(case, mesh)
    settings = UpdateConfig(rl, remat="none", chunk=64)
    batch = put_batch(u.host_batch(case, "paper", salts=salts), mesh)
    run = compile_masked_log_probs(case.config, settings, mesh, shardings)
    masked = run(state.trainable, state.frozen, (batch.groups, None, batch.salts))
    pages = batch.groups._replace(images=None)
    again = run(state.trainable, state.frozen, (pages, batch.groups.images, batch.salts))
    np.testing.assert_array_equal(masked, again)

    def gradient(rl, batch):
        settings = UpdateConfig(rl, remat="none", chunk=64)
        return jax.jit(lambda s, b: rl_gradient(s, b, case.config, settings))(state, batch)

    outer, told = gradient(rl, batch._replace(masked=masked))
    inner, same = gradient(inside, batch)
    for name in ("loss/total", "masked/dependency", "masked/logp"):
        assert float(told[name]) == pytest.approx(float(same[name]), rel=1e-5), name
    assert float(told["masked/dependency"]) > 1e-4
    assert max(u.relative(jax.device_get(inner), jax.device_get(outer)).values()) > 1e-3


def test_channels_that_agree_and_channels_that_do_not(case):
    """Cosine 1 where both channels have equal rewards on all tokens, -1 where they are opposite."""
    mesh = make_mesh(devices=jax.devices()[:1])
    rl = dataclasses.replace(u.rl_config("paper"), scoped=False)
    state, shardings = placed(case, mesh)
    run = compile_interference(
        case.config, UpdateConfig(rl, remat="none", chunk=64), mesh, shardings
    )
    rewards = u.rewards("paper")
    for sign in (1, -1):
        rewards = rewards.copy()
        rewards[..., 1] = sign * rewards[..., 0]
        batch = put_batch(u.host_batch(case, "paper", rewards=rewards), mesh)
        got = jax.device_get(run(state, batch))
        assert got["grad/cosine"] == pytest.approx(sign, abs=1e-4)
        assert got["grad/perception_norm"] == pytest.approx(got["grad/derivation_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_run_with_a_reference_and_blackened_pages(tmp_path):
    """Two steps of PAPO's terms with a KL, pages' features in the batch: the first step is at the
    reference, the second is not; the angle of the channels is measured when asked."""
    model = write_model(tmp_path / "model")
    data = write_dataset(tmp_path / "data", 8, "train")
    loss = PolicyLossConfig(kl_coef=0.05, kl="k2", average="sequence")
    base = dataclasses.replace(
        code_config(), estimator="grpo", scope_match="char_offsets", loss=loss
    )
    masked = MaskedConfig(share=0.5, coef=0.05, entropy_coef=0.02, gradient=True)
    rl = dataclasses.replace(base, masked=masked, exact_zero=True)
    config = run_config(model, data, rl=rl, steps=2, save_every=1)
    train(dataclasses.replace(config, interference_every=2), tmp_path / "a")
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").open()]
    assert abs(rows[0]["loss/kl"]) < 1e-9 < rows[1]["loss/kl"]
    assert all("masked/dependency" in row for row in rows)
    assert ["grad/cosine" in row for row in rows] == [True, True]
