"""Boxes of the evidence on a page: gold evidence and answers, found among the page's words.

    evidence, answers ──align──► runs of words ──one box a line, padded──► boxes in page pixels

A text that is not on the page, or that stands there in more places than could all be meant, gives
no box: a wrong region is worse for an audit than none. What became of every text is reported.
Source: spec 1.9, region source 2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

from evisrag_jax.pages.align import THRESHOLD, Alignment, WordIndex, align_words, index_words
from evisrag_jax.pages.plan import ResizePlan, VisionLayout
from evisrag_jax.pages.words import PageWords, PixelBox

#: Most places a text may stand in without being called ambiguous.
MAX_PLACES = 3

#: Words share a line when they overlap in height by at least this share of the lower one.
SAME_LINE = 0.5

_PART_ENDS = re.compile(r"(?<=[.!?])\s+|;|\n")
_PART_WORDS = 3  # shorter parts of an evidence text say too little to be looked for alone


@dataclass(frozen=True)
class FoundText:
    """What became of one text.

    Attributes:
        text: as it was looked for; of evidence that is not on the page as a whole, each part.
        kind: where it comes from.
        status: "found"; "missing"; or "ambiguous", on the page in too many places.
        score: of its matches, 0 where it is missing.
        places: how often it stands on the page with that score.
        used: the matches that gave boxes.
    """

    text: str
    kind: Literal["evidence", "answer"]
    status: Literal["found", "missing", "ambiguous"]
    score: float
    places: int
    used: tuple[Alignment, ...] = ()


@dataclass(frozen=True)
class EvidenceBoxes:
    """Boxes [x, y, w, h] in pixels of the page image, and what became of each text.

    Boxes may overlap; none lies inside another.
    """

    boxes: tuple[PixelBox, ...]
    texts: tuple[FoundText, ...]

    @property
    def words(self) -> tuple[int, ...]:
        """Indices of all words used, in reading order."""
        return tuple(sorted({w for text in self.texts for match in text.used for w in match.words}))


def half_token(
    width: int, height: int, plan: ResizePlan, layout: VisionLayout | None = None
) -> tuple[float, float]:
    """Half a merged token in pixels of the page before its resize, across and down.

    A merged token is ``layout.factor`` pixels of the resized page (28 by default), so of a page of
    `width` x `height` it covers factor · width / plan.width by factor · height / plan.height.
    """
    half = (layout or VisionLayout()).factor / 2
    return half * width / plan.width, half * height / plan.height


def word_boxes(
    page: PageWords, indices: Sequence[int], pad: tuple[float | int, float | int] = (0, 0)
) -> tuple[PixelBox, ...]:
    """One box a line around the words of `indices`, padded and cut to the page.

    Words with line numbers are merged by them; words without one join the last line if they overlap
    it in height by `SAME_LINE`, else they start a new one.

    Args:
        page: the page's words.
        indices: words of it, in reading order.
        pad: pixels of the page added on each side, across and down; see `half_token`.

    Returns:
        Boxes [x, y, w, h] in pixels of the page, in order of their first words.
    """
    edges: list[list[float]] = []  # left, top, right, bottom
    by_line: dict[int, list[float]] = {}
    for word in (page.words[index] for index in indices):
        x, y, w, h = word.box
        own = [float(x), float(y), float(x + w), float(y + h)]
        line = by_line.get(word.line) if word.line is not None else edges[-1] if edges else None
        if line is None or (word.line is None and not _level(line, own)):
            edges.append(own)
            if word.line is not None:
                by_line[word.line] = own
        else:
            line[:2] = min(line[0], own[0]), min(line[1], own[1])
            line[2:] = max(line[2], own[2]), max(line[3], own[3])
    boxes = []
    for left, top, right, bottom in edges:
        left, top = max(left - pad[0], 0.0), max(top - pad[1], 0.0)
        right, bottom = min(right + pad[0], page.width), min(bottom + pad[1], page.height)
        boxes.append((left, top, right - left, bottom - top))
    return tuple(boxes)


def _level(a: list[float], b: list[float]) -> bool:
    shared = min(a[3], b[3]) - max(a[1], b[1])
    return shared >= SAME_LINE * min(a[3] - a[1], b[3] - b[1])


def evidence_boxes(
    evidence: str | None,
    answers: Sequence[str],
    page: PageWords,
    *,
    pad: tuple[float | int, float | int] = (0, 0),
    threshold: float | int = THRESHOLD,
    max_places: int = MAX_PLACES,
) -> EvidenceBoxes:
    """Boxes of a page's gold evidence and of the answers: their union.

    Evidence that is not found as a whole is looked for by its sentences. An answer that stands
    inside the evidence found is meant there and nowhere else; else all its places count, if they
    are at most `max_places`.

    Args:
        evidence: the page's gold evidence; None or blank for a page without.
        answers: gold answers, any of which is right.
        page: the page's words in reading order.
        pad: see `word_boxes`.
        threshold: see `align_words`.
        max_places: a text in more places is ambiguous and gives no box.
    """
    index = index_words(page.words)
    texts: list[FoundText] = []
    if evidence and evidence.strip():
        whole = _look_up(evidence, "evidence", index, threshold, max_places)
        parts = [part.strip() for part in _PART_ENDS.split(evidence) if part]
        parts = [part for part in parts if len(part.split()) >= _PART_WORDS]
        if whole.status == "missing" and parts and parts != [evidence.strip()]:
            texts += [_look_up(part, "evidence", index, threshold, max_places) for part in parts]
        else:
            texts.append(whole)
    held = {word for text in texts for match in text.used for word in match.words}
    for answer in dict.fromkeys(answers):
        texts.append(_look_up(answer, "answer", index, threshold, max_places, held))
    boxes: list[PixelBox] = []
    for text in texts:
        for match in text.used:
            boxes += word_boxes(page, match.words, pad)
    return EvidenceBoxes(_outermost(boxes), tuple(texts))


def _look_up(
    text: str,
    kind: Literal["evidence", "answer"],
    index: WordIndex,
    threshold: float | int,
    max_places: int,
    held: Set[int] = frozenset(),
) -> FoundText:
    """Where `text` stands; if some matches lie inside the words `held`, only those are meant."""
    matches = align_words(text, index, threshold=threshold)
    if not matches:
        return FoundText(text, kind, "missing", 0.0, 0)
    inside = tuple(match for match in matches if held.issuperset(match.words))
    used = inside or matches
    score, places = matches[0].score, len(matches)
    if not inside and places > max_places:
        return FoundText(text, kind, "ambiguous", score, places)
    return FoundText(text, kind, "found", score, places, used)


def _outermost(boxes: Sequence[PixelBox]) -> tuple[PixelBox, ...]:
    """The boxes that lie in no other one, each once, in order."""
    unique = list(dict.fromkeys(boxes))
    return tuple(a for a in unique if not any(a != b and _contains(b, a) for b in unique))


def _contains(outer: PixelBox, inner: PixelBox) -> bool:
    return (
        outer[0] <= inner[0]
        and outer[1] <= inner[1]
        and outer[0] + outer[2] >= inner[0] + inner[2]
        and outer[1] + outer[3] >= inner[1] + inner[3]
    )
