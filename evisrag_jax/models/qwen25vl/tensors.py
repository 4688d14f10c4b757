"""The table of Hugging Face tensors: each one's name, the parameter it fills, and how both ways.

Linear weights are [out, in] in the files and in_shape + out_shape here; the layers of a tower are
stacked on a leading axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig


@dataclass(frozen=True)
class Entry:
    """One Hugging Face tensor: its name, where it goes (layer None = not stacked), both maps.

    inputs: the input axes of a linear layer's kernel, None for every other tensor.
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    load: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]
    inputs: int | None = None


def _as_is(a, shape):
    return a.reshape(shape)


def _matrix_in(a, shape):
    """[out, in] → in_shape + out_shape."""
    return a.T.reshape(shape)


def _matrix_out(inputs: int):
    def save(a):
        n_in = int(np.prod(a.shape[:inputs]))
        return a.reshape(n_in, -1).T

    return save


def _conv_in(a, shape):
    """[D, channels, time, patch, patch] → [channels, time, patch², D]."""
    return a.transpose(1, 2, 3, 4, 0).reshape(shape)


def _conv_out(a):
    side = int(round(a.shape[2] ** 0.5))
    return a.reshape(*a.shape[:2], side, side, -1).transpose(4, 0, 1, 2, 3)


def entries(config: Qwen25VLConfig) -> Iterator[Entry]:
    """Every tensor of the published layout, in file order."""

    def linear(name, path, layer=None, *, bias=True, inputs=1):
        matrix = (_matrix_in, _matrix_out(inputs), inputs)
        yield Entry(f"{name}.weight", (*path, "kernel"), layer, *matrix)
        if bias:
            yield Entry(f"{name}.bias", (*path, "bias"), layer, _as_is, np.ravel)

    def scale(name, path, layer=None):
        return Entry(f"{name}.weight", (*path, "scale"), layer, _as_is, np.asarray)

    if config.vision is not None:
        yield Entry(
            "visual.patch_embed.proj.weight",
            ("vision", "patch_embed", "kernel"),
            None,
            _conv_in,
            _conv_out,
        )
        for i in range(config.vision.depth):
            hf, ours = f"visual.blocks.{i}", ("vision", "blocks")
            yield scale(f"{hf}.norm1", (*ours, "norm1"), i)
            yield scale(f"{hf}.norm2", (*ours, "norm2"), i)
            yield from linear(f"{hf}.attn.qkv", (*ours, "qkv"), i)
            yield from linear(f"{hf}.attn.proj", (*ours, "proj"), i, inputs=2)
            for part in ("gate", "up", "down"):
                yield from linear(f"{hf}.mlp.{part}_proj", (*ours, "mlp", part), i)
        yield scale("visual.merger.ln_q", ("vision", "merger", "norm"))
        yield from linear("visual.merger.mlp.0", ("vision", "merger", "fc1"))
        yield from linear("visual.merger.mlp.2", ("vision", "merger", "fc2"))

    yield Entry(
        "model.embed_tokens.weight", ("text", "embed", "embedding"), None, _as_is, np.asarray
    )
    for i in range(config.text.layers):
        hf, ours = f"model.layers.{i}", ("text", "layers")
        yield scale(f"{hf}.input_layernorm", (*ours, "norm1"), i)
        yield scale(f"{hf}.post_attention_layernorm", (*ours, "norm2"), i)
        for part in ("q", "k", "v"):
            yield from linear(
                f"{hf}.self_attn.{part}_proj", (*ours, part), i, bias=config.text.qkv_bias
            )
        yield from linear(f"{hf}.self_attn.o_proj", (*ours, "o"), i, bias=False, inputs=2)
        for part in ("gate", "up", "down"):
            yield from linear(f"{hf}.mlp.{part}_proj", (*ours, "mlp", part), i, bias=False)
    yield scale("model.norm", ("text", "norm"))
    if not config.text.tied:
        yield from linear("lm_head", ("text", "head"), bias=False)


_RENAMES = (
    (re.compile(r"^(model\.|language_model\.)*lm_head\."), "lm_head."),
    (re.compile(r"^model\.visual\."), "visual."),
    (re.compile(r"^(model\.language_model|language_model\.model)\."), "model."),
)


def canonical_name(name: str) -> str:
    """A tensor's name in the published layout, from any of the accepted ones."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name
