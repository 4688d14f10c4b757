"""RS-GRPO of adapters: rollouts from merged weights, low-rank scores, exact resume, exports."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.models.lora import LoraConfig, add_adapters, merge
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.rl.collect import Collector
from evisrag_jax.rl.passes import UpdateConfig, compile_old_log_probs, compile_params
from evisrag_jax.rl.run import RLRun, train
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.training.batching import put_batch
from evisrag_jax.training.optimiser import for_adapters, make_optimiser
from evisrag_jax.training.state import (
    flatten,
    init_state,
    nest,
    place,
    state_shardings,
    to_checkpoint,
)
from tests.rl import update_case
from tests.rl.tiny import code_config, few_devices, run_config, write_model  # noqa: F401  (a fixture)

LORA = LoraConfig(rank=2, alpha=6.0)
BOTH = dataclasses.replace(LORA, targets="^text/layers|^vision/(blocks|merger)")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return update_case.make_case(tmp_path_factory.mktemp("case"))


def test_scores_of_low_rank_products_equal_those_of_merged_weights(case):
    """What the trainer scores and what the sampler computes with: log-probs within 1e-5 (float32), with
    adapters in both towers and B far from 0, on fsdp = tensor = 2."""
    mesh = make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    rl = update_case.rl_config("paper")
    batch = put_batch(update_case.host_batch(case, "paper").groups, mesh)
    flat = flatten(jax.device_get(add_adapters(case.params, case.config, BOTH, mesh, seed=0)))
    rng = np.random.default_rng(0)
    for path, leaf in flat.items():
        if path.endswith("lora_b"):
            flat[path] = 0.05 * rng.standard_normal(leaf.shape).astype(np.float32)

    def scores(params, lora):
        optim = for_adapters(update_case.OPTIM, lora)
        state = init_state(params, optim, make_optimiser(optim))
        shardings = state_shardings(case.config, mesh, state)
        state = place(jax.tree.map(jnp.array, state), shardings)
        settings = UpdateConfig(rl, remat="none", chunk=64, lora=lora)
        run = compile_old_log_probs(case.config, settings, mesh, shardings)
        logp = np.asarray(run(state.trainable, state.frozen, batch))
        return logp, compile_params(settings, shardings)(state)

    low, sampler = scores(nest(flat), BOTH)
    assert jax.tree.structure(sampler) == jax.tree.structure(case.params)
    merged, _ = scores(jax.device_get(sampler), LoraConfig())
    base, _ = scores(case.params, LoraConfig())
    shown = np.arange(low.shape[-1]) < update_case.LENGTHS[..., None]
    assert np.abs(low - merged)[shown].max() <= 1e-5
    assert np.abs(low - base)[shown].max() > 1e-2


def test_the_sampler_gets_whole_stacks(case):
    """With last layers alone trained: bitwise the model's parameters, lying as they would without."""
    mesh = make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    optim = dataclasses.replace(update_case.OPTIM, last_layers=1)
    state = init_state(case.params, optim, make_optimiser(optim))
    shardings = state_shardings(case.config, mesh, state)
    state = place(jax.tree.map(jnp.array, state), shardings)
    settings = UpdateConfig(update_case.rl_config("paper"))
    got = compile_params(settings, shardings)(state)
    jax.tree.map(np.testing.assert_array_equal, got, case.params)
    assert tuple(got["text"]["layers"]["q"]["kernel"].sharding.spec) == (None, "fsdp", "tensor")


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    facts = ("time", "compile", "cache")
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(facts)} for line in lines
    ]


def test_adapters_train_by_reinforcement_and_resume_bitwise(tmp_path, monkeypatch):
    """Two steps straight == death in the second and on from the first: parameters, moments, metrics,
    rollouts. The sampler has the trained policy (B51); the base stays; both exports are the policy."""
    model = write_model(tmp_path / "model")
    data = write_dataset(tmp_path / "data", 8, "train")
    rl = code_config(optim=dataclasses.replace(code_config().optim, learning_rate=2e-2))
    config = run_config(model, data, rl=rl, lora=LORA, steps=2, save_every=1)
    train(config, tmp_path / "a")
    call = Collector.__call__

    def dying(self, params, step):
        if step == 2:
            raise RuntimeError("killed")
        return call(self, params, step)

    monkeypatch.setattr(Collector, "__call__", dying)
    with pytest.raises(RuntimeError, match="killed"):
        train(config, tmp_path / "b")
    monkeypatch.setattr(Collector, "__call__", call)
    train(config, tmp_path / "b")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    states = []
    for name in "ab":
        with RunFolder(tmp_path / name) as folder:
            run = RLRun(config, folder, resumed=True)
            assert run.reference is None, "B56: without a KL no reference is held"
            store = Checkpoints(folder.checkpoints, identity={"lora": LORA})
            states.append(store.restore(to_checkpoint(run.state)))
    assert states[0].step == states[1].step == 2
    jax.tree.map(np.testing.assert_array_equal, states[0].state, states[1].state)
    rollouts = [(tmp_path / name / "rollouts/step_000002.jsonl").read_bytes() for name in "ab"]
    assert rollouts[0] == rollouts[1]
    for row in rows(tmp_path / "a"):
        assert row["rollout/logp_gap_max"] < 1e-4
        assert row["loss/grad_norm/lora"] == pytest.approx(row["loss/grad_norm"], rel=1e-6)
    saved, start = flatten(states[0].state["params"]), flatten(load_params(model)[0])
    for path, value in start.items():
        np.testing.assert_array_equal(saved[path], value)
    assert np.abs(saved["text/layers/q/lora_b"]).max() > 1e-2
    exported = flatten(load_params(tmp_path / "a" / "model")[0])
    for path, value in flatten(merge(states[0].state["params"], LORA)).items():
        np.testing.assert_array_equal(exported[path], value)
    assert (tmp_path / "a/adapter/adapter_model.safetensors").is_file()
