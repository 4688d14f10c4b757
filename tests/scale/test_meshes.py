"""The same numbers on every mesh of eight devices: gradients, losses, sampled tokens."""

import json

import jax
import numpy as np
import pytest

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.rl.passes import compile_params
from evisrag_jax.rl.run import RLRun
from evisrag_jax.rollout.requests import Request
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.sft.objective import UpdateConfig, sft_gradient
from evisrag_jax.training.batching import make_group_batch, put_batch
from evisrag_jax.training.layout import SamplingLayout
from evisrag_jax.training.settings import MeshShape
from evisrag_jax.training.state import flatten, full_params, place, state_shardings
from tests.rl import tiny
from tests.rl import update_case as u

MESHES = [(8, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)]
P = 8  # four prompts and four empty rows


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return u.make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def single(case):
    """The RL update and the SFT gradient on one device."""
    rl = u.rl_config("paper")
    return u.update(case, u.host_batch(case, "paper"), rl), sft(case, (1, 1, 1), 4)


def on(devices):
    return make_mesh(*devices, devices=jax.devices()[: int(np.prod(devices))])


def sft(case, devices, prompts):
    """(loss, gradient) of the mean -log p of the responses."""
    mesh = on(devices)
    state = u.fresh_state(case.params)
    shardings = state_shardings(case.config, mesh, state)
    batch = make_group_batch(case.items, [u.BUCKET], responses=u.responses(), prompts=prompts)
    settings = UpdateConfig(u.OPTIM, micro=prompts, remat="none", chunk=64)

    def gradient(state, batch):
        return sft_gradient(state, batch, case.config, settings, shardings=shardings.trainable)[:2]

    run = jax.jit(
        meshes.traced_on(mesh, gradient),
        in_shardings=(shardings, meshes.batch_sharding(mesh)),
        out_shardings=(shardings.trainable, meshes.replicated(mesh)),
    )
    grads, loss = run(place(state, shardings), put_batch(batch, mesh))
    return float(loss), jax.device_get(grads)


@pytest.mark.slow
@pytest.mark.parametrize("devices", MESHES)
def test_loss_and_gradients_are_those_of_one_device(case, single, devices):
    """RL and SFT: loss 1e-6, every gradient 1e-5 relative, where the tensor axis has as many devices as
    there are key-value heads and where it has none."""
    (step, (loss, grads)) = single
    got = u.update(
        case, u.host_batch(case, "paper", prompts=P), u.rl_config("paper", prompts=P), devices
    )
    assert got.metrics["loss/total"] == pytest.approx(step.metrics["loss/total"], abs=1e-6)
    assert max(u.relative(got.grads, step.grads).values()) <= 1e-5
    other, theirs = sft(case, devices, P)
    assert other == pytest.approx(loss, rel=1e-6)
    assert max(u.relative(theirs, grads).values()) <= 1e-5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return tiny.write_model(folder / "model"), write_dataset(folder / "data", P, "train")


def sample(inputs, out, devices, tensor=0):
    """Completions of eight prompts as a run on this mesh samples them, and its layout."""
    mesh = dict(zip(("data", "fsdp", "tensor"), devices, strict=True))
    rl = tiny.code_config(prompts=P)
    config = tiny.run_config(*inputs, rl=rl, mesh=MeshShape(**mesh), rollout_tensor=tensor)
    with pytest.MonkeyPatch.context() as patch, RunFolder(out) as folder:
        patch.setattr(meshes, "make_mesh", lambda *sizes: on(devices))
        run = RLRun(config, folder)
        shardings = state_shardings(run.model, run.mesh, run.state)
        params = compile_params(run.settings, shardings, run.layout)(run.state)
        whole = full_params(run.state.trainable, run.state.frozen)
        for path, leaf in flatten(params).items():
            assert leaf.sharding.mesh == run.layout.mesh
            np.testing.assert_array_equal(leaf, flatten(whole)[path])
        stream = run.stream()
        items = [example.item for example in next(stream)]
        stream.close()
        requests = [Request(x.id, x.prompt, x.pages) for x in items]
        how = SamplingConfig(temperature=1.0, max_tokens=16)
        found = run.engine.generate(requests, how, group=4, seed=3, step=1, params=params)
        return [[done.ids.tolist() for done in group] for group in found], run.layout


@pytest.mark.slow
def test_rollouts_are_the_same_tokens_on_every_mesh(inputs, tmp_path):
    """Whatever training's mesh and however many devices a sampling copy is split over; none differs."""
    want, layout = sample(inputs, tmp_path / "one", (1, 1, 1))
    assert layout.same and len({json.dumps(ids) for group in want for ids in group}) > P
    for devices, tensor, copies in (
        ((8, 1, 1), 0, 8),
        ((1, 8, 1), 0, 8),
        ((1, 8, 1), 2, 4),
        ((2, 2, 2), 0, 4),
        ((2, 2, 2), 1, 8),
    ):
        got, layout = sample(inputs, tmp_path / f"{devices}{tensor}", devices, tensor)
        assert layout.mesh.shape["data"] == copies and layout.same == (devices == (8, 1, 1))
        assert got == want, (devices, tensor)


def test_a_layout_that_does_not_fit_is_refused(case):
    with pytest.raises(meshes.MeshError, match="tensor=3 does not divide the 8 devices"):
        SamplingLayout(case.config, on((1, 8, 1)), 3)
