"""How much of a box is ink: what control regions must match so that they are text and not margin.

Ink is a pixel whose grey value differs from the paper's by at least a contrast, so light text on a
dark page counts as dark text on a light one does. The paper is the page's most frequent grey value.
Sums of boxes come from one table of sums a page:

    table[y, x] = ink above and left of (y, x)      box = t[b, r] - t[a, r] - t[b, l] + t[a, l]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from evisrag_jax.pages.words import PixelBox

#: Least difference to the paper, of 255: a quarter of the range, so that shaded rows, thin tints
#: and noise of compression are paper.
CONTRAST = 64


def ink_table(
    gray: UInt8[np.ndarray, "height width"], *, contrast: int = CONTRAST
) -> Int64[np.ndarray, "height1 width1"]:
    """Table of sums of the ink of a page (grey values; of an RGB picture ``image.convert("L")``).

    The paper's value is the middle of the fullest window of nine neighbouring grey values, so that
    the noise of a scan does not move it. A page that is mostly picture or dark panel has no one
    paper: there the numbers say little.

    Raises:
        ValueError: for a page without pixels or a contrast outside 1..255.
    """
    if not 1 <= contrast <= 255:
        raise ValueError(f"contrast={contrast} is not in 1..255")
    if not gray.size:
        raise ValueError(f"a page of shape {gray.shape} has no pixels")
    counts = np.convolve(np.bincount(gray.ravel(), minlength=256), np.ones(9, np.int64), "same")
    paper = int(np.median(np.flatnonzero(counts == counts.max())))
    ink = np.abs(gray.astype(np.int16) - paper) >= contrast
    table = np.zeros((gray.shape[0] + 1, gray.shape[1] + 1), np.int64)
    table[1:, 1:] = ink.cumsum(0, dtype=np.int64).cumsum(1)
    return table


def ink_density(
    table: Int64[np.ndarray, "height1 width1"], boxes: Sequence[PixelBox]
) -> Float64[np.ndarray, " B"]:
    """Share of ink, 0 to 1, in each box [x, y, w, h].

    Edges are rounded to whole pixels and boxes cut to the page; a box without a pixel on the page
    has density 0.
    """
    edges = np.array(boxes, np.float64).reshape(-1, 4)  # a copy
    edges[:, 2:] += edges[:, :2]
    rows, cols = table.shape[0] - 1, table.shape[1] - 1
    edges = np.clip(np.rint(edges), 0, [cols, rows, cols, rows]).astype(np.int64)
    left, top, right, bottom = edges.T
    ink = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
    area = (right - left) * (bottom - top)
    return np.where(area > 0, ink / np.maximum(area, 1), 0.0)


def token_ink(
    gray: UInt8[np.ndarray, "height width"], grid: tuple[int, int], *, merge: int = 2
) -> Float64[np.ndarray, "rows cols"]:
    """Share of ink of each merged token of a page. grid: rows and columns of the resized page in patches."""
    rows, cols = grid[0] // merge, grid[1] // merge
    h, w = gray.shape[0] / rows, gray.shape[1] / cols
    boxes = [(col * w, row * h, w, h) for row in range(rows) for col in range(cols)]
    return ink_density(ink_table(gray), boxes).reshape(rows, cols)
