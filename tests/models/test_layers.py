"""Each block of the decoder and of the tower against its torch counterpart, float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as reference

from evisrag_jax.models import layers
from evisrag_jax.models.attention import causal_attention
from evisrag_jax.models.qwen25vl import text, vision
from evisrag_jax.models.qwen25vl.config import TextConfig, VisionConfig
from evisrag_jax.pages.patches import window_layout
from tests.models.tiny import largest

BLOCK = 1e-5  # largest absolute difference of one block's output, values around 1
ANGLE = 2e-6  # of cosines and sines


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer_of(stacked, index):
    return {"params": jax.tree.map(lambda a: a[index], stacked)}


@pytest.mark.parametrize("head_dim", [16, 80])
def test_vision_rotary(head_dim):
    """Rows turn the first half of the frequencies, columns the second; up to 100 rows (B25)."""
    sizes = {"depth": 1, "width": 2 * head_dim, "mlp": 8, "heads": 2}
    config = VisionConfig(**sizes, out_width=8, full_attention=())
    rowcol = np.stack(np.meshgrid(np.arange(100), np.arange(70), indexing="ij"), -1).reshape(-1, 2)
    cos, sin = vision.rotary_angles(jnp.asarray(rowcol), config)
    rotary = reference.Qwen2_5_VLVisionRotaryEmbedding(
        reference.Qwen2_5_VLVisionConfig(hidden_size=2 * head_dim, num_heads=2)
    )
    theirs = rotary(torch.zeros(1), torch.from_numpy(rowcol))
    for ours, expected in zip((cos, sin), theirs, strict=True):
        assert ours.dtype == jnp.float32
        assert largest(ours, expected[:, : head_dim // 2]) <= ANGLE

    q, k = drawn(1, len(rowcol), 2, head_dim), drawn(2, len(rowcol), 2, head_dim)
    turned = reference.apply_rotary_pos_emb_vision(
        torch.from_numpy(q), torch.from_numpy(k), *theirs
    )
    for ours, expected in zip((q, k), turned, strict=True):
        assert largest(layers.rotate(jnp.asarray(ours), cos, sin), expected) <= BLOCK


def test_mrope():
    """Sections [16, 24, 24] of the published sizes, three unequal axes, positions up to 30,000."""
    config = TextConfig(
        vocab=8, width=256, mlp=8, layers=1, heads=2, kv_heads=1, head_dim=128, theta=1e6,
        mrope_section=(16, 24, 24), tied=True,
    )  # fmt: skip
    positions = np.random.default_rng(3).integers(0, 30000, (2, 3, 500))
    cos, sin = text.rotary_angles(jnp.asarray(positions), config)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    rotary = reference.Qwen2_5_VLRotaryEmbedding(
        reference.Qwen2_5_VLTextConfig(
            hidden_size=256, num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope
        )
    )
    theirs = rotary(torch.zeros(1), torch.from_numpy(positions).transpose(0, 1))
    # One unit in the last place of a frequency is 0.002 rad at 30,000 (torch's pow rounds one
    # frequency of 64 the other way); nearly all angles agree to float32.
    for ours, expected in zip((cos, sin), theirs, strict=True):
        difference = np.abs(np.asarray(ours) - expected[..., :64].numpy())
        assert difference.max() <= 2e-3
        assert (difference.max((0, 1)) <= ANGLE).sum() >= 62

    q, k = drawn(4, 2, 500, 2, 128), drawn(5, 2, 500, 1, 128)
    turned = reference.apply_rotary_pos_emb(
        torch.from_numpy(q), torch.from_numpy(k), *theirs, unsqueeze_dim=2
    )
    half = [jnp.asarray(a[..., :64].numpy()) for a in theirs]
    for ours, expected in zip((q, k), turned, strict=True):
        assert largest(layers.rotate(jnp.asarray(ours), *half), expected) <= BLOCK


def test_text_angles_are_mrope_of_equal_axes(untied):
    positions = jnp.arange(50)[None]
    config = untied.config.text
    equal = text.rotary_angles(jnp.broadcast_to(positions[:, None], (1, 3, 50)), config)
    for ours, expected in zip(text.text_angles(positions, config), equal, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_rms_norm(untied):
    norm = untied.torch.model.language_model.norm
    x = 10 * drawn(6, 3, 5, 48)
    ours = layers.RMSNorm(1e-5).apply({"params": untied.params["text"]["norm"]}, jnp.asarray(x))
    assert largest(ours, norm(torch.from_numpy(x)).detach()) <= BLOCK


def test_patch_embed(untied):
    """The convolution over two equal frames, read once."""
    patches = drawn(7, 20, 588)
    frames = np.repeat(patches.reshape(20, 3, 1, 196), 2, axis=2).reshape(20, 1176)
    expected = untied.tower.patch_embed(torch.from_numpy(frames)).detach()
    module = vision.PatchEmbed(untied.config.vision)
    ours = module.apply({"params": untied.params["vision"]["patch_embed"]}, jnp.asarray(patches))
    assert largest(ours, expected) <= BLOCK


@pytest.mark.parametrize("grid", [(16, 16), (10, 22)], ids=["dividing", "ragged"])
@pytest.mark.parametrize("full", [False, True], ids=["window", "full"])
def test_vision_block(untied, grid, full):
    """One block over one picture; windows are those of the torch model's own index."""
    config = untied.config.vision
    layout = window_layout(*grid, untied.layout)
    held = layout.mask.reshape(-1)
    hidden = drawn(8, held.sum(), config.width)

    seqlens = [0, held.sum()] if full else [0, *np.cumsum(layout.mask.sum(1))]
    rowcol = layout.rowcol.reshape(-1, 2)
    angles = untied.tower.rotary_pos_emb(torch.zeros(1), torch.from_numpy(rowcol[held]))
    _, windows = reference.get_vision_window_index(
        torch.tensor([[1, *grid]]), spatial_merge_size=2, window_size=112, patch_size=14
    )
    assert full or windows.tolist() == seqlens
    with torch.no_grad():
        expected = untied.tower.blocks[1](
            torch.from_numpy(hidden),
            cu_seqlens=torch.tensor(seqlens),
            position_embeddings=angles,
        )

    slots = np.zeros((len(held), config.width), np.float32)
    slots[held] = hidden
    # encode() is exercised whole elsewhere; here its block alone, on the same layout.
    W, S = layout.mask.shape
    shape = (1, W * S) if full else (W, S)

    def attend(q, k, v):
        flat = (a.reshape(*shape, *a.shape[1:]) for a in (q, k, v))
        out = vision.masked_attention(*flat, jnp.asarray(layout.mask.reshape(shape)))
        return out.reshape(q.shape)

    @jax.jit
    def block(params, x):
        cos, sin = vision.rotary_angles(jnp.asarray(rowcol), config)
        return vision.VisionBlock(config).apply(params, x, cos, sin, attend)

    ours = block(layer_of(untied.params["vision"]["blocks"], 1), slots)
    assert largest(np.asarray(ours)[held], expected) <= BLOCK


@pytest.mark.parametrize("wrong", [False, True], ids=["erf", "tanh"])
def test_patch_merger_has_the_exact_gelu(untied, monkeypatch, wrong):
    """The erf form is within tolerance, jax's default (tanh) form is not."""
    if wrong:
        tanh = functools.partial(jax.nn.gelu)
        monkeypatch.setattr(vision.jax.nn, "gelu", lambda x, approximate: tanh(x))
    units = drawn(9, 30, 4, untied.config.vision.width)
    expected = untied.tower.merger(torch.from_numpy(units)).detach()
    module = vision.PatchMerger(untied.config.vision)
    ours = module.apply({"params": untied.params["vision"]["merger"]}, jnp.asarray(units))
    error = largest(ours, expected)
    assert (error <= BLOCK) != wrong


def test_decoder_layer(untied):
    """Grouped queries, biased projections, causal mask, three unequal position axes."""
    config = untied.config.text
    language = untied.torch.model.language_model
    x = drawn(10, 2, 12, config.width)
    positions = np.random.default_rng(11).integers(0, 40, (2, 3, 12))
    angles = language.rotary_emb(torch.zeros(1), torch.from_numpy(positions).transpose(0, 1))
    causal = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = language.layers[1](
            torch.from_numpy(x), attention_mask=causal, position_embeddings=angles
        )

    def attend(q, k, v):
        return causal_attention(q, k, v, jnp.array([12, 12])), None

    @jax.jit
    def layer(params, x):
        cos, sin = text.rotary_angles(jnp.asarray(positions), config)
        return text.DecoderLayer(config).apply(params, x, cos, sin, attend)

    ours, _ = layer(layer_of(untied.params["text"]["layers"], 1), x)
    assert largest(ours, expected) <= BLOCK
