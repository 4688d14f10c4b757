"""One measured case on disk and on the host: model folder, tokenizer, prompts and pages.

Numpy and files only, so that the torch side's process can hold it without jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evisrag_jax.pages.patches import PagePatches, make_patches
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.prompts.chat import Prompt, build_prompt

from .shapes import LAYOUT, Shape, layout_ids

BUDGET = PixelBudget("bench", 784, 12_845_056)
CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }} {% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"""


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A vocabulary of numbered words, one token each, and the eight layout tokens at its end."""
    plain = ["user", "system", "assistant"]
    plain += [f"w{i}" for i in range(vocab - len(LAYOUT) - len(plain))]
    marks = [f"<|{name}|>" for name in LAYOUT]
    words = {word: i for i, word in enumerate(plain + marks)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="w0",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT,
    )


def write_model(shape: Shape, folder: Path, seed: int = 0) -> None:
    """Random float32 weights of the shape's model as a folder that both sides load.

    The decoder's kernels have a deviation of 1/sqrt(width), so that layers matter beside the token's
    own embedding and greedy text is not one word again and again.
    """
    import jax

    from evisrag_jax.models.qwen25vl.model import init_params
    from evisrag_jax.models.qwen25vl.weights import save_params

    params = init_params(shape.config, jax.random.key(seed))
    scale = shape.text.width**-0.5 / 0.02
    params["text"]["layers"] = jax.tree_util.tree_map_with_path(
        lambda path, a: a * scale if path[-1].key == "kernel" else a, params["text"]["layers"]
    )
    save_params(params, shape.config, folder, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Case:
    """Prompts of a shape, each with its text, its pictures and what the host makes of them."""

    shape: Shape
    folder: Path | None
    tokenizer: PreTrainedTokenizerFast
    layout: VisionLayout
    texts: tuple[str, ...]
    pictures: tuple[tuple[Image.Image, ...], ...]
    prompts: tuple[Prompt, ...]
    pages: tuple[tuple[PagePatches, ...], ...]

    @property
    def stop_ids(self) -> tuple[int, int]:
        """Ids that end a response."""
        ids = layout_ids(self.shape.text.vocab)
        return ids["im_end"], ids["endoftext"]

    @property
    def never_sampled(self) -> list[int]:
        """Ids that our engine never samples; the other sides are told to suppress them too."""
        ids = layout_ids(self.shape.text.vocab)
        return sorted(set(ids.values()) - {ids["im_start"], *self.stop_ids})


def make_case(shape: Shape, folder: Path | None, seed: int = 0) -> Case:
    """The shape's prompts: words and pages of noise drawn from `seed`, exactly `shape.prompt` long.

    Raises ValueError when the pages alone are longer than the prompt.
    """
    tokenizer = make_tokenizer(shape.text.vocab)
    vision = shape.vision
    layout = VisionLayout(patch=vision.patch, merge=vision.merge, window=vision.window)
    rng = np.random.default_rng(seed)
    texts, pictures, prompts, pages = [], [], [], []
    for p in range(shape.prompts):
        row = tuple(_picture(rng, shape) for _ in range(shape.pages))
        cut = tuple(make_patches(picture, layout, BUDGET) for picture in row)
        text = _text(tokenizer, rng, shape, cut)
        texts.append(text)
        pictures.append(row)
        pages.append(cut)
        prompts.append(lay_out(tokenizer, text, cut, name=f"prompt {p}"))
    return Case(shape, folder, tokenizer, layout, *map(tuple, (texts, pictures, prompts, pages)))


def lay_out(
    tokenizer: PreTrainedTokenizerFast, text: str, pages: Sequence[PagePatches], name: str
) -> Prompt:
    """The prompt, pages first as TRL puts them."""
    return build_prompt(tokenizer, text, [p.grid for p in pages], images_first=True, name=name)


def _picture(rng: np.random.Generator, shape: Shape) -> Image.Image:
    side = shape.vision.patch * shape.vision.merge
    rows, columns = shape.page
    noise = rng.integers(0, 256, (rows * side, columns * side, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def _text(
    tokenizer: PreTrainedTokenizerFast,
    rng: np.random.Generator,
    shape: Shape,
    pages: Sequence[PagePatches],
) -> str:
    fixed = len(lay_out(tokenizer, "w1", pages, "").ids) - 1
    count = shape.prompt - fixed
    if count < 1:
        raise ValueError(
            f"shape {shape.name}: its pages take {fixed} tokens of a prompt of {shape.prompt}"
        )
    plain = shape.text.vocab - len(LAYOUT) - 3
    return " ".join(f"w{i}" for i in rng.integers(0, plain, count))


@dataclass(frozen=True, eq=False)
class Responses:
    """Given responses of a case, full length, with everything an update needs beside them.

    tokens: [P, G, T].  rewards: [P, G, 3] in {0, 0.5, 1}.  masks: [P, G, 3, T], the first half of a
    response, its second half, and all of it.
    """

    tokens: np.ndarray
    rewards: np.ndarray
    masks: np.ndarray


def make_responses(shape: Shape, seed: int = 1) -> Responses:
    """Random words and rewards."""
    P, G, T = shape.prompts, shape.group, shape.response
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, shape.text.vocab - len(LAYOUT), (P, G, T)).astype(np.int32)
    rewards = rng.integers(0, 3, (P, G, 3)).astype(np.float32) / 2
    return Responses(tokens, rewards, scope_masks(shape))


def scope_masks(shape: Shape) -> np.ndarray:
    """Perception on the first half of every response, derivation on the second, overall on all."""
    first = np.arange(shape.response) < shape.response // 2
    rows = np.stack([first, ~first, np.ones_like(first)])
    return np.broadcast_to(rows, (shape.prompts, shape.group, *rows.shape)).copy()


def describe(case: Case) -> dict[str, Any]:
    """Sizes for a report."""
    return case.shape.sizes() | {"visual_tokens": case.shape.pages * case.shape.page_tokens}
