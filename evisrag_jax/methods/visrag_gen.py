"""VisRAG-Gen's two ways to show several pages to a model made for one (EVisRAG spec 12).

page_concat         all pages as one picture, in rank order, scaled to the largest height or width
weighted_selection  a call a page; the answer of the page with the largest
                    softmax(retrieval scores)_i · exp(mean log-prob of answer i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from PIL import Image

from evisrag_jax.data.schema import Record
from evisrag_jax.methods.base import MethodError, Prediction, predict
from evisrag_jax.methods.one_call import OneCall, visual_tokens
from evisrag_jax.pages.decode import load_page
from evisrag_jax.pages.patches import PagePatches, make_patches
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Request
from evisrag_jax.training.page_cache import PageCache

AXES = ("horizontal", "vertical")


@dataclass(frozen=True)
class PageConcat(OneCall):
    """`OneCall` over one picture of all pages.  axis: "horizontal" (side by side) or "vertical"."""

    axis: str = "horizontal"

    def __post_init__(self):
        super().__post_init__()
        if self.axis not in AXES:
            raise ValueError(f"axis={self.axis!r}; one of {', '.join(AXES)}")
        if self.features is not None:
            raise ValueError("features are those of whole page files, not of pages put together")

    def shown(
        self, images: Sequence[str], engine: Engine, pages: PageCache
    ) -> tuple[PagePatches, ...]:
        """The pages as one; none for a record without pages."""
        if not images:
            return ()
        opened = [load_page(path, exif_transpose=self.exif_transpose) for path in images]
        whole = concat_pages(opened, self.axis)
        return (make_patches(whole, engine.layout, self.budget, name=" + ".join(images)),)


def concat_pages(pages: Sequence[Image.Image], axis: str = "horizontal") -> Image.Image:
    """Pages pasted in order, each scaled (bicubic) to the largest height, or width if vertical.

    The other side is int(side * factor), as released.
    """
    sideways = axis == "horizontal"
    longest = max(page.height if sideways else page.width for page in pages)
    scaled = []
    for page in pages:
        factor = longest / (page.height if sideways else page.width)
        size = (
            (int(page.width * factor), longest)
            if sideways
            else (longest, int(page.height * factor))
        )
        scaled.append(page.resize(size, Image.Resampling.BICUBIC))
    if sideways:
        canvas = Image.new("RGB", (sum(page.width for page in scaled), longest))
    else:
        canvas = Image.new("RGB", (longest, sum(page.height for page in scaled)))
    at = 0
    for page in scaled:
        canvas.paste(page, (at, 0) if sideways else (0, at))
        at += page.width if sideways else page.height
    return canvas


@dataclass(frozen=True)
class WeightedSelection:
    """An answer a page, and the best of them.

    base: settings of each call, its answers greedy (released: three beams).  Records need `scores`.
    """

    base: OneCall
    name: str = "weighted_selection"

    def __call__(self, records: Sequence[Record], engine: Engine) -> list[Prediction]:
        """One prediction a record, in order; MethodError also for a record without retrieval scores."""
        chunk = self.base.chunk or max(bucket.prompts for bucket in engine.buckets.buckets)
        out: list[Prediction] = []
        for first in range(0, len(records), chunk):
            out += self._answer(records[first : first + chunk], engine)
        return out

    def _answer(self, records: Sequence[Record], engine: Engine) -> list[Prediction]:
        pages = self.base.pages or PageCache()
        requests: list[Request] = []
        spans: list[tuple[int, int] | MethodError] = []
        for record in records:
            try:
                mine = self._requests(record, engine, pages)
                spans.append((len(requests), len(requests) + len(mine)))
                requests += mine
            except MethodError as error:
                spans.append(error)
        done = engine.generate(requests, self.base.sampling, seed=self.base.seed)
        out = []
        for record, span in zip(records, spans, strict=True):
            if isinstance(span, MethodError):
                out.append(self.base.refuse(span))
                continue
            mine = [group[0] for group in done[slice(*span)]]
            likely = [float(one.logp.mean()) if one.length else -np.inf for one in mine]
            best = select(np.array(record.scores[: len(mine)]), np.array(likely))
            out.append(
                predict(
                    record,
                    mine[best],
                    whole=self.base.whole,
                    calls=len(mine),
                    generated=sum(one.length for one in mine),
                    visual_tokens=sum(map(visual_tokens, requests[slice(*span)])),
                )
            )
        return out

    def _requests(self, record: Record, engine: Engine, pages: PageCache) -> list[Request]:
        images = record.images[: self.base.max_pages]
        if not images:
            raise MethodError(record.id, "weighted selection needs at least one page")
        if record.scores is None:
            raise MethodError(
                record.id, "weighted selection needs the retrieval score of each page"
            )
        return [
            self.base.request(record, engine, pages, images=(image,), step=f"page-{i}")
            for i, image in enumerate(images, 1)
        ]


def select(scores: Float[np.ndarray, " k"], sequence: Float[np.ndarray, " k"]) -> int:
    """argmax of softmax(scores) · exp(sequence), the first of equals.

    scores: raw retrieval scores, no temperature.  sequence: length-normalised log-prob of each answer.
    """
    weights = np.exp(scores - scores.max())
    return int(np.argmax(weights / weights.sum() * np.exp(sequence)))
