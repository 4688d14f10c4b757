"""Perturbed evidence regions: how much of a margin is due to this region and not to any other?

    evidence     the boxes as they are
    random       boxes of the same sizes anywhere on their pages
    iou_…        shifted until their IoU with the evidence falls into the bin
    scale_…      scaled about their centres
    shift_…      moved by that share of their own size

Source: CED spec 1.7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evisrag_jax.rewards.box_rewards import pairwise_iou
from evisrag_jax.runtime.host_random import philox

Box = tuple[float, float, float, float]
IOU_BINS = {
    "iou_0.7": (0.7, 1.0),
    "iou_0.5": (0.5, 0.7),
    "iou_0.3": (0.3, 0.5),
    "iou_0": (0.0, 0.3),
}
SCALES = (0.5, 0.75, 1.25, 1.5, 2.0)
SHIFTS = (0.05, 0.10, 0.20)
NAMES = (
    "evidence",
    "random",
    *IOU_BINS,
    *(f"scale_{s:g}" for s in SCALES),
    *(f"shift_{s:g}" for s in SHIFTS),
)
TRIES = 400


def propose(
    name: str,
    boxes: Sequence[Sequence[Sequence[float | int]]],
    sizes: Sequence[tuple[int, int]],
    sample_id: str,
) -> list[list[Box]] | None:
    """The boxes of each page under a perturbation; None where a bin cannot be reached.

    Args:
        name: one of NAMES.
        boxes: [x, y, w, h] of each page, in pixels of the original page.
        sizes: width and height of each page.
        sample_id: what the draw depends on.
    """
    if name not in NAMES:
        raise ValueError(f"proposal {name!r}; one of {', '.join(NAMES)}")
    rng = philox(0, "proposal", name, sample_id)
    moved = [
        [_moved(name, box, size, rng) for box in own]
        for own, size in zip(boxes, sizes, strict=True)
    ]
    if any(box is None for own in moved for box in own):
        return None
    return moved


def _moved(
    name: str, box: Sequence[float | int], size: tuple[int, int], rng: np.random.Generator
) -> Box | None:
    kind, _, amount = name.partition("_")
    x, y, w, h = (float(v) for v in box)
    if kind == "random":
        free = max(size[0] - w, 0.0), max(size[1] - h, 0.0)
        return float(rng.uniform(0, free[0])), float(rng.uniform(0, free[1])), w, h
    if kind == "iou":
        return _with_iou((x, y, w, h), size, IOU_BINS[name], rng)
    if kind == "scale":
        across, down = w * float(amount), h * float(amount)
        return x + (w - across) / 2, y + (h - down) / 2, across, down
    if kind == "shift":
        right, below = rng.choice([-1.0, 1.0], 2) * float(amount)
        return float(x + right * w), float(y + below * h), w, h
    return x, y, w, h


def box_iou(a: Sequence[float | int], b: Sequence[float | int]) -> float:
    """Intersection over union of two boxes [x, y, w, h]."""
    corners = (np.array([[x, y, x + w, y + h]], np.float64) for x, y, w, h in (a, b))
    return float(pairwise_iou(*corners)[0, 0])


def _with_iou(
    box: Box, size: tuple[int, int], bounds: tuple[float, float], rng: np.random.Generator
) -> Box | None:
    """The box moved, on its page, until its IoU is in the bin (a lower bound of 0 is open: they meet)."""
    x, y, w, h = box
    for _ in range(TRIES):
        dx, dy = rng.uniform(-1, 1, 2) * (w, h)
        one = (float(x + dx), float(y + dy), float(w), float(h))
        on_page = 0 <= one[0] <= size[0] - w and 0 <= one[1] <= size[1] - h
        iou = box_iou(box, one)
        if on_page and max(bounds[0], 1e-9) <= iou and (iou < bounds[1] or bounds[1] == 1):
            return one
    return None
