"""The mini model's sizes and its page batches on the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from evisrag_jax.data.miniworld.draw import HEIGHT, WIDTH
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig
from evisrag_jax.pages.patches import ImageArrays, window_layout
from evisrag_jax.pages.plan import VisionLayout

VISION = VisionConfig(
    depth=4, width=128, mlp=256, heads=4, out_width=192, full_attention=(1, 3), window=56
)
LAYOUT = VisionLayout(window=VISION.window)
GRID = (HEIGHT // VISION.patch, WIDTH // VISION.patch)


def mini_config(vocab: int, special: dict[str, int]) -> Qwen25VLConfig:
    """Qwen2.5-VL at 2.8 M parameters: every mechanism of the full model, sizes for two CPU cores."""
    text = TextConfig(
        vocab=vocab,
        width=192,
        mlp=512,
        layers=4,
        heads=6,
        kv_heads=2,
        head_dim=32,
        theta=1000.0,
        mrope_section=(4, 6, 6),
        tied=True,
        max_positions=2048,
    )
    return Qwen25VLConfig(text, VISION, **special)


def page_arrays(pixels: UInt8[Array, "*B H W 3"]) -> ImageArrays:
    """Normalised patches of whole mini pages, on the device: what `pages.make_patches` gives for them.

    Pages have the size of the patch grid, so there is nothing to resize; [P, I, H, W, 3] in.
    """
    lead, (rows, cols), side = pixels.shape[:-3], GRID, VISION.patch
    mean, std = (jnp.asarray(c, jnp.float32) for c in (LAYOUT.mean, LAYOUT.std))
    x = (pixels.astype(jnp.float32) * (1 / 255) - mean) / std
    x = x.reshape(*lead, rows // 2, 2, side, cols // 2, 2, side, 3)
    n = len(lead)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 6, n + 2, n + 5]
    patches = x.transpose(order).reshape(*lead, rows * cols, -1)
    layout = window_layout(rows, cols, LAYOUT)
    windows, slots = layout.slot_source.shape
    source = jnp.maximum(jnp.asarray(layout.slot_source).reshape(-1), 0)
    patches = jnp.take(patches, source, axis=n).reshape(*lead, windows, slots, -1)
    tiled = (jnp.broadcast_to(a, (*lead, *a.shape)) for a in layout[1:])
    rowcol, mask, merged_index = tiled
    return ImageArrays(patches, mask, rowcol, merged_index)


def prefetch(make: Callable[[int], object], start: int, depth: int = 4) -> Iterator:
    """make(start), make(start + 1), … computed ahead in one thread; its errors are raised here."""
    ready: queue.Queue = queue.Queue(depth)

    def work():
        index = start
        while True:
            try:
                ready.put(make(index))
            except Exception as error:
                ready.put(error)
                return
            index += 1

    threading.Thread(target=work, daemon=True).start()
    while True:
        item = ready.get()
        if isinstance(item, Exception):
            raise item
        yield item


Features = Float[Array, "*B M D"]
__all__ = ["GRID", "LAYOUT", "VISION", "Features", "mini_config", "np", "page_arrays", "prefetch"]
