"""Three-axis rotary positions (time, row, column) of a prompt with images (EVisRAG section 6).

Text counts up by one on all three axes. The merged tokens of an image share the time index; row and
column count from the same start; the text after it goes on at the highest index so far plus one:

    token   a  b  vs |  image of 4x6 patches = 2x3 merged tokens | ve c
    time    0  1  2  |  3  3  3  3  3  3                         | 6  7
    row     0  1  2  |  3  3  3  4  4  4                         | 6  7
    column  0  1  2  |  3  4  5  3  4  5                         | 6  7
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from evisrag_jax.prompts.tokenizer import SpecialIds


def merged_grid(grid: tuple[int, int], merge: int = 2) -> tuple[int, int]:
    """Rows and columns of merged tokens for a grid in patches; ValueError if it is no multiple."""
    rows, cols = grid
    if rows <= 0 or cols <= 0 or rows % merge or cols % merge:
        raise ValueError(
            f"image grid {rows}x{cols} patches: both must be positive multiples of {merge}"
        )
    return rows // merge, cols // merge


def mrope_positions(
    ids: Sequence[int] | np.ndarray,
    grids: Sequence[tuple[int, int]],
    special: SpecialIds,
    merge: int = 2,
) -> tuple[Int32[np.ndarray, "3 L"], int]:
    """Positions of an unpadded prompt and the index of the first token after it.

    `ids` has one image-pad token for each merged token; `grids` gives (rows, cols) in patches for
    each image in order. The k-th response token stands at next_position + k on all axes.

    Raises ValueError if image tokens and grids disagree (naming the image), if a video token
    occurs, or if the prompt begins with padding: the engine pads on the right, with lengths (known
    failure B23).
    """
    ids = np.asarray(ids, dtype=np.int64)
    length = len(ids)
    if length and ids[0] == special.endoftext:
        raise ValueError(
            "the prompt is padded on the left; give it unpadded, padding goes to the right"
        )
    if (ids == special.video_pad).any():
        raise ValueError("the prompt holds video tokens; only still images are supported")
    image_places = np.flatnonzero(ids == special.image_pad)
    positions = np.zeros((3, length), np.int32)
    done, start, used = 0, 0, 0  # tokens placed, next index, image tokens used
    for image, grid in enumerate(grids):
        rows, cols = merged_grid(grid, merge)
        count = rows * cols
        places = image_places[used : used + count]
        if len(places) < count or places[-1] - places[0] != count - 1:
            run = _run_length(places)
            raise ValueError(
                f"image {image}: grid {grid} needs {count} tokens in a row, found {run}"
            )
        first = int(places[0])
        positions[:, done:first] = start + np.arange(first - done)
        start += first - done
        row, col = np.divmod(np.arange(count), cols)
        positions[:, first : first + count] = start + np.stack(
            [np.zeros(count, np.int64), row, col]
        )
        start += max(rows, cols)
        done, used = first + count, used + count
    if used != len(image_places):
        extra = len(image_places) - used
        raise ValueError(f"{extra} image tokens more than the {len(grids)} image grids account for")
    positions[:, done:] = start + np.arange(length - done)
    return positions, start + length - done


def _run_length(places: np.ndarray) -> int:
    """Number of consecutive indices at the start of `places`."""
    breaks = np.flatnonzero(np.diff(places) != 1)
    return int(breaks[0]) + 1 if len(breaks) else len(places)
