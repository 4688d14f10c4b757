"""The published sizes of Qwen2.5-VL, as their config.json files have them."""

from __future__ import annotations

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig

# width, layers, heads, key-value heads, mlp, vocabulary, tied; mlp of the tower
_SIZES = {
    "3b": (2048, 36, 16, 2, 11008, 151_936, True, 3420),
    "7b": (3584, 28, 28, 4, 18944, 152_064, False, 3420),
    "32b": (5120, 64, 40, 8, 27648, 152_064, False, 3456),
    "72b": (8192, 80, 64, 8, 29568, 152_064, False, 3456),
}
SIZES = tuple(_SIZES)


def published(size: str) -> Qwen25VLConfig:
    """The config of "3b", "7b", "32b" or "72b". ValueError for another word."""
    if size not in _SIZES:
        raise ValueError(f"size {size!r}: one of {', '.join(SIZES)}")
    width, layers, heads, kv_heads, mlp, vocab, tied, tower_mlp = _SIZES[size]
    vision = VisionConfig(
        depth=32,
        width=1280,
        mlp=tower_mlp,
        heads=16,
        out_width=width,
        full_attention=(7, 15, 23, 31),
    )
    text = TextConfig(
        vocab=vocab,
        width=width,
        mlp=mlp,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        theta=1e6,
        mrope_section=(16, 24, 24),
        tied=tied,
        max_positions=128_000,
    )
    return Qwen25VLConfig(text, vision)
