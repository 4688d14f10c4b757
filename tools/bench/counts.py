"""FLOPs and bytes of the model, counted from its shapes alone.

A multiply-add is two FLOPs. Counted is what the mathematics needs: causal halves of attention, real
tokens, no padding, no recomputation; norms, rotary and softmax are left out. Utilisation computed from
these is model FLOPs utilisation (MFU).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from evisrag_jax.models.qwen25vl.config import TextConfig, VisionConfig


def layer_weights(text: TextConfig) -> int:
    """Kernel entries of one decoder layer: q and o, k and v, gate, up and down."""
    heads = 2 * text.heads * text.head_dim + 2 * text.kv_heads * text.head_dim
    return text.width * (heads + 3 * text.mlp)


def decoder_weights(text: TextConfig) -> int:
    """Kernel entries of all layers, without embedding and head."""
    return text.layers * layer_weights(text)


def attention_flops(text: TextConfig, pairs: int) -> int:
    """Scores and weighted values of `pairs` (query, key) pairs a head, over all layers."""
    return 2 * 2 * text.layers * text.heads * text.head_dim * pairs


def causal_pairs(length: int) -> int:
    """Pairs of a prompt: token i sees i + 1 keys."""
    return length * (length + 1) // 2


def response_pairs(length: int, tokens: int) -> int:
    """Pairs of one response of `tokens` behind a prompt of `length`."""
    return tokens * length + causal_pairs(tokens)


def head_flops(text: TextConfig, positions: int) -> int:
    """Logits at so many positions."""
    return 2 * text.width * text.vocab * positions


def prefill_flops(text: TextConfig, length: int) -> int:
    """The decoder over one prompt, and logits of its last position."""
    matrices = 2 * decoder_weights(text) * length
    return matrices + attention_flops(text, causal_pairs(length)) + head_flops(text, 1)


def window_sizes(units: tuple[int, int], vision: VisionConfig) -> list[int]:
    """Patches in each window of a page of (rows, columns) merged units; edge windows are smaller."""
    side = vision.window // (vision.patch * vision.merge)
    cut = [[min(side, n - start) for start in range(0, n, side)] for n in units]
    return [rows * columns * vision.merge**2 for rows in cut[0] for columns in cut[1]]


def tower_flops(vision: VisionConfig, units: tuple[int, int]) -> int:
    """The vision tower over one page of (rows, columns) merged units.

    A still image's patch is read once (its two temporal frames are equal).
    """
    patches, width = units[0] * units[1] * vision.merge**2, vision.width
    embed = vision.channels * vision.patch**2 * width * patches
    block = (4 * width * width + 3 * width * vision.mlp) * patches
    windows = sum(n * n for n in window_sizes(units, vision))
    full = len(vision.full_attention)
    pairs = full * patches**2 + (vision.depth - full) * windows
    merged = vision.merge**2 * width
    merger = (merged * merged + merged * vision.out_width) * units[0] * units[1]
    return 2 * (embed + vision.depth * block + merger) + 2 * 2 * width * pairs


def update_flops(
    text: TextConfig,
    length: int,
    group: int,
    tokens: int,
    *,
    trained: int | None = None,
    shared: bool = True,
) -> int:
    """Forward and backward of a group's update, the tower excluded.

    Forward once; backward once for activations and, of the `trained` kernel entries of the layers
    (None: all), once for weights. A trained head or embedding counts with the layers: with `trained`
    given, the head has a gradient to its input only. The last token of a response is not fed.
    """
    copies = 1 if shared else group
    fed = copies * length + group * (tokens - 1)
    weights = decoder_weights(text)
    chosen = weights if trained is None else trained
    matrices = 2 * fed * (2 * weights + chosen)
    pairs = copies * causal_pairs(length) + group * response_pairs(length, tokens - 1)
    attention = 3 * attention_flops(text, pairs)
    head = (3 if trained is None else 2) * head_flops(text, group * tokens)
    return matrices + attention + head


def kv_bytes(text: TextConfig, width: int = 2) -> int:
    """Keys and values of one token in all layers, `width` bytes a number."""
    return 2 * text.layers * text.kv_heads * text.head_dim * width


def decode_bytes(
    text: TextConfig, lengths: Sequence[int], suffixes: Sequence[int], width: int = 2
) -> int:
    """Bytes that one decoding step must read: every weight once, head included, the keys and values
    of each prompt once, and those of each response so far.

    lengths: of the resident prompts.  suffixes: tokens that each response has had.
    """
    weights = decoder_weights(text) + text.vocab * text.width
    return weights * width + (sum(lengths) + sum(suffixes)) * kv_bytes(text, width)


def mean_decode_bytes(
    text: TextConfig, lengths: Sequence[int], responses: int, tokens: int, width: int = 2
) -> float:
    """`decode_bytes` of a step on average over responses that all grow from 0 to `tokens`."""
    suffix = np.mean(np.arange(1, tokens + 1))
    return decode_bytes(text, lengths, [0], width) + responses * suffix * kv_bytes(text, width)


# Dense bf16 peak of one card (FLOP/s) and its memory bandwidth (bytes/s), from the makers' data sheets;
# the first name that stands as a word in the device's kind.
CARDS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "B200": (2250e12, 8.0e12),
    "A100-SXM4-40GB": (312e12, 1.555e12),
    "A100-PCIE-40GB": (312e12, 1.555e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.864e12),
    "A10": (125e12, 0.6e12),
    "L4": (121e12, 0.3e12),
    "RTX 4090": (165e12, 1.008e12),
    "RTX 3090": (71e12, 0.936e12),
}


def card(kind: str) -> tuple[float, float] | None:
    """(FLOP/s, bytes/s) of a device kind such as "NVIDIA H200"; None for an unknown one."""
    return next((peak for name, peak in CARDS.items() if re.search(rf"\b{name}\b", kind)), None)
