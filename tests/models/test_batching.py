"""What stands beside a prompt in its batch, or behind it as padding, must not change it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.pages.patches import make_patches
from tests.models.tiny import (
    BUDGET,
    Decoder,
    Shape,
    largest,
    loss_and_grads,
    loss_weights,
    make_batch,
    make_row,
    noise_picture,
    run,
    torch_inputs,
    torch_logits,
)

LOGITS = 1e-4
SHAPE = Shape(length=64, images=2, windows=2, tokens=20)


@pytest.fixture(scope="module")
def rows(untied):
    """A has two pictures, B one, C none."""
    return [
        make_row(untied, 41, (56, 84), (140, 112)),
        make_row(untied, 42, (112, 112)),
        make_row(untied, 43, text=12),
    ]


def logits_of(pair, rows, shape=SHAPE):
    """Logits [L, V] of every row's real tokens, one batch."""
    logits = np.asarray(run(pair.params, pair.config, *make_batch(pair, rows, shape))[0])
    return [logits[p, : len(row.prompt.ids)] for p, row in enumerate(rows)]


def test_b17_rows_of_a_batch_do_not_mix(untied, rows):
    """Batched equal single, whatever the order and the size of the batch; so do the answers."""
    single = [logits_of(untied, [row])[0] for row in rows]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0)):
        together = logits_of(untied, [rows[i] for i in order])
        for i, ours in zip(order, together, strict=True):
            assert largest(ours, single[i]) <= LOGITS
            assert (ours.argmax(-1) == single[i].argmax(-1)).all()


def test_b17_another_picture_changes_only_its_row(untied, rows):
    before = logits_of(untied, rows[:2])
    other = make_patches(noise_picture(99, 112, 112), untied.layout, BUDGET)
    after = logits_of(untied, [rows[0], dataclasses.replace(rows[1], pages=(other,))])
    np.testing.assert_array_equal(before[0], after[0])
    start = rows[1].prompt.image_slot.argmax()
    np.testing.assert_array_equal(before[1][:start], after[1][:start])
    assert (before[1][start:] != after[1][start:]).any(-1).all()


def test_b17_repeated_prompts_keep_their_pictures(untied, rows):
    """A, A, B, B: pictures A1 A2 A1 A2 B1 B1 stay with their prompts."""
    a, b = logits_of(untied, rows[:2])
    for ours, expected in zip(
        logits_of(untied, [rows[0], rows[0], rows[1], rows[1]]), (a, a, b, b), strict=True
    ):
        assert largest(ours, expected) <= LOGITS


def test_b18_text_rows(untied, rows):
    """Beside a row with pictures, and alone with an image bucket or with none at all."""
    text = rows[2]
    np.testing.assert_array_equal(text.prompt.positions, np.tile(np.arange(12), (3, 1)))
    with torch.no_grad():
        expected = torch_logits(untied, text)
    assert largest(logits_of(untied, [rows[0], text])[1], expected) <= LOGITS
    prompt, images = make_batch(untied, [text], SHAPE)
    for pictures in (images, None, type(images)(*(a[:, :0] for a in images))):
        logits = run(untied.params, untied.config, prompt, pictures)[0]
        assert largest(logits[0, :12], expected) <= LOGITS


@pytest.mark.parametrize("bucket", [True, False], ids=["masked_images", "no_images"])
def test_b18_a_text_batch_has_no_vision_gradient(tied, bucket):
    """The gradient of the tower is exactly 0 and finite, that of the decoder is not."""
    text = [make_row(tied, 43, text=12), make_row(tied, 44, text=5)]
    prompt, images = make_batch(tied, text, SHAPE)
    weights = loss_weights(text, SHAPE.length)
    loss, grads = loss_and_grads(
        tied.params, tied.config, prompt, images if bucket else None, weights
    )
    assert np.isfinite(loss)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(grads["vision"]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert np.abs(grads["text"]["layers"]["q"]["kernel"]).max() > 0


def test_b23_padding_on_the_right(untied, rows):
    """Logits with 7 and 50 pads equal the unpadded run's."""
    size = len(rows[0].prompt.ids)
    alone, *padded = (
        logits_of(untied, rows[:1], Shape(size + pads, images=2, windows=2, tokens=20))[0]
        for pads in (0, 7, 50)
    )
    for ours in padded:
        assert largest(ours, alone) <= LOGITS


def greedy(params, config, prompt, images, steps):
    """`steps` greedy tokens [P, steps], token t fed at next_position + t."""
    hidden, prefix = run(params, config, prompt, images)[2:]
    state = model.last_hidden(hidden, prompt.lengths)[:, None]
    decoder = Decoder(params, config, prompt, prefix, 1, steps)
    out = []
    for _ in range(steps):
        out.append(model.logits(params, config, state).argmax(-1).astype(jnp.int32))
        state = decoder.feed(out[-1])
    return jnp.stack(out, -1)[:, 0]


def torch_greedy(pair, row, steps):
    """The same tokens by a full torch forward for each, positions from torch's own index."""
    inputs = torch_inputs(row)
    size = inputs["input_ids"].shape[1]
    with torch.no_grad():
        for _ in range(steps):
            token = pair.torch(**inputs).logits[:, -1].argmax(-1)[:, None]
            inputs["input_ids"] = torch.cat([inputs["input_ids"], token], 1)
            if "mm_token_type_ids" in inputs:
                kinds = inputs["mm_token_type_ids"]
                inputs["mm_token_type_ids"] = torch.cat([kinds, kinds[:, :1] * 0], 1)
    return inputs["input_ids"][0, size:].numpy()


def test_b20_b22_positions_after_a_picture(untied):
    """Grid (4, 6) after four tokens: offset -3, the first response token stands at 10."""
    row = make_row(untied, 45, (56, 84), text=3)
    expected = np.array(
        [
            [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9, 10],
            [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9, 10],
            [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10],
        ]
    )
    np.testing.assert_array_equal(row.prompt.positions, expected)
    inputs = torch_inputs(row)
    kinds, grid = inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    theirs, delta = untied.torch.model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=kinds, image_grid_thw=grid
    )
    np.testing.assert_array_equal(theirs[:, 0], expected)
    assert row.prompt.next_position == 14 + int(delta[0, 0]) == 11


def test_b22_cached_greedy_equals_full_forwards(untied, rows):
    """32 tokens by cached decode against torch's full forward for each; then another prompt."""
    two, text = rows[0], rows[2]
    prompt, images = make_batch(untied, [two, text], SHAPE)
    ours = np.asarray(greedy(untied.params, untied.config, prompt, images, 32))
    np.testing.assert_array_equal(ours[0], torch_greedy(untied, two, 32))
    np.testing.assert_array_equal(ours[1], torch_greedy(untied, text, 32))
    assert len(set(ours[0].tolist())) > 4
    # The same compiled function, prompts swapped: nothing of the first call is left behind.
    prompt, images = make_batch(untied, [text, two], SHAPE)
    again = np.asarray(greedy(untied.params, untied.config, prompt, images, 32))
    np.testing.assert_array_equal(again, ours[::-1])


def test_b23_greedy_with_padding(untied, rows):
    """16 tokens behind 7 and 50 pads equal those of the unpadded prompt."""
    size = len(rows[0].prompt.ids)
    alone, *padded = (
        greedy(
            untied.params,
            untied.config,
            *make_batch(untied, rows[:1], Shape(size + pads, 2, 2, 20)),
            16,
        )
        for pads in (0, 7, 50)
    )
    for ours in padded:
        np.testing.assert_array_equal(ours, alone)
