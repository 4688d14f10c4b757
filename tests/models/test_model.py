"""The whole model against transformers' torch model in float32: features, logits, gradients."""

import shutil

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from evisrag_jax.models.qwen25vl.weights import load_params
from tests.models.tiny import (
    each_tensor,
    largest,
    loss_and_grads,
    loss_weights,
    relative,
    run,
    text_loss,
    torch_inputs,
    torch_logits,
)

LOGITS = 1e-4  # largest absolute difference
FEATURES = 2e-5
GRADIENT = 1e-3  # relative, per tensor


@pytest.fixture(scope="module")
def result(pair, batch):
    return run(pair.params, pair.config, *batch)


def test_features_of_every_picture(pair, rows, batch, result):
    """Pictures of different sizes side by side in one bucket, each equal to the torch tower's."""
    features = np.asarray(result[1])
    tokens = batch[1].merged_index.shape[-1]
    for p, row in enumerate(rows):
        if not row.pictures:
            continue
        inputs = torch_inputs(row)
        with torch.no_grad():
            expected = pair.tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        sizes = [len(page.merged_index) for page in row.pages]
        for i, theirs in enumerate(expected.split(sizes)):
            ours = features[p, i * tokens : i * tokens + len(theirs)]
            assert largest(ours, theirs) <= FEATURES


def test_logits_of_every_prompt(pair, rows, result):
    """One to three pictures and a text-only prompt in one padded batch, positions of torch's own."""
    for p, row in enumerate(rows):
        with torch.no_grad():
            expected = torch_logits(pair, row)
        assert expected.std() > 0.5
        assert largest(result[0][p, : len(expected)], expected) <= LOGITS


def test_gradients_of_all_parameters(pair, rows, batch, tmp_path):
    """A weighted cross-entropy over all tokens, against torch's autograd, tensor by tensor."""
    length = batch[0].tokens.shape[1]
    weights = loss_weights(rows, length)
    loss, grads = loss_and_grads(pair.params, pair.config, *batch, weights)

    pair.torch.zero_grad()
    expected = sum(
        text_loss(torch_logits(pair, row), row.prompt.ids, weights[p]) for p, row in enumerate(rows)
    )
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    shutil.copy(pair.folder / "config.json", tmp_path)
    torch_grads = {name: p.grad.contiguous() for name, p in pair.torch.named_parameters()}
    save_file(torch_grads, tmp_path / "model.safetensors")
    theirs, _ = load_params(tmp_path)
    assert jax.tree.structure(theirs) == jax.tree.structure(grads)
    errors = {
        name: relative(a, b)
        for (name, a), (_, b) in zip(each_tensor(grads), each_tensor(theirs), strict=True)
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] <= GRADIENT, (worst, errors[worst])
