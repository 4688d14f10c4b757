"""FLOP and byte counts of the benchmarks against hand counts, brute force and the model's own shapes."""

import jax
import numpy as np
import pytest
from bench import counts
from bench.shapes import SHAPES

from evisrag_jax.models.qwen25vl.config import TextConfig, VisionConfig
from evisrag_jax.models.qwen25vl.model import param_shapes
from evisrag_jax.pages.patches import window_layout
from evisrag_jax.pages.plan import VisionLayout

# Two layers, 4 query and 2 key-value heads of 3, width 10, mlp 7, vocabulary 20.
TEXT = TextConfig(20, 10, 7, 2, 4, 2, 3, 1e4, (1, 0, 0), tied=True)
# q 10x12, k and v 10x6 each, o 12x10, gate, up and down 10x7 each: 120 + 60 + 60 + 120 + 210.
LAYER = 570
VISION = VisionConfig(
    depth=3, width=8, mlp=5, heads=2, out_width=10, full_attention=(2,), window=56
)


def sizes(tree, name):
    return sum(
        int(np.prod(leaf.shape))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if path[-1].key == name
    )


def test_weights_of_a_layer():
    assert counts.layer_weights(TEXT) == LAYER
    assert counts.decoder_weights(TEXT) == 2 * LAYER


@pytest.mark.parametrize("name", ["tiny", "rag-cpu", "qwen-3b", "qwen-7b"])
def test_weights_are_those_of_the_model(name):
    shape = SHAPES[name]
    layers = param_shapes(shape.config)["text"]["layers"]
    assert counts.decoder_weights(shape.text) == sizes(layers, "kernel")


def test_published_models_have_their_size():
    """3.09 and 7.62 billion decoder and embedding parameters (model cards: Qwen2.5 3B and 7B)."""
    for name, billions, tables in (("qwen-3b", 3.09, 1), ("qwen-7b", 7.62, 2)):
        text = SHAPES[name].text
        total = counts.decoder_weights(text) + tables * text.vocab * text.width
        assert round(total / 1e9, 2) == billions


def test_pairs_by_brute_force():
    for length, tokens in ((1, 1), (5, 1), (4, 3), (7, 7)):
        keys = np.arange(length + tokens)
        seen = keys[None] <= keys[:, None]
        assert counts.causal_pairs(length) == seen[:length].sum()
        assert counts.response_pairs(length, tokens) == seen[length:].sum()


def test_prefill_by_hand():
    """Three tokens: 2 x 1140 x 3; 6 pairs x 2 layers x 4 heads x 3 x 4; one row of 10 x 20."""
    assert counts.prefill_flops(TEXT, 3) == 6840 + 576 + 400


def test_update_by_hand():
    """Prompt 3, two responses of 2: 5 tokens fed, pairs 6 + 2 x 4, logits at 4 positions."""
    matrices, attention, head = 3 * 2 * 1140 * 5, 3 * 96 * 14, 3 * 400 * 4
    assert counts.update_flops(TEXT, 3, 2, 2) == matrices + attention + head
    repeated = 3 * 2 * 1140 * 8 + 3 * 96 * 20 + head
    assert counts.update_flops(TEXT, 3, 2, 2, shared=False) == repeated
    some = 2 * 5 * (2 * 1140 + 100) + attention + 2 * 400 * 4
    assert counts.update_flops(TEXT, 3, 2, 2, trained=100) == some


def test_the_token_ratio_of_the_cpu_shape():
    """Linear layers alone: 8 x 1,027 against 900 + 8 x 127 tokens."""
    shape = SHAPES["rag-cpu"]
    wide = TextConfig(1, 4096, 4096, 1, 1, 1, 1, 1e4, (0, 0, 0), tied=True)
    shared, repeated = (
        counts.update_flops(wide, shape.prompt, shape.group, shape.response, shared=s)
        for s in (True, False)
    )
    assert repeated / shared == pytest.approx(8 * 1027 / (900 + 8 * 127), rel=0.02)


def test_windows_are_those_of_the_page():
    """Patches a window as `pages.patches` lays them out; 56 px are 2 x 2 merged units."""
    layout = VisionLayout(window=56)
    for units in ((1, 1), (2, 3), (5, 4)):
        mask = window_layout(2 * units[0], 2 * units[1], layout).mask
        assert counts.window_sizes(units, VISION) == mask.sum(1).tolist()


def test_tower_by_hand():
    """One page of 2 x 3 units, 24 patches, windows of 16 and 8.

    Embedding 588 x 8; a block 4 x 64 + 3 x 40; merger 32 x 32 + 32 x 10 on 6 units; pairs 24² once
    and 16² + 8² twice, 4 x 8 FLOPs each.
    """
    matrices = 24 * 588 * 8 + 3 * 24 * (256 + 120) + 6 * (1024 + 320)
    assert counts.tower_flops(VISION, (2, 3)) == 2 * matrices + 32 * (576 + 2 * 320)


def test_decode_bytes_by_hand():
    """(1140 + 200) weights of 2 bytes; 2 x 2 x 2 x 3 numbers of 2 bytes a token: 48."""
    assert counts.kv_bytes(TEXT) == 48
    assert counts.decode_bytes(TEXT, [7, 5], [1, 2, 3]) == 2680 + 48 * 18
    steps = [counts.decode_bytes(TEXT, [7], [t, t]) for t in (1, 2, 3, 4)]
    assert counts.mean_decode_bytes(TEXT, [7], 2, 4) == np.mean(steps)


def test_published_cache_sizes():
    """A token takes 36 KiB in the 3B model and 56 KiB in the 7B model (bf16)."""
    assert counts.kv_bytes(SHAPES["qwen-3b"].text) == 36 * 1024
    assert counts.kv_bytes(SHAPES["qwen-7b"].text) == 56 * 1024


def test_cards_by_the_longest_name():
    assert counts.card("NVIDIA H200")[1] == 4.8e12
    assert counts.card("NVIDIA H100 80GB HBM3")[1] == 3.35e12
    assert counts.card("NVIDIA H100 PCIe")[1] == 2.0e12
    assert counts.card("NVIDIA L40S")[0] == 362e12
    assert counts.card("cpu") is None
