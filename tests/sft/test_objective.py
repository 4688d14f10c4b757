"""The SFT update against torch, and that neither slices, devices nor empty rows change it."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.pages.patches import reading_order_patches
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.sft.objective import UpdateConfig, compile_update, sft_gradient
from evisrag_jax.training.batching import make_group_batch, put_batch
from evisrag_jax.training.optimiser import OptimConfig, make_optimiser
from evisrag_jax.training.state import flatten, init_state, place, state_shardings
from tests.models.tiny import relative
from tests.sft.tiny import BUCKET, make_record

ALL = OptimConfig(learning_rate=1e-3, freeze="")
FROZEN = OptimConfig(learning_rate=1e-3)


def start(loaded, optim=ALL, devices=1):
    """(state, mesh, shardings) on some devices."""
    params, config = loaded
    mesh = make_mesh(data=1, fsdp=devices, devices=jax.devices()[:devices])
    state = init_state(params, optim, make_optimiser(optim))
    shardings = state_shardings(config, mesh, state)
    return place(jax.tree.map(jnp.array, state), shardings), mesh, shardings


def gradient(loaded, batch, *, optim=ALL, micro=4, devices=1, remat="none"):
    """Gradients (by path), mean loss and weight."""
    state, mesh, shardings = start(loaded, optim, devices)
    settings = UpdateConfig(optim=optim, micro=micro, remat=remat, chunk=64)
    run = jax.jit(
        partial(sft_gradient, model=loaded[1], settings=settings, shardings=shardings.trainable)
    )
    grads, loss, sums = run(state, put_batch(batch, mesh))
    return jax.device_get(grads), float(loss), float(sums["weight"])


def torch_loss(model, item, ids):
    """Σ -log p of one response behind its own copy of the prompt: the repeated path."""
    prompt = torch.from_numpy(item.prompt.ids.astype(np.int64))
    whole = torch.cat([prompt, torch.tensor(ids)])[None]
    inputs = {"input_ids": whole}
    if item.pages:
        pixels = np.concatenate([reading_order_patches(page) for page in item.pages])
        pixels = np.repeat(pixels.reshape(len(pixels), 3, 1, 196), 2, axis=2).reshape(
            len(pixels), -1
        )
        inputs["pixel_values"] = torch.from_numpy(pixels)
        inputs["image_grid_thw"] = torch.tensor([[1, *page.grid] for page in item.pages])
        image_pad = model.config.image_token_id
        inputs["mm_token_type_ids"] = (whole == image_pad).int()
    logits = model(**inputs).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits, -1)
    return -logp.gather(1, torch.tensor(ids)[:, None]).sum()


@pytest.fixture(scope="module")
def grouped(items, make_item, pages):
    """The rows; the first as a group of two answers of different length."""
    record = make_record("r0", 10, pages, seed=0)
    two = (record.response, make_record("other", 14, seed=9).response)
    return [make_item(record, lambda _: two), *items[1:]]


@pytest.fixture(scope="module")
def expected(reference, grouped, tmp_path_factory):
    """Torch: mean loss over all response tokens, and its gradient in our layout."""
    model = copy.deepcopy(reference)
    pairs = [(item, list(ids)) for item in grouped for ids in item.response_ids]
    weight = sum(len(ids) for _, ids in pairs)
    total = sum(torch_loss(model, item, ids) for item, ids in pairs) / weight
    total.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    folder = tmp_path_factory.mktemp("gradients")
    model.save_pretrained(folder)
    return float(total.detach()), weight, flatten(load_params(folder)[0])


def test_loss_and_gradients_equal_torch(loaded, grouped, expected):
    """Groups against the repeated path of transformers' model: loss 1e-5, every tensor's gradient
    1e-4 relative, the tower's included; two responses of one prompt share it exactly."""
    loss, weight, grads = expected
    got, value, tokens = gradient(loaded, make_group_batch(grouped, [BUCKET]), remat="full")
    assert tokens == weight == 10 + 14 + 20 + 30 + 40
    assert value == pytest.approx(loss, rel=1e-5)
    assert got.keys() == grads.keys()
    for path, value in got.items():
        if path.endswith("k/bias"):
            # The same number added to every score leaves the softmax alone; what is left is rotary.
            np.testing.assert_allclose(value, grads[path], atol=1e-4 * np.abs(grads[path]).max())
        else:
            assert relative(value, grads[path]) < 1e-4, path


@pytest.fixture(scope="module")
def base(loaded, grouped):
    """Gradients of the frozen-tower update, on one device, in one slice."""
    return gradient(loaded, make_group_batch(grouped, [BUCKET]), optim=FROZEN)


def same(got, base):
    """Loss 1e-6 and every tensor's gradient 1e-5 relative, key biases against their own noise."""
    assert got[2] == base[2] == 114 and got[1] == pytest.approx(base[1], rel=1e-6)
    for path, value in got[0].items():
        if path.endswith("k/bias"):
            atol = 1e-4 * np.abs(base[0][path]).max()
            np.testing.assert_allclose(value, base[0][path], atol=atol)
        else:
            assert relative(value, base[0][path]) < 1e-5, path


def test_frozen_tower_has_no_gradient_and_the_rest_the_same(base, expected):
    loss, weight, grads = expected
    assert base[0].keys() == {path for path in grads if path.startswith("text/")}
    assert base[1] == pytest.approx(loss, rel=1e-5) and base[2] == weight
    for path, value in base[0].items():
        if not path.endswith("k/bias"):
            assert relative(value, grads[path]) < 1e-4, path


@pytest.mark.parametrize(("micro", "devices"), [(2, 1), (4, 2), (1, 4)])
def test_micro_batches_and_devices_change_nothing(loaded, grouped, base, micro, devices):
    """B53: rows of 10 (and 14), 20, 30 and 40 tokens in slices of 4, 2 and 1, on 1, 2 and 4 devices."""
    batch = make_group_batch(grouped, [BUCKET])
    same(gradient(loaded, batch, optim=FROZEN, micro=micro, devices=devices), base)


def test_empty_rows_change_nothing_on_eight_devices(loaded, grouped, base):
    """B29, B53: four empty rows fill P = 8 on 8 devices; finite, and equal to the batch without."""
    batch = make_group_batch(grouped, [BUCKET], prompts=8)
    same(gradient(loaded, batch, optim=FROZEN, micro=8, devices=8), base)


def test_text_rows_give_the_tower_exactly_no_gradient(loaded, make_item):
    """B18: only text rows in a bucket with image slots, the tower trainable."""
    rows = [make_item(make_record(f"t{i}", 12, seed=i)) for i in range(4)]
    grads, loss, weight = gradient(loaded, make_group_batch(rows, [BUCKET]), remat="full")
    assert np.isfinite(loss) and weight == 48
    for path, value in grads.items():
        assert np.all(np.isfinite(value)) and np.any(value) == path.startswith("text/"), path


def test_nothing_to_train_on_is_no_update(loaded, items):
    """B29, B52: loss 0, no NaN, the state bitwise as before, counters included; a normal step after
    it equals that step alone."""
    state, mesh, shardings = start(loaded, FROZEN)
    settings = UpdateConfig(optim=FROZEN, micro=4, remat="none", chunk=64)
    update = compile_update(loaded[1], settings, mesh, shardings)
    before = jax.device_get(state)
    batch = put_batch(make_group_batch(items, [BUCKET]), mesh)
    empty = batch._replace(lengths=jnp.zeros_like(batch.lengths))
    state, metrics = update(state, empty)
    assert float(metrics["loss/total"]) == 0.0 and float(metrics["loss/grad_norm"]) == 0.0
    assert float(metrics["loss/empty"]) == 1.0 and float(metrics["loss/tokens"]) == 0.0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    after, metrics = update(state, batch)
    assert float(metrics["loss/empty"]) == 0.0 and int(after.step) == 1
    alone, _ = update(start(loaded, FROZEN)[0], batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), jax.device_get(alone))
    assert any(np.any(after.trainable[path] != value) for path, value in before.trainable.items())
