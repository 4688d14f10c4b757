"""Boxes in a response and in a record: two ways to write them, read into corners in original pixels.

units     written as                                            a box is
pixels    [[x1, y1, x2, y2], ...] or                            corners in pixels of the resized page,
          [{"bbox_2d": [x1, y1, x2, y2], "label": "..."}]       as Qwen2.5-VL writes them
cells     2 3 , 4 1      column and row, counted from 1         one merged token (28 x 28 resized pixels)

The list stands in the answer section (or is the whole response), bare or in a ```json block. Of several
pages each has a line that begins with its number,

    [1]: 2 3 , 3 3
    [2]: no relevant information

or, in JSON, a box has a key "page". A box without a page is on the only page there is; of several pages
it is on none and matches nothing. Points are [x, y] or {"point_2d": [x, y]}, and in cells the middle of
one. No box is [], none or "no relevant information". Whatever else stands there makes the whole list
malformed: it is read as None, and never raises.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from evisrag_jax.data.schema import Record
from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.patches import PagePatches
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.pages.regions import box_tokens
from evisrag_jax.prompts.sections import NO_EVIDENCE
from evisrag_jax.rewards import text as matching
from evisrag_jax.rewards.gold import GoldError

UNITS = ("pixels", "cells")

_MARK = re.compile(r"^[^\S\n]*\[([0-9]{1,4})\]:", re.MULTILINE)
_FENCE = re.compile(r"```(?:json)?[^\S\n]*\n?(.*?)```", re.DOTALL)
_CELL = re.compile(r"\s*([0-9]{1,4})\s+([0-9]{1,4})\s*")
_NOTHING = ("[]", "none", NO_EVIDENCE)
_KEYS = {4: "bbox_2d", 2: "point_2d"}  # by numbers of an item


@dataclass(frozen=True)
class Frame:
    """How a page stands in the prompt.

    size: width and height in original pixels.  grid: rows and columns in patches.  patch: side of a
    patch in resized pixels.  merge: side of a merged token in patches.
    """

    size: tuple[int, int]
    grid: tuple[int, int]
    patch: int = 14
    merge: int = 2

    @classmethod
    def of(cls, page: PagePatches, layout: VisionLayout) -> Frame:
        """The frame of a prepared page."""
        return cls(page.size, page.grid, layout.patch, layout.merge)

    @property
    def scale(self) -> Float64[np.ndarray, " 2"]:
        """Original pixels of a resized one, across and down."""
        rows, cols = self.grid
        return np.array(self.size, np.float64) / (cols * self.patch, rows * self.patch)

    @property
    def cell(self) -> int:
        """Side of a merged token in resized pixels."""
        return self.patch * self.merge


@dataclass(frozen=True, eq=False)
class PageBoxes:
    """Boxes in their order. page: from 1, 0 for none.  boxes: x1, y1, x2, y2 in original pixels."""

    page: Int64[np.ndarray, " N"]
    boxes: Float64[np.ndarray, "N 4"]

    def __len__(self) -> int:
        return len(self.page)


@dataclass(frozen=True, eq=False)
class PagePoints:
    """Points in their order. page: from 1, 0 for none.  points: x, y in original pixels."""

    page: Int64[np.ndarray, " N"]
    points: Float64[np.ndarray, "N 2"]

    def __len__(self) -> int:
        return len(self.page)


@dataclass(frozen=True, eq=False)
class BoxGold:
    """What boxes are compared with: a record's own, and the frames of its pages."""

    boxes: PageBoxes
    frames: tuple[Frame, ...]


def answer_region(response: str, which: str = "first", *, tagged: bool = False) -> str | None:
    """The text that is read: the answer section, or the whole response where it has none.

    which: of several sections the "first", the "last", or none at all ("single").
    tagged: without both tags there is no answer.
    """
    if "<answer>" not in response or "</answer>" not in response:
        return None if tagged or "<answer>" in response else response
    if which == "single" and response.count("<answer>") != 1:
        return None
    return matching.extract_tag("answer", response, "last" if which == "last" else "first")


def parse_boxes(
    text: str | None, frames: Sequence[Frame], units: str = "pixels"
) -> PageBoxes | None:
    """The boxes of an answer (`answer_region`); None for a malformed list and for None.

    Boxes that are empty or lie outside their page stay, and overlap with nothing.
    """
    found = _read(text, units, 4)
    if found is None:
        return None
    pages, rows = [], []
    for page, numbers in found:
        page, frame = _frame(page, frames)
        if units == "cells":
            column, row = numbers
            numbers = (column - 1, row - 1, column, row)
        side = frame.cell if units == "cells" else 1
        pages.append(page)
        rows.append(np.array(numbers) * side * np.tile(frame.scale, 2))
    return PageBoxes(np.array(pages, np.int64), np.array(rows, np.float64).reshape(-1, 4))


def parse_points(
    text: str | None, frames: Sequence[Frame], units: str = "pixels"
) -> PagePoints | None:
    """The points of an answer, as `parse_boxes`."""
    found = _read(text, units, 2)
    if found is None:
        return None
    pages, rows = [], []
    for page, numbers in found:
        page, frame = _frame(page, frames)
        point = np.array(numbers)
        pages.append(page)
        rows.append(((point - 0.5) * frame.cell if units == "cells" else point) * frame.scale)
    return PagePoints(np.array(pages, np.int64), np.array(rows, np.float64).reshape(-1, 2))


def _frame(page: int, frames: Sequence[Frame]) -> tuple[int, Frame]:
    """Page and frame of an item; a page that the prompt lacks has a frame all the same, and no gold."""
    page = page or (1 if len(frames) == 1 else 0)
    return page, frames[page - 1] if 1 <= page <= len(frames) else Frame((28, 28), (2, 2))


def _read(text: str | None, units: str, width: int) -> list[tuple[int, tuple[float, ...]]] | None:
    """(page or 0, numbers) of each item."""
    if units not in UNITS:
        raise ValueError(f"units={units!r}; one of {', '.join(UNITS)}")
    if text is None:
        return None
    marks = list(_MARK.finditer(text))
    if marks and text[: marks[0].start()].strip():
        return None
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    parts = [(int(m[1]), text[m.end() : end]) for m, end in zip(marks, ends, strict=False)]
    found: list[tuple[int, tuple[float, ...]]] = []
    for page, part in parts or [(0, text)]:
        if part.strip() in _NOTHING:
            continue
        items = _cells(part) if units == "cells" else _json_items(part, width)
        if items is None:
            return None
        found += [(page or own, numbers) for own, numbers in items]
    return found


def _cells(part: str) -> list[tuple[int, tuple[float, ...]]] | None:
    pairs = [_CELL.fullmatch(pair) for pair in part.split(",")]
    return None if None in pairs else [(0, (float(p[1]), float(p[2]))) for p in pairs]


def _json_items(part: str, width: int) -> list[tuple[int, tuple[float, ...]]] | None:
    fence = _FENCE.search(part)
    try:
        value = json.loads(fence[1] if fence else part)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or _numbers(value, width):
        value = [value]
    items = [_item(one, width) for one in value]
    return None if None in items else items


def _item(value: object, width: int) -> tuple[int, tuple[float, ...]] | None:
    page: object = 0
    if isinstance(value, dict):
        page, value = value.get("page", 0), value.get(_KEYS[width])
        if isinstance(page, bool) or not isinstance(page, int) or page < 0 or page > 9999:
            return None
    numbers = _numbers(value, width)
    return None if numbers is None else (page, numbers)


def _numbers(value: object, width: int) -> tuple[float, ...] | None:
    if not isinstance(value, list) or len(value) != width:
        return None
    if any(isinstance(n, bool) or not isinstance(n, int | float) for n in value):
        return None
    # Far beyond any page, and far from where products overflow.
    return tuple(map(float, value)) if all(abs(n) < 1e9 for n in value) else None


def record_boxes(record: Record) -> PageBoxes:
    """The boxes of a record in original pixels; GoldError, naming it, where it has no field `boxes`.

    A record whose every list is empty says that there is nothing to find.
    """
    if record.boxes is None:
        raise GoldError(
            f"record {record.id!r}: has no boxes, which this reward compares with; write boxes, a list of "
            "[x, y, w, h] an image"
        )
    if len(record.boxes) != len(record.images):
        raise GoldError(
            f"record {record.id!r}: boxes has {len(record.boxes)} entries for "
            f"{len(record.images)} image(s)"
        )
    pages = [i for i, boxes in enumerate(record.boxes, start=1) for _ in boxes]
    corners = [(x, y, x + w, y + h) for boxes in record.boxes for x, y, w, h in boxes]
    return PageBoxes(np.array(pages, np.int64), np.array(corners, np.float64).reshape(-1, 4))


def gold_boxes(record: Record, frames: Sequence[Frame], units: str = "pixels") -> BoxGold:
    """A record's boxes, clipped to their pages; in cells every merged token that they cover, once.

    They count in the picture as decoded: of a page that its EXIF orientation turns, in the upright one.

    Raises GoldError (`record_boxes`), and PageError for a box that lies outside its page.
    """
    found = record_boxes(record)
    corners = found.boxes.copy()
    for page, box in zip(found.page, corners, strict=True):
        width, height = frames[page - 1].size
        given = box.tolist()
        box[:] = np.clip(box, 0, (width, height, width, height))
        if box[0] >= box[2] or box[1] >= box[3]:
            raise PageError(
                record.images[page - 1],
                f"record {record.id!r}: the box with corners {given} lies outside its {width} x {height} "
                "pixels",
                "box",
            )
    if units == "pixels":
        return BoxGold(PageBoxes(found.page, corners), tuple(frames))
    cells = {
        (int(page), row, column)
        for page, box in zip(found.page, corners, strict=True)
        for column, row in covered_cells(box, frames[page - 1])
    }
    lines = "\n".join(f"[{page}]: {column} {row}" for page, row, column in sorted(cells))
    return BoxGold(parse_boxes(lines or "none", frames, "cells"), tuple(frames))


def covered_cells(box: Float64[np.ndarray, " 4"], frame: Frame) -> list[tuple[int, int]]:
    """(column, row) from 1 of the merged tokens that a box [x1, y1, x2, y2] selects, in reading order
    (rule "centre" of `pages.regions.box_tokens`)."""
    x1, y1, x2, y2 = box.tolist()
    tokens = box_tokens([[x1, y1, x2 - x1, y2 - y1]], frame.size, frame.grid, merge=frame.merge)
    return [(int(column) + 1, int(row) + 1) for row, column in np.argwhere(tokens)]


def write_boxes(gold: BoxGold, units: str = "pixels") -> str:
    """The answer that `parse_boxes` reads as these boxes (pixels: rounded to whole resized ones), say, as
    a target of fine-tuning; several pages have a line each."""
    write = _write_cells if units == "cells" else _write_pixels
    lines = []
    for page, frame in enumerate(gold.frames, start=1):
        own = gold.boxes.boxes[gold.boxes.page == page]
        lines.append(write(own / np.tile(frame.scale, 2), frame))
    if len(lines) == 1:
        return lines[0]
    return "\n".join(f"[{page}]: {line}" for page, line in enumerate(lines, start=1))


def _write_pixels(boxes: Float64[np.ndarray, "N 4"], frame: Frame) -> str:
    return json.dumps([[math.floor(n + 0.5) for n in box] for box in boxes])


def _write_cells(boxes: Float64[np.ndarray, "N 4"], frame: Frame) -> str:
    middles = [((box[:2] + box[2:]) / 2 // frame.cell).astype(int) + 1 for box in boxes]
    return " , ".join(f"{column} {row}" for column, row in middles) or NO_EVIDENCE
