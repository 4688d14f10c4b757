"""The tower's wiring: which layer sees what, patterns with and without a period, padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.models.qwen25vl import vision
from evisrag_jax.models.qwen25vl.config import VisionConfig
from evisrag_jax.pages.patches import window_layout
from evisrag_jax.pages.plan import VisionLayout
from tests.models.tiny import (
    Shape,
    largest,
    make_batch,
    make_pair,
    make_row,
    run,
    torch_inputs,
    torch_logits,
)

FULL = (7, 15, 23, 31)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """The published tower's depth and pattern: 32 layers, full attention in 7, 15, 23, 31."""
    folder = tmp_path_factory.mktemp("deep")
    return make_pair(folder, depth=32, full=FULL, tied=True, layers=1, width=32, seed=3)


@pytest.fixture(scope="module")
def pictures(deep):
    """Two pictures of 3 x 3 and 2 x 2 windows in one bucket of 10 windows (one is all padding)."""
    row = make_row(deep, 21, (266, 308), (224, 224))
    return make_batch(deep, [row], Shape(images=2, windows=10, tokens=110, length=300))[1]


def encode(pair, images, depth=None, full=None):
    """Features [I, M, D] of the first prompt, by the first `depth` layers."""
    config = pair.config.vision
    config = dataclasses.replace(
        config,
        depth=depth or config.depth,
        full_attention=config.full_attention if full is None else full,
    )
    params = pair.params["vision"]
    params = params | {"blocks": jax.tree.map(lambda a: a[: config.depth], params["blocks"])}
    return np.asarray(_encode(params, config, *(a[0] for a in images)))


_encode = jax.jit(vision.encode, static_argnums=1)


@pytest.mark.parametrize(
    ("depth", "full", "period"),
    [
        (32, FULL, 8),
        (5, (2, 4), 5),
        (4, (1, 3), 2),
        (6, (), 1),
        (3, (0, 1, 2), 1),
        (6, (0, 3), 3),
        (6, (5,), 6),
    ],
)
def test_period(depth, full, period):
    config = VisionConfig(depth=depth, width=8, mlp=8, heads=2, out_width=8, full_attention=full)
    assert vision.attention_period(config) == period


def test_b25_four_full_layers_of_32(deep, pictures, monkeypatch):
    """Layers 7, 15, 23, 31 attend over the image, the other 28 over windows."""
    seen = []
    original = vision.masked_attention

    def counting(q, k, v, mask):
        seen.append(q.shape[1])
        return original(q, k, v, mask)

    monkeypatch.setattr(vision, "masked_attention", counting)
    arrays = tuple(a[0] for a in pictures)
    jax.eval_shape(lambda: vision.encode(deep.params["vision"], deep.config.vision, *arrays))
    # One period of eight layers is traced; scan repeats it four times.
    assert seen == [64] * 7 + [640]
    assert 32 // len(seen) == 4


@pytest.mark.parametrize("depth", [7, 8], ids=["windows_only", "with_layer_7"])
def test_b25_what_one_patch_reaches(deep, pictures, depth):
    """A patch of window 0: its window through layer 6, all of its image after 7, never another."""
    before = encode(deep, pictures, depth, full=tuple(i for i in FULL if i < depth))
    patches = pictures.patches.at[0, 0, 0, 3].add(1.0)
    changed = pictures._replace(patches=patches)
    after = encode(deep, changed, depth, full=tuple(i for i in FULL if i < depth))
    moved = (before != after).any(-1)

    units = np.asarray(pictures.merged_index[0])
    count = 10 * 11  # 266 x 308 px; 16 units a window
    in_window_0 = units[0, :count] // 16 == 0
    expected = in_window_0 if depth == 7 else np.ones(count, bool)
    np.testing.assert_array_equal(moved[0, :count], expected)
    assert not moved[1].any()


def test_padding_never_reaches_a_feature(deep, pictures):
    """Masked slots and masked windows may hold anything: the real features stay bitwise."""
    before = encode(deep, pictures, 8, full=(7,))
    noise = jax.random.normal(jax.random.key(0), pictures.patches.shape)
    patches = jnp.where(pictures.mask[..., None], pictures.patches, noise)
    after = encode(deep, pictures._replace(patches=patches), 8, full=(7,))
    np.testing.assert_array_equal(before[0, :110], after[0, :110])
    np.testing.assert_array_equal(before[1, :64], after[1, :64])


def loop(params, config, patches, mask, rowcol, merged_index):
    """`vision.encode` as a plain loop that picks each layer's attention by its index."""
    x = vision.PatchEmbed(config).apply({"params": params["patch_embed"]}, patches)
    cos, sin = vision.rotary_angles(rowcol, config)

    def attention(shape):
        def attend(q, k, v):
            flat = (a.reshape(*shape, *a.shape[-2:]) for a in (q, k, v))
            return vision.masked_attention(*flat, mask.reshape(shape)).reshape(q.shape)

        return attend

    I, W, S = mask.shape
    for i in range(config.depth):
        attend = attention((I, W * S) if i in config.full_attention else (I * W, S))
        layer = {"params": jax.tree.map(lambda a, i=i: a[i], params["blocks"])}
        x = vision.VisionBlock(config).apply(layer, x, cos, sin, attend)
    units = x.reshape(I, -1, 4, config.width)
    merged = vision.PatchMerger(config).apply({"params": params["merger"]}, units)
    return jnp.take_along_axis(merged, merged_index[..., None], axis=1)


def test_scan_equals_a_loop_over_layers(pair):
    """Patterns without a period (depth 5, full 2 and 4) and with one (depth 4, full 1 and 3)."""
    images = make_batch(pair, [make_row(pair, 22, (140, 196))], Shape(images=1))[1]
    expected = jax.jit(loop, static_argnums=1)(
        pair.params["vision"], pair.config.vision, *(a[0] for a in images)
    )
    assert largest(encode(pair, images), expected) <= 1e-5


def test_exactly_dividing_grid_has_no_extra_window():
    """The reference's index pads a whole window there and drops it again; ours never has it."""
    layout = window_layout(16, 24, VisionLayout())
    assert layout.mask.shape == (6, 64) and layout.mask.all()


def test_b25_a_picture_over_1000_px_through_32_layers(deep):
    """1008 x 1036 px (5,328 patches, ragged columns): features and the logits behind them."""
    row = make_row(deep, 23, (1008, 1036))
    shape = Shape(length=1400, images=1, windows=90, tokens=1332)
    logits, features, _, _ = run(deep.params, deep.config, *make_batch(deep, [row], shape))
    with torch.no_grad():
        inputs = torch_inputs(row)
        expected = deep.tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        assert largest(features[0], expected) <= 5e-5
        expected = torch_logits(deep, row)
    assert largest(logits[0, : len(expected)], expected) <= 1e-4
