"""Tiny Qwen2.5-VL models in pairs: transformers' torch model with drawn weights, and ours.

Ours is read from the folder that transformers writes; the torch model is the reference and takes
pixels from transformers' own image processor and positions from its own index.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from evisrag_jax.models.decode_attention import Seats
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.pages.patches import ImageArrays, PagePatches, make_patches, stack_pages
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.prompts.chat import Prompt, batch_prompts
from evisrag_jax.prompts.positions import merged_grid, mrope_positions
from evisrag_jax.prompts.tokenizer import SpecialIds

torch = pytest.importorskip("torch", reason="the reference models are torch (extra: test)")

_LOG = logging.getLogger(__name__)

VOCAB = 101
SPECIAL = SpecialIds(
    endoftext=89,
    im_start=90,
    im_end=91,
    vision_start=92,
    vision_end=93,
    vision_pad=94,
    image_pad=95,
    video_pad=96,
)
BUDGET = PixelBudget("test", 784, 1_200_000)


@dataclass(frozen=True)
class Pair:
    """The same weights on both sides."""

    torch: Qwen2_5_VLForConditionalGeneration
    folder: Path
    params: dict
    config: Qwen25VLConfig

    @property
    def layout(self) -> VisionLayout:
        return VisionLayout(window=self.config.vision.window)

    @property
    def tower(self):
        return self.torch.model.visual


def draw_weights(module: torch.nn.Module, seed: int) -> None:
    """Weights of the size that keeps activations near 1, biases and norm scales far from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name or "ln_q" in name:
            value = 1 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name:
            value = noise
        else:
            value = noise / weight[0].numel() ** 0.5
        weight.data.copy_(value)


def make_pair(
    folder: Path,
    *,
    depth: int,
    full: tuple[int, ...],
    tied: bool,
    layers: int = 3,
    width: int = 48,
    window: int = 112,
    seed: int = 0,
) -> Pair:
    """A pair whose folder transformers wrote."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": width,
            "intermediate_size": 80,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 16 * 2,
            "num_key_value_heads": width // 16,
            "rms_norm_eps": 1e-5,  # the tower keeps 1e-6
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [1, 1, 2],
            },
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": depth,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": list(full),
            "window_size": window,
        },
        image_token_id=SPECIAL.image_pad,
        video_token_id=SPECIAL.video_pad,
        vision_start_token_id=SPECIAL.vision_start,
        vision_end_token_id=SPECIAL.vision_end,
        tie_word_embeddings=tied,
    )
    reference = Qwen2_5_VLForConditionalGeneration(config).eval()
    draw_weights(reference, seed)
    reference.save_pretrained(folder)
    params, config = load_params(folder)
    return Pair(reference, folder, params, config)


@dataclass(frozen=True)
class Row:
    """One prompt: its laid-out tokens, its pictures, and their patches."""

    prompt: Prompt
    pictures: tuple[Image.Image, ...]
    pages: tuple[PagePatches, ...]


def noise_picture(seed: int, height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_row(pair: Pair, seed: int, *sizes: tuple[int, int], text: int = 4) -> Row:
    """`text` words, then each picture of (height, width) px between its marks and `text` words."""
    rng = np.random.default_rng(seed)

    def words():
        return rng.integers(0, SPECIAL.endoftext, text).tolist()

    ids, slots, tokens = words(), [-1] * text, [0] * text
    pictures, pages = [], []
    for i, (height, width) in enumerate(sizes):
        pictures.append(noise_picture(1000 * seed + i, height, width))
        pages.append(make_patches(pictures[-1], pair.layout, BUDGET))
        count = int(np.prod(merged_grid(pages[-1].grid)))
        run = [SPECIAL.vision_start, *[SPECIAL.image_pad] * count, SPECIAL.vision_end, *words()]
        ids += run
        slots += [-1, *[i] * count, *[-1] * (len(run) - count - 1)]
        tokens += [0, *range(count), *[0] * (len(run) - count - 1)]
    grids = tuple(page.grid for page in pages)
    ids, slots, tokens = (np.asarray(a, np.int32) for a in (ids, slots, tokens))
    positions, next_position = mrope_positions(ids, grids, SPECIAL)
    prompt = Prompt(
        ids, positions, next_position, slots, tokens, grids, "", "", SPECIAL.endoftext, f"row{seed}"
    )
    return Row(prompt, tuple(pictures), tuple(pages))


@dataclass(frozen=True)
class Shape:
    """A bucket: L tokens, I images of W windows and M merged tokens."""

    length: int = 96
    images: int = 3
    windows: int = 12
    tokens: int = 35


def make_batch(
    pair: Pair, rows: list[Row], shape: Shape | None = None
) -> tuple[model.PromptInputs, ImageArrays]:
    """Padded arrays of some prompts."""
    shape = shape or Shape()
    prompt = batch_prompts(
        [row.prompt for row in rows], length=shape.length, tokens_per_image=shape.tokens
    )
    images = stack_pages(
        [row.pages for row in rows],
        images=shape.images,
        windows=shape.windows,
        tokens=shape.tokens,
        layout=pair.layout,
    )
    prompt = model.PromptInputs(*(jnp.asarray(a) for a in prompt))
    return prompt, ImageArrays(*(jnp.asarray(a) for a in images))


def append_responses(prompt: model.PromptInputs, responses: jax.Array) -> model.PromptInputs:
    """Every prompt G times, each copy with one of its responses [P, G, T] behind it."""
    T = responses.shape[-1]

    def one(tokens, positions, length, index, start, response):
        place = length + jnp.arange(T)
        tokens = jnp.pad(tokens, (0, T)).at[place].set(response)
        positions = jnp.pad(positions, ((0, 0), (0, T))).at[:, place].set(start + jnp.arange(T))
        index = jnp.pad(index, (0, T), constant_values=-1)
        return model.PromptInputs(tokens, positions, length + T, index, start + T)

    over_group = jax.vmap(one, in_axes=(None,) * 5 + (0,))
    repeated = jax.vmap(over_group)(*prompt, responses)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), repeated)


@functools.partial(jax.jit, static_argnames=("config", "remat"))
def run(params: dict, config: Qwen25VLConfig, prompt, images, remat: str = "none"):
    """(logits [P, L, V], features, hidden, KV) of a batch."""
    features = None
    if images is not None:
        features = model.encode_images(params, config, images, remat=remat)
    hidden, cache = model.prefill(params, config, prompt, features, remat=remat)
    return model.logits(params, config, hidden), features, hidden, cache


class Decoder:
    """The decode step over G responses a prompt, one token at a time, with room for `slots` tokens.
    `prefix` is what prefill gave."""

    def __init__(self, params, config, prompt, prefix, group: int, slots: int, *, fuse=True):
        P = len(prompt.lengths)
        order = jnp.arange(P * group, dtype=jnp.int32)
        seats = Seats(order.reshape(P, group), order // group, order % group)
        self.suffix = model.empty_kv(config, P * group, slots, jax.tree.leaves(prefix)[0].dtype)
        self.count, self.shape = jnp.zeros(P * group, jnp.int32), (P, group)
        start, kv = jnp.repeat(prompt.next_position, group), model.resident_kv(prefix)
        weights = jax.jit(model.decode_params, static_argnums=1, static_argnames="fuse")(
            params, config, fuse=fuse
        )

        @jax.jit
        def step(suffix, token, count):
            return model.decode_step(
                *(weights, config, token, start + count, count, seats, prompt.lengths, kv, suffix)
            )

        self.step = step

    def feed(self, tokens: jax.Array) -> jax.Array:
        """[P, G] → hidden states [P, G, D]."""
        hidden, self.suffix = self.step(self.suffix, tokens.reshape(-1), self.count)
        self.count = self.count + 1
        return hidden.reshape(*self.shape, -1)


def decoded(params, config, prompt, prefix, tokens, *, slots: int, fuse=True) -> jax.Array:
    """Hidden states [P, G, T, D] of given responses [P, G, T], fed one token at a time."""
    decoder = Decoder(params, config, prompt, prefix, tokens.shape[1], slots, fuse=fuse)
    return jnp.stack([decoder.feed(tokens[..., t]) for t in range(tokens.shape[2])], 2)


def torch_inputs(row: Row, response=()) -> dict[str, Any]:
    """What transformers' model takes for one prompt and the start of a response, unpadded, pixels
    from its own processor."""
    ids = torch.tensor([[*row.prompt.ids.tolist(), *map(int, response)]])
    inputs: dict[str, Any] = {"input_ids": ids}
    if row.pictures:
        processor = Qwen2VLImageProcessorPil(
            min_pixels=BUDGET.min_pixels, max_pixels=BUDGET.max_pixels
        )
        processed = processor(list(row.pictures), return_tensors="pt")
        inputs |= dict(processed) | {"mm_token_type_ids": (ids == SPECIAL.image_pad).int()}
    return inputs


def torch_logits(pair: Pair, row: Row, response=()) -> torch.Tensor:
    """[L + T, V] of one prompt and a response."""
    return pair.torch(**torch_inputs(row, response)).logits[0]


def text_loss(logits, ids, weights):
    """Sum over positions t of weights[t] · -log p(ids[t + 1] | …), for torch and for jax arrays."""
    if isinstance(logits, torch.Tensor):
        logp = torch.log_softmax(logits[:-1], -1)
        picked = logp.gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
        return -(picked * torch.from_numpy(weights[: len(ids) - 1])).sum()
    logp = jax.nn.log_softmax(logits[:, :-1], -1)
    return -(jnp.take_along_axis(logp, ids[:, 1:, None], -1)[..., 0] * weights).sum()


def loss_weights(rows: list[Row], length: int) -> np.ndarray:
    """Drawn weights [P, L - 1], zero where the next token is padding."""
    weights = np.random.default_rng(5).uniform(0.2, 1.0, (len(rows), length - 1))
    for p, row in enumerate(rows):
        weights[p, len(row.prompt.ids) - 1 :] = 0
    return weights.astype(np.float32)


@functools.partial(jax.jit, static_argnames=("config", "remat"))
def loss_and_grads(params, config, prompt, images, weights, remat: str = "none"):
    """`text_loss` of a batch and its gradient."""

    def loss(params):
        return text_loss(run(params, config, prompt, images, remat)[0], prompt.tokens, weights)

    return jax.value_and_grad(loss)(params)


def relative(a, b) -> float:
    """‖a − b‖₂ / ‖b‖₂; logged, see `pytest --log-cli-level=INFO`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    value = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    _LOG.info("relative difference %.2e", value)
    return value


def largest(a, b) -> float:
    """Largest absolute difference of two arrays of one shape; logged."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    value = float(np.abs(a - b).max())
    _LOG.info("largest difference %.2e", value)
    return value


def each_tensor(tree: dict):
    """(name, array) of every parameter, stacked layers one at a time."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = "/".join(key.key for key in path)
        if any(part in name for part in ("/layers/", "/blocks/")):
            yield from ((f"{name}[{i}]", leaf[i]) for i in range(len(leaf)))
        else:
            yield name, leaf
