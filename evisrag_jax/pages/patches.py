"""Patches of one page in window order, and pages stacked into the arrays the vision tower takes.

The tower's window attention never looks across a window, so the host lays patches out window by
window and pads each window to the same number of slots. On the device a window layer is then a
plain batched attention over ``[windows, slots]`` with a key mask, and no index work is left but one
gather back to reading order after the merger.

A 3 x 5 grid of merged units with windows of 2 x 2 units (the numbers are reading order, ``.`` a
masked slot)::

      0  1 | 2  3 | 4            window 0: 0 1 5 6     window 1: 2 3 7 8     window 2: 4 . 9 .
      5  6 | 7  8 | 9            window 3: 10 11 . .   window 4: 12 13 . .   window 5: 14 . . .
     ------+------+---
     10 11 |12 13 |14            merged_index: 0 1 4 5 8 | 2 3 6 7 10 | 12 13 16 17 20

Every unit is ``merge x merge`` patches, row-major inside the unit, side by side in the slots.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32
from PIL import Image

from evisrag_jax.pages.plan import PixelBudget, VisionLayout, plan_resize


class WindowLayout(NamedTuple):
    """Where each patch of a grid goes; read-only arrays, shared between callers.

    Attributes:
        slot_source: for every slot the patch it holds, counted in the published processor's order
            (merged units row-major over the grid, then patches row-major inside the unit); -1 for a
            masked slot.
        rowcol: (row, column) of the patch in the whole grid; (0, 0) for a masked slot.
        mask: True where a slot holds a patch.
        merged_index: for every merged unit in reading order its slot among merged units,
            ``w·S/merge² + u``.
    """

    slot_source: Int32[np.ndarray, "W S"]
    rowcol: Int32[np.ndarray, "W S 2"]
    mask: Bool[np.ndarray, "W S"]
    merged_index: Int32[np.ndarray, " M"]


@dataclass(frozen=True)
class PagePatches:
    """One page, resized once, normalised, and cut into patches in window order.

    Attributes:
        patches: C = 3·patch² normalised samples a patch, channel-major (colour, y, x). The
            published processor repeats a still image's patch for two temporal frames; the frames
            are equal and one is kept. Masked slots are zero.
        mask, rowcol, merged_index: see ``WindowLayout``.
        grid: rows and columns of the page in patches.
        size: width and height of the decoded picture in pixels, before the resize.
        content_hash: SHA-256 (hex) over the decoded picture's size and RGB bytes, before the
            resize. Features of a page depend on ``(content_hash, grid)`` and on the tower.
    """

    patches: Float32[np.ndarray, "W S C"]
    mask: Bool[np.ndarray, "W S"]
    rowcol: Int32[np.ndarray, "W S 2"]
    merged_index: Int32[np.ndarray, " M"]
    grid: tuple[int, int]
    size: tuple[int, int]
    content_hash: str


class ImageArrays(NamedTuple):
    """Pages of a batch of prompts at fixed shape; what is beyond a row's own pages, windows or
    tokens is masked.

    Attributes:
        patches, mask, rowcol: as in ``PagePatches``, zero or False where padded.
        merged_index: as in ``PagePatches``, 0 where padded (which tokens are real follows from the
            prompt).
    """

    patches: Float32[np.ndarray, "P I W S C"]
    mask: Bool[np.ndarray, "P I W S"]
    rowcol: Int32[np.ndarray, "P I W S 2"]
    merged_index: Int32[np.ndarray, "P I M"]


@functools.lru_cache(maxsize=1024)
def window_layout(rows: int, cols: int, layout: VisionLayout) -> WindowLayout:
    """Window order of a grid of ``rows x cols`` patches, padded inside each window.

    Windows are row-major and there are ceil(rows/side)·ceil(cols/side) of them, ``side`` being a
    window in patches. Inside a window merged units are row-major over the window's full side, so an
    edge window has masked units at its right or bottom; the unmasked slots read in order are the
    published window index of Qwen2.5-VL.

    Args:
        rows, cols: the grid in patches; multiples of ``layout.merge``.
        layout: patch, merge and window sizes.

    Raises:
        ValueError: if a side is not a positive multiple of ``layout.merge``.
    """
    merge, side = layout.merge, layout.window_units
    if rows < 1 or cols < 1 or rows % merge or cols % merge:
        raise ValueError(
            f"grid {rows} x {cols} patches: sides must be positive multiples of {merge}"
        )
    unit_rows, unit_cols = rows // merge, cols // merge
    window_rows, window_cols = -(-unit_rows // side), -(-unit_cols // side)

    # units[r, c]: reading order of the unit, -1 where the last windows hang over the grid's edge.
    units = np.full((window_rows * side, window_cols * side), -1, np.int64)
    units[:unit_rows, :unit_cols] = np.arange(unit_rows * unit_cols).reshape(unit_rows, unit_cols)
    windows = units.reshape(window_rows, side, window_cols, side).transpose(0, 2, 1, 3)
    windows = windows.reshape(window_rows * window_cols, side * side)
    held = windows >= 0

    inside = np.arange(merge * merge)
    shape = (len(windows), layout.slots)
    mask = np.repeat(held, merge * merge, axis=1)
    source = windows[..., None] * merge * merge + inside
    source = np.where(mask, source.reshape(shape), -1)
    row = (windows // unit_cols)[..., None] * merge + inside // merge
    col = (windows % unit_cols)[..., None] * merge + inside % merge
    rowcol = np.stack([row.reshape(shape), col.reshape(shape)], axis=-1)
    rowcol = np.where(mask[..., None], rowcol, 0)

    merged_index = np.empty(unit_rows * unit_cols, np.int64)
    merged_index[windows[held]] = np.flatnonzero(held)

    result = WindowLayout(
        source.astype(np.int32), rowcol.astype(np.int32), mask, merged_index.astype(np.int32)
    )
    for array in result:
        array.setflags(write=False)
    return result


@functools.lru_cache(maxsize=16)
def _sample_table(layout: VisionLayout) -> Float32[np.ndarray, "3 256"]:
    """Normalised value of every 8-bit sample, rounded to float32 step by step as the published
    processor does."""
    unit = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean = np.asarray(layout.mean, np.float32)[:, None]
    std = np.asarray(layout.std, np.float32)[:, None]
    return (unit[None, :] - mean) / std


def make_patches(
    image: Image.Image, layout: VisionLayout, budget: PixelBudget, *, name: str = "image"
) -> PagePatches:
    """Resize a decoded page once (Pillow's bicubic) and cut it into normalised patches in window
    order.

    Args:
        image: an RGB page, as ``load_page`` returns it.
        layout: patch, merge and window sizes and the normalisation.
        budget: limits of the resized area.
        name: what an error calls the page.

    Raises:
        PageError: if the page cannot be planned (see ``plan_resize``).
        ValueError: if the image is not RGB: decoding decides how other modes look.
    """
    if image.mode != "RGB":
        raise ValueError(f"{name}: mode is {image.mode}, expected RGB (use load_page)")
    plan = plan_resize(image.height, image.width, budget, layout, name=name)
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    digest.update(image.tobytes())

    resized = image.resize((plan.width, plan.height), resample=Image.Resampling.BICUBIC)
    samples = np.asarray(resized)  # [height, width, 3], uint8
    order = window_layout(plan.rows, plan.cols, layout)
    merge, patch, area = layout.merge, layout.patch, layout.patch * layout.patch
    cut = samples.reshape(plan.rows // merge, merge, patch, plan.cols // merge, merge, patch, 3)
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(plan.rows * plan.cols, 3, area)

    table = _sample_table(layout)
    patches = np.zeros((*order.mask.shape, 3, area), np.float32)
    held = cut[order.slot_source[order.mask]]
    patches[order.mask] = np.stack([table[c][held[:, c]] for c in range(3)], axis=1)
    return PagePatches(
        patches=patches.reshape(*order.mask.shape, 3 * area),
        mask=order.mask,
        rowcol=order.rowcol,
        merged_index=order.merged_index,
        grid=(plan.rows, plan.cols),
        size=image.size,
        content_hash=digest.hexdigest(),
    )


def reading_order_patches(page: PagePatches) -> Float32[np.ndarray, "N C"]:
    """The page's patches in the published processor's order: one temporal frame of its
    ``pixel_values``.

    Returns:
        N = rows·cols patches: merged units row-major over the grid, patches row-major inside the
        unit.
    """
    windows, slots, channels = page.patches.shape
    # merged_index lists units in reading order, and a unit's patches lie side by side.
    inside = page.grid[0] * page.grid[1] // len(page.merged_index)
    units = page.patches.reshape(windows * slots // inside, inside, channels)
    return units[page.merged_index].reshape(-1, channels)


def stack_pages(
    rows: Sequence[Sequence[PagePatches]],
    *,
    images: int,
    windows: int,
    tokens: int,
    layout: VisionLayout | None = None,
) -> ImageArrays:
    """Pages of P prompts at one fixed shape.

    Args:
        rows: the pages of each prompt, in prompt order; a prompt may have none.
        images: I, pages a prompt at most.
        windows: W, windows a page at most.
        tokens: M, merged tokens a page at most.
        layout: gives S and C when no prompt has a page (the default layout's otherwise).

    Returns:
        Padded arrays; a prompt without pages is all-masked.

    Raises:
        ValueError: if a prompt has too many pages or a page does not fit, naming the prompt's
            place, the page's and the limit; or if pages of two layouts meet.
    """
    first = next((page for pages in rows for page in pages), None)
    if first is not None:
        slots, channels = first.patches.shape[1:]
    else:
        layout = layout or VisionLayout()
        slots, channels = layout.slots, layout.channels

    lead = (len(rows), images)
    stacked = ImageArrays(
        patches=np.zeros((*lead, windows, slots, channels), np.float32),
        mask=np.zeros((*lead, windows, slots), bool),
        rowcol=np.zeros((*lead, windows, slots, 2), np.int32),
        merged_index=np.zeros((*lead, tokens), np.int32),
    )
    for p, pages in enumerate(rows):
        if len(pages) > images:
            raise ValueError(f"prompt {p} has {len(pages)} pages, limit {images}")
        for i, page in enumerate(pages):
            count, length = len(page.patches), len(page.merged_index)
            if page.patches.shape[1:] != (slots, channels):
                raise ValueError(
                    f"prompt {p}, page {i}: slots and channels {page.patches.shape[1:]} differ "
                    f"from the first page's {(slots, channels)}"
                )
            if count > windows or length > tokens:
                raise ValueError(
                    f"prompt {p}, page {i}: grid {page.grid[0]} x {page.grid[1]} takes {count} "
                    f"windows and {length} tokens, limits {windows} and {tokens}"
                )
            stacked.patches[p, i, :count] = page.patches
            stacked.mask[p, i, :count] = page.mask
            stacked.rowcol[p, i, :count] = page.rowcol
            stacked.merged_index[p, i, :length] = page.merged_index
    return stacked
