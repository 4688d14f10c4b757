"""Control regions: as many tokens as the evidence, elsewhere, the same for every response of a group.

A control is the evidence's own shape moved over its page. Where it fits nowhere, or as too many places
were tried, it is a random set of as many tokens beside the evidence. The draw depends on the sample's id
alone. Source: CED spec 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from evisrag_jax.pages.regions import Grid, token_iou
from evisrag_jax.rewards.ced.config import RegionConfig
from evisrag_jax.runtime.host_random import philox

INK_BAND = 0.25  # relative difference of ink that still counts as equally dark

Ink = Float[np.ndarray, "_ _"]


@dataclass(frozen=True)
class Controls:
    """regions: K lists with a grid an image.  scattered: of those, which hold a random set of tokens.
    degenerate: the evidence is over half of a page, so its controls are smaller."""

    regions: tuple[tuple[Grid, ...], ...]
    scattered: tuple[bool, ...]
    degenerate: bool


def draw_controls(
    evidence: Sequence[Grid],
    sample_id: str,
    config: RegionConfig,
    *,
    seed: int = 0,
    ink: Sequence[Ink] | None = None,
) -> Controls:
    """K controls of a prompt's evidence, page by page with the same number of tokens.

    Args:
        evidence: the evidence of each image; all empty gives no controls.
        sample_id: of the record, not of a response: a group shares its controls.
        ink: share of dark pixels of each token, needed for `match_ink`.

    Raises ValueError where `match_ink` has no ink to match.
    """
    if config.match_ink and ink is None:
        raise ValueError(f"record {sample_id}: match_ink needs the ink of its pages")
    if not any(region.any() for region in evidence):
        return Controls((), (), False)
    rng = philox(seed, "ced", sample_id)
    drawn: list[tuple[Grid, ...]] = []
    scattered = []
    for k in range(config.controls):
        last = k == config.controls - 1
        other = _on_another_page(evidence, rng) if config.other_page and last else None
        if other is not None:
            drawn.append(other)
            scattered.append(False)
            continue
        regions, loose = [], False
        for n, own in enumerate(evidence):
            if not own.any():
                regions.append(np.zeros_like(own))
                continue
            before = [one[n] for one in drawn]
            one = _moved(own, before, rng, config, ink[n] if config.match_ink else None)
            if one is None:
                one, loose = _scattered(own, rng, ink[n] if config.match_ink else None), True
            regions.append(one)
        drawn.append(tuple(regions))
        scattered.append(loose)
    degenerate = any(2 * own.sum() > own.size for own in evidence)
    return Controls(tuple(drawn), tuple(scattered), degenerate)


def _moved(
    own: Grid,
    before: Sequence[Grid],
    rng: np.random.Generator,
    config: RegionConfig,
    ink: Ink | None,
) -> Grid | None:
    """The evidence's shape at a random place, unlike the controls before it while there is a choice."""
    rows, cols = np.nonzero(own)
    top, left = rows.min(), cols.min()
    free = (own.shape[0] - (rows.max() - top), own.shape[1] - (cols.max() - left))
    spare = None
    for _ in range(config.tries):
        down, across = rng.integers(free[0]), rng.integers(free[1])
        one = np.zeros_like(own)
        one[rows - top + down, cols - left + across] = True
        if token_iou(own, one) > config.max_iou or not _as_dark(one, own, ink):
            continue
        if not any((one == other).all() for other in before):
            return one
        spare = one
    return spare


def _as_dark(one: Grid, own: Grid, ink: Ink | None) -> bool:
    if ink is None:
        return True
    wanted = ink[own].mean()
    return bool(abs(ink[one].mean() - wanted) <= INK_BAND * wanted)


def _scattered(own: Grid, rng: np.random.Generator, ink: Ink | None) -> Grid:
    """Random tokens outside the evidence, as many as it has or as there are; with ink, of those nearest
    to its darkness, twice as many as needed."""
    outside = np.flatnonzero(~own)
    count = min(int(own.sum()), len(outside))
    if ink is not None:
        gap = np.abs(ink.reshape(-1)[outside] - ink[own].mean())
        outside = outside[np.argsort(gap, kind="stable")[: 2 * count]]
    one = np.zeros(own.size, bool)
    one[rng.permutation(outside)[:count]] = True
    return one.reshape(own.shape)


def _on_another_page(evidence: Sequence[Grid], rng: np.random.Generator) -> tuple[Grid, ...] | None:
    """As many tokens as the evidence has, one rectangle's rows first, on a page without evidence that
    has so many; None without such a page."""
    count = int(sum(own.sum() for own in evidence))
    pages = [n for n, own in enumerate(evidence) if not own.any() and own.size >= count]
    if not pages:
        return None
    page = pages[rng.integers(len(pages))]
    rows, cols = evidence[page].shape
    width = min(cols, max(int(own.any(0).sum()) for own in evidence))
    height = -(-count // width)
    if height > rows:
        width, height = cols, -(-count // cols)
    top, left = rng.integers(rows - height + 1), rng.integers(cols - width + 1)
    regions = [np.zeros_like(own) for own in evidence]
    block = np.arange(height * width).reshape(height, width) < count
    regions[page][top : top + height, left : left + width] = block
    return tuple(regions)
