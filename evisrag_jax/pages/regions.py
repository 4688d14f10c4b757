"""Regions of pages on the grid of merged tokens, one a 28-px cell of the resized page.

    boxes [x, y, w, h] of the original page ─box_tokens─► Bool[rows, cols] ─ring─► its neighbours
    one such grid an image ─prompt_tokens─► places in the prompt; ─feature_rows─► rows of the features

Source: CED spec 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Integer
from scipy.ndimage import maximum_filter

RULES = ("centre", "overlap")
Grid = Bool[np.ndarray, "_ _"]


def box_tokens(
    boxes: Sequence[Sequence[float | int]] | np.ndarray,
    size: tuple[int, int],
    grid: tuple[int, int],
    *,
    rule: str = "centre",
    merge: int = 2,
) -> Grid:
    """Merged tokens that the boxes of one page select, together.

    Args:
        boxes: [x, y, width, height] in pixels of the original page. Each is scaled to the resized page
            and cut at its edge; one that lies outside or has no area selects nothing.
        size: width and height of the original page, in pixels.
        grid: rows and columns of the resized page in patches.
        rule: "centre", a token with a patch whose centre is in the box; where none is, as in a line of
            text thinner than a patch, the box counts on that axis for the token under its middle.
            "overlap", a token at least half of which is in the box; where none is, those that are half
            in it on one axis and hold the largest part of it on the other.

    Raises ValueError for another rule or boxes that are not four finite numbers each.
    """
    if rule not in RULES:
        raise ValueError(f"token rule {rule!r}; one of {', '.join(RULES)}")
    table = np.asarray(boxes, np.float64).reshape(-1, 4) if len(boxes) else np.zeros((0, 4))
    if not np.isfinite(table).all():
        raise ValueError(f"a box is not four finite numbers: {table.tolist()}")
    rows, cols = grid
    tokens = np.zeros((rows // merge, cols // merge), bool)
    unit = np.array([cols / size[0], rows / size[1]])  # patches a pixel
    for x, y, w, h in table:
        low = np.clip([x, y] * unit, 0, [cols, rows])
        high = np.clip([x + w, y + h] * unit, 0, [cols, rows])
        if (high <= low).any():
            continue
        own = (_centres if rule == "centre" else _overlaps)(low, high, tokens.shape, merge)
        tokens |= own
    return tokens


def _centres(low: np.ndarray, high: np.ndarray, shape: tuple[int, int], merge: int) -> np.ndarray:
    """Tokens with a patch centre in [low, high), in patches (across, down)."""
    hit = []
    for axis, count in ((1, shape[0]), (0, shape[1])):
        centres = np.arange(count * merge) + 0.5
        inside = (centres >= low[axis]) & (centres < high[axis])
        own = inside.reshape(count, merge).any(1)
        if not own.any():
            middle = (low[axis] + high[axis]) / 2 // merge
            own[min(int(middle), count - 1)] = True
        hit.append(own)
    return hit[0][:, None] & hit[1][None]


def _overlaps(low: np.ndarray, high: np.ndarray, shape: tuple[int, int], merge: int) -> np.ndarray:
    """Tokens at least half covered by [low, high), in patches (across, down)."""
    parts = []
    for axis, count in ((1, shape[0]), (0, shape[1])):
        edge = np.arange(count + 1) * merge
        part = np.minimum(edge[1:], high[axis]) - np.maximum(edge[:-1], low[axis])
        parts.append(np.clip(part, 0, None) / merge)
    tokens = parts[0][:, None] * parts[1][None] >= 0.5
    if not tokens.any():
        down, across = (np.where(p.max() >= 0.5, p >= 0.5, p == p.max()) for p in parts)
        tokens = down[:, None] & across[None]
    return tokens


def ring(tokens: Grid, width: int = 2, *, exclude: Grid | None = None) -> Grid:
    """The tokens that stand in for a region: those up to `width` (Chebyshev) from it and not in it, nor
    in `exclude`.

    At the border the ring is cut. Where none is left, all other tokens of the page outside `exclude`,
    then all other tokens, and for a region that is the whole page the page itself. An empty region has
    an empty ring.
    """
    if not tokens.any():
        return np.zeros_like(tokens)
    barred = tokens if exclude is None else tokens | exclude
    near = maximum_filter(tokens, size=2 * width + 1, mode="constant", cval=False) & ~barred
    for choice in (near, ~barred, ~tokens):
        if choice.any():
            return choice
    return np.ones_like(tokens)


def token_iou(a: Grid, b: Grid) -> float:
    """Intersection over union of two token sets; 0 for two empty ones."""
    return float((a & b).sum() / max((a | b).sum(), 1))


def prompt_tokens(
    regions: Sequence[Grid],
    image_slot: Integer[np.ndarray, " L"],
    image_token: Integer[np.ndarray, " L"],
) -> Bool[np.ndarray, " L"]:
    """The regions of a prompt's images as positions of the prompt. ValueError for another number of
    images.

    image_slot, image_token: of each position, the number of its image (-1 for text) and of the token
    within it (`prompts.chat.Prompt`)."""
    count = int(image_slot.max(initial=-1)) + 1
    if len(regions) != count:
        raise ValueError(f"{len(regions)} regions for a prompt of {count} images")
    out = np.zeros(len(image_slot), bool)
    for n, region in enumerate(regions):
        own = image_slot == n
        out[own] = region.reshape(-1)[image_token[own]]
    return out


def feature_rows(
    regions: Sequence[Grid], images: int, tokens: int
) -> Bool[np.ndarray, "images tokens"]:
    """The regions as rows of features padded to `images` pages of `tokens` tokens. ValueError for more."""
    out = np.zeros((images, tokens), bool)
    if len(regions) > images or any(region.size > tokens for region in regions):
        raise ValueError(
            f"{len(regions)} pages of up to {max(r.size for r in regions)} tokens do not fit into "
            f"{images} of {tokens}"
        )
    for n, region in enumerate(regions):
        out[n, : region.size] = region.reshape(-1)
    return out
