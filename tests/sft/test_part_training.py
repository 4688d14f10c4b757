"""SFT of a part of the model: adapters and last layers. Gradients, whole runs, resume, exports."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models.lora import LoraConfig, add_adapters, merge
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.runtime.run_folder import RunFolder, RunFolderError
from evisrag_jax.sft.objective import UpdateConfig, sft_gradient, sft_update
from evisrag_jax.sft.trainer import SFTRun, train
from evisrag_jax.training.batching import make_group_batch, put_batch
from evisrag_jax.training.optimiser import OptimConfig, for_adapters, make_optimiser
from evisrag_jax.training.settings import MeshShape
from evisrag_jax.training.state import (
    flatten,
    full_params,
    init_state,
    nest,
    place,
    state_shardings,
    to_checkpoint,
)
from tests.models.tiny import relative
from tests.sft.tiny import BUCKET, make_config, make_pages, make_record, write_rows

OPTIM = OptimConfig(learning_rate=1e-3)
LORA = LoraConfig(rank=2, alpha=6.0)
BOTH = dataclasses.replace(LORA, targets="^text/layers|^vision/(blocks|merger)")


@pytest.fixture(scope="module")
def batch(items):
    return make_group_batch(items, [BUCKET])


@pytest.fixture(scope="module")
def adapted(loaded):
    """Parameters with adapters in both towers, B drawn, on the host."""
    params, config = loaded
    mesh = make_mesh(devices=jax.devices()[:1])
    flat = flatten(jax.device_get(add_adapters(params, config, BOTH, mesh, seed=0)))
    rng = np.random.default_rng(0)
    for path, leaf in flat.items():
        if path.endswith("lora_b"):
            flat[path] = 0.05 * rng.standard_normal(leaf.shape).astype(np.float32)
    return nest(flat)


def setting(params, config, optim, lora, *, micro=4, mesh=(1, 1, 1)):
    """(state on its devices, mesh, shardings, settings)."""
    optim = for_adapters(optim, lora)
    mesh = make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    state = init_state(params, optim, make_optimiser(optim))
    shardings = state_shardings(config, mesh, state)
    settings = UpdateConfig(optim=optim, micro=micro, remat="none", chunk=64, lora=lora)
    return place(jax.tree.map(jnp.array, state), shardings), mesh, shardings, settings


def gradient(params, config, batch, optim, lora, **where):
    state, mesh, shardings, settings = setting(params, config, optim, lora, **where)
    run = jax.jit(
        partial(sft_gradient, model=config, settings=settings, shardings=shardings.trainable),
        out_shardings=(shardings.trainable, None, None),
    )
    grads, loss, _ = run(state, put_batch(batch, mesh))
    return jax.device_get(grads), float(loss)


@pytest.fixture(scope="module")
def base(adapted, loaded, batch):
    """Gradients of all adapters on one device, in one slice."""
    return gradient(adapted, loaded[1], batch, OPTIM, BOTH)


def test_only_adapters_have_a_gradient(base):
    """Of both towers (the tower's need its backward pass, whatever `freeze` says)."""
    grads, _ = base
    assert all(path.rsplit("/", 1)[1] in ("lora_a", "lora_b") for path in grads)
    assert {path.split("/")[0] for path in grads} == {"text", "vision"}
    assert all(np.any(value) for value in grads.values())


def test_slices_and_meshes_change_no_adapter(adapted, loaded, batch, base):
    """B53 with adapters: two slices on fsdp = tensor = 2; loss 1e-6, every gradient 1e-5 relative."""
    grads, loss = gradient(adapted, loaded[1], batch, OPTIM, BOTH, micro=2, mesh=(1, 2, 2))
    assert loss == pytest.approx(base[1], rel=1e-6)
    for path, value in grads.items():
        assert relative(value, base[0][path]) < 1e-5, path


def test_last_layers_have_the_slice_of_the_whole_gradient(loaded, batch):
    """Through the compiled update, the gradient read off Adam's first moment (a tenth of it): 1e-6
    relative. Only the last layer moves, and the metrics name the parts that train."""
    params, config = loaded
    whole, _ = gradient(params, config, batch, OPTIM, LoraConfig())
    optim = dataclasses.replace(OPTIM, last_layers=1, train="^text/layers", clip_norm=0.0)
    state, mesh, shardings, settings = setting(params, config, optim, LoraConfig())
    update = jax.jit(
        partial(sft_update, model=config, settings=settings, shardings=shardings.trainable)
    )
    after, metrics = update(state, put_batch(batch, mesh))
    moments = after.opt_state[0].inner[0].mu
    assert moments.keys() == {path for path in whole if path.startswith("text/layers/")}
    for path, moment in moments.items():
        want = whole[path][-1:]
        # Key biases: the same number added to every score leaves the softmax alone; rotary is left.
        atol = 1e-4 * np.abs(whole[path]).max() if path.endswith("k/bias") else 0.0
        error = np.linalg.norm(np.float64(moment) / (1 - optim.b1) - want)
        assert moment.shape == want.shape and error <= 1e-6 * np.linalg.norm(want) + atol, path
    norms = {name for name in metrics if name.startswith("loss/grad_norm/")}
    assert norms == {f"loss/grad_norm/{part}" for part in ("attention", "mlp", "norm")}
    moved = flatten(full_params(after.trainable, after.frozen))
    for path, value in flatten(params).items():
        changed = np.any(moved[path] != value, axis=tuple(range(1, value.ndim)))
        want = [False, True] if path.startswith("text/layers/") else [False] * len(value)
        assert changed.tolist() == want, path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    pages = make_pages(folder)
    images = (pages, pages[:1], [], pages[1:])
    records = [make_record(f"r{i}", 8 + 4 * i, images[i % 4], seed=i) for i in range(8)]
    return write_rows(folder / "train.jsonl", records)


@pytest.fixture(scope="module")
def killed_and_straight(folder, reference, rows, tmp_path_factory):
    """(config, folder of a run in one go, folder of one that died in step 3 of 4 and went on)."""
    out = tmp_path_factory.mktemp("runs")
    config = make_config(
        folder,
        rows,
        lora=LORA,
        mesh=MeshShape(data=1, fsdp=2, tensor=2),
        optim=OptimConfig(learning_rate=1e-2, moments="bfloat16"),
        export_dtype="float32",
    )
    with pytest.MonkeyPatch.context() as patch:
        make = make_mesh
        patch.setattr(
            "evisrag_jax.sft.trainer.meshes.make_mesh",
            lambda *sizes: make(*sizes, devices=jax.devices()[: int(np.prod(sizes))]),
        )
        train(config, out / "straight")
        step = SFTRun.step

        def dying(self, state, data, k):
            if k == 3:
                raise RuntimeError("killed")
            return step(self, state, data, k)

        patch.setattr(SFTRun, "step", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(config, out / "killed")
        patch.setattr(SFTRun, "step", step)
        train(config, out / "killed")
        states = []
        for name in ("straight", "killed"):
            with RunFolder(out / name) as run_folder:
                run = SFTRun(config, run_folder, resumed=True)
                template = to_checkpoint(run.state)
                states.append(Checkpoints(run_folder.checkpoints, identity={}).restore(template))
    return config, out, states


def test_adapters_train_and_resume_bitwise(killed_and_straight, folder):
    """On fsdp = tensor = 2, moments in bfloat16: parameters, moments, metrics; the base stays as read."""
    config, out, (a, b) = killed_and_straight
    assert a.step == b.step == 4
    jax.tree.map(np.testing.assert_array_equal, a.state, b.state)
    metrics = []
    for name in ("straight", "killed"):
        lines = (out / name / "metrics.jsonl").read_text().splitlines()
        facts = ("time", "compile", "cache")
        rows = [json.loads(line) for line in lines]
        metrics.append([{k: v for k, v in r.items() if not k.startswith(facts)} for r in rows])
    assert metrics[0] == metrics[1] and len(metrics[0]) == 4
    for row in metrics[0]:
        assert row["loss/grad_norm/lora"] == pytest.approx(row["loss/grad_norm"], rel=1e-6)
        assert row["loss/grad_norm"] > 0
    saved, start = flatten(a.state["params"]), flatten(load_params(folder)[0])
    for path, value in start.items():
        np.testing.assert_array_equal(saved[path], value)
    assert np.any(saved["text/layers/q/lora_b"])


def test_exports_are_the_trained_model(killed_and_straight, folder):
    """RUN/model has merged weights; peft puts RUN/adapter on the base and gets the same weights (1e-6)."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    peft = pytest.importorskip("peft", reason="the reference of adapters (extra: test)")
    config, out, (a, _) = killed_and_straight
    exported = flatten(load_params(out / "straight" / "model")[0])
    merged = flatten(merge(a.state["params"], LORA))
    assert exported.keys() == merged.keys()
    for path, value in merged.items():
        np.testing.assert_array_equal(exported[path], value)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype="float32")
    model = peft.PeftModel.from_pretrained(model, out / "straight" / "adapter").merge_and_unload()
    model.save_pretrained(out / "theirs")
    for path, value in flatten(load_params(out / "theirs")[0]).items():
        np.testing.assert_allclose(exported[path], value, rtol=0, atol=1e-6)


def test_another_adapter_config_is_refused(killed_and_straight, folder, rows):
    """By the run folder and, were that edited, by the checkpoint."""
    config, out, _ = killed_and_straight
    other = dataclasses.replace(config, lora=dataclasses.replace(LORA, alpha=8.0))
    with pytest.raises(RunFolderError, match="lora.alpha: 6.0 -> 8.0"):
        train(other, out / "straight")
    facts = json.loads(next((out / "straight/checkpoints").glob("*/extra/metadata")).read_text())
    assert facts["identity"]["lora"] == {
        "rank": 2,
        "alpha": 6.0,
        "targets": LORA.targets,
        "also": "",
    }


@pytest.fixture
def one_device(monkeypatch):
    make = make_mesh
    monkeypatch.setattr(
        "evisrag_jax.sft.trainer.meshes.make_mesh", lambda *_: make(devices=jax.devices()[:1])
    )


def test_a_run_of_the_last_layer_goes_on(
    folder, reference, rows, tmp_path, one_device, monkeypatch
):
    """Dies in step 2 and restores whole stacks into cut ones; the first layer is as it was read."""
    optim = OptimConfig(learning_rate=1e-2, last_layers=1, train="^text/layers")
    config = make_config(folder, rows, optim=optim, steps=2, save_every=1, export_dtype="float32")
    step = SFTRun.step

    def dying(self, state, data, k):
        if k == 2:
            raise RuntimeError("killed")
        return step(self, state, data, k)

    with monkeypatch.context() as patch:
        patch.setattr(SFTRun, "step", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(config, tmp_path)
    assert train(config, tmp_path)["steps"] == 2
    start, end = (flatten(load_params(path)[0]) for path in (folder, tmp_path / "model"))
    for path, value in start.items():
        if path.startswith("text/layers/"):
            assert [np.any(end[path][i] != value[i]) for i in range(2)] == [False, True], path
        else:
            np.testing.assert_array_equal(end[path], value)


def test_base_parameters_beside_adapters(folder, reference, rows, tmp_path, one_device):
    """`lora.also`: norms train too, the model is exported, and no adapter file claims to be it."""
    lora = dataclasses.replace(LORA, also="^text/.*norm")
    config = make_config(folder, rows, lora=lora, steps=2, export_dtype="float32")
    train(config, tmp_path)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {n for n in row if "grad_norm/" in n} == {"loss/grad_norm/lora", "loss/grad_norm/norm"}
    start, end = (flatten(load_params(path)[0]) for path in (folder, tmp_path / "model"))
    moved = {path for path, value in start.items() if np.any(end[path] != value)}
    assert "text/norm/scale" in moved and "text/layers/q/kernel" in moved
    assert "text/embed/embedding" not in moved and not (tmp_path / "adapter").exists()
