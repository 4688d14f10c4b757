"""Words of a page image with their boxes, and the files they come from: JSON, JSONL, Tesseract TSV.

    {"image": "pages/a.png", "width": 620, "height": 800,
     "words": [{"text": "Revenue", "box": [x, y, w, h], "line": 0}, ...]}

One such object a line (``.jsonl``), or one or a list of them (``.json``). Boxes are in pixels of the
image, whose size is stated so that a file in other units (points, or [x0, y0, x1, y1]) is refused
and not used. Words stand in reading order; ``line`` is optional. An entry of several words, an OCR
line, is split at its spaces. For the text layer of a PDF see ``pdf_words``.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evisrag_jax.pages.symbols import join_groups

#: x, y, width, height in pixels, origin at the top left.
PixelBox = tuple[float | int, float | int, float | int, float | int]

#: Most words a page may have; more is a file that is not about a page.
MAX_WORDS = 50_000

#: How far a box may reach over the page's edge before it is refused, as a share of the longer side;
#: recognisers overshoot by a pixel or two. What lies outside is cut off.
SLACK = 0.01

#: Width of a digit, of the height of its box, above which digits are set apart.
_WIDEST_DIGIT = 0.8

_TSV_COLUMNS = "level page_num block_num par_num line_num word_num left top width height conf text"
_TSV_PAGE, _TSV_WORD = "1", "5"
_PIECE = re.compile("[^ \\t\\r\\n\\f\\v\\u3000]+")


class WordsError(ValueError):
    """A word file, or a PDF's text layer, that cannot be used; names file, record and limit.

    Attributes:
        source: the file.
        place: line, record or page in it, or "".
        reason: what is wrong and what is expected.
    """

    def __init__(self, source: str | os.PathLike, place: str, reason: str):
        self.source, self.place, self.reason = str(source), place, reason
        super().__init__(": ".join(part for part in (self.source, place, reason) if part))

    def __reduce__(self):
        return type(self), (self.source, self.place, self.reason)


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a page.

    Attributes:
        text: as written, without white space other than the spaces inside a number.
        box: [x, y, w, h] in pixels of the page image.
        line: number of its line on the page, or None where the source knows no lines.
    """

    text: str
    box: PixelBox
    line: int | None = None


@dataclass(frozen=True)
class PageWords:
    """The words of one page image in reading order, and the image's size in pixels."""

    words: tuple[Word, ...]
    width: int
    height: int

    def scaled(self, width: int, height: int) -> PageWords:
        """The same words on a copy of the image of another size."""
        across, down = width / self.width, height / self.height
        moved = (
            Word(word.text, (x * across, y * down, w * across, h * down), word.line)
            for word in self.words
            for x, y, w, h in (word.box,)
        )
        return PageWords(tuple(moved), width, height)


def read_words(
    path: str | os.PathLike, *, root: str | os.PathLike | None = None
) -> dict[str, PageWords]:
    """The pages of a ``.json`` or ``.jsonl`` word file by absolute image path, as records have it.

    Args:
        path: the file; see the head of this module.
        root: folder that relative image paths start at, by default the file's own.

    Raises:
        WordsError: for anything but the format above, an image named twice, more than `MAX_WORDS`
            words a page, or a box off the page by more than `SLACK`.
    """
    path = Path(path)
    base = Path(path.parent if root is None else root).absolute()
    pages: dict[str, PageWords] = {}
    for place, row in _rows(path):
        if not isinstance(row, Mapping):
            raise WordsError(path, place, f"is a {type(row).__name__}, not an object of fields")
        image = row.get("image")
        if not isinstance(image, str) or not image.strip():
            raise WordsError(path, place, f"field 'image': is {image!r}; write the image's path")
        key = os.path.normpath(base / image)
        if key in pages:
            raise WordsError(path, place, f"field 'image': {image!r} is used by an earlier record")
        pages[key] = _page(row, path, f"{place}: image {image!r}")
    return pages


def _rows(path: Path) -> list[tuple[str, object]]:
    """(place, value) of every record of the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WordsError(path, "", f"is not UTF-8 text ({error})") from None
    if path.suffix.lower() == ".jsonl":
        lines = enumerate(text.split("\n"), start=1)
        return [(f"line {n}", _json(line, path, f"line {n}")) for n, line in lines if line.strip()]
    if path.suffix.lower() != ".json":
        raise WordsError(path, "", "is neither .json nor .jsonl; for Tesseract: read_tesseract")
    value = _json(text, path, "")
    rows = value if isinstance(value, list) else [value]
    return [(f"record {n}", row) for n, row in enumerate(rows, start=1)]


def _json(text: str, path: Path, place: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WordsError(path, place, f"not JSON: {error}") from None


def _page(row: Mapping, path: Path, place: str) -> PageWords:
    size = []
    for side in ("width", "height"):
        value = row.get(side)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            reason = f"field {side!r}: is {value!r}; write the image's {side} in pixels"
            raise WordsError(path, place, reason)
        size.append(value)
    entries = row.get("words")
    if not isinstance(entries, list):
        reason = f"field 'words': is {type(entries).__name__}; write a list of {{text, box}}"
        raise WordsError(path, place, reason)
    words: list[Word] = []
    for number, entry in enumerate(entries, start=1):
        where = f"{place}: word {number}"
        if not isinstance(entry, Mapping):
            raise WordsError(path, where, "is not an object with 'text' and 'box'")
        text, line = entry.get("text"), entry.get("line")
        if not isinstance(text, str):
            raise WordsError(path, where, f"field 'text': is {text!r}, not a string")
        if line is not None and (not isinstance(line, int) or isinstance(line, bool)):
            raise WordsError(path, where, f"field 'line': is {line!r}; write a whole number")
        words += split_entry(text, checked_box(entry.get("box"), *size, path, where), line)
    return checked_page(words, *size, path, place)


def checked_page(
    words: list[Word], width: int, height: int, source: str | os.PathLike, place: str
) -> PageWords:
    """A page of these words. WordsError above `MAX_WORDS`."""
    if len(words) > MAX_WORDS:
        raise WordsError(source, place, f"has {len(words)} words; the limit is {MAX_WORDS}")
    return PageWords(tuple(words), width, height)


def checked_box(
    box: object, width: int, height: int, source: str | os.PathLike, place: str
) -> PixelBox:
    """[x, y, w, h] as numbers, cut to the page of `width` x `height` pixels.

    Raises:
        WordsError: for anything but four finite numbers with w and h above 0, and for a box that
            lies outside the page or leaves it by more than `SLACK`.
    """
    numbers = isinstance(box, list | tuple) and len(box) == 4
    for side in box if numbers else ():
        numbers &= isinstance(side, int | float) and not isinstance(side, bool)
        numbers = numbers and math.isfinite(side)
    if not numbers:
        reason = f"field 'box': is {box!r}; write [x, y, width, height] in pixels"
        raise WordsError(source, place, reason)
    x, y, w, h = box
    if w <= 0 or h <= 0:
        raise WordsError(source, place, f"field 'box': {list(box)} has no width or no height")
    slack = SLACK * max(width, height)
    left, top, right, bottom = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    over = max(-x, -y, x + w - width, y + h - height)
    if over > slack or right <= left or bottom <= top:
        reason = (
            f"field 'box': {list(box)} leaves the page of {width} x {height} pixels by "
            f"{over:g}, the limit is {slack:g}; boxes are [x, y, width, height] in pixels"
        )
        raise WordsError(source, place, reason)
    return (left, top, right - left, bottom - top)


def split_entry(text: str, box: PixelBox, line: int | None) -> list[Word]:
    """The words of an entry; several share its box in proportion to their letters.

    Text taller than wide stands upright on the page, where that would be wrong: its words keep the
    whole box. No-break and thin spaces do not split: they may belong to a number. Nor do the spaces
    of an entry that is one number in groups of three digits (10 085 207), unless it is so wide that
    it must be several numbers beside each other.
    """
    x, y, w, h = box
    if w <= _WIDEST_DIGIT * h * len(text):
        text = join_groups(text.strip())
    pieces = [match for match in _PIECE.finditer(text) if match.group().strip()]
    if len(pieces) < 2 or h > w:
        return [Word(piece.group(), box, line) for piece in pieces]
    step = w / len(text)
    return [
        Word(piece.group(), (x + piece.start() * step, y, len(piece.group()) * step, h), line)
        for piece in pieces
    ]


def read_tesseract(path: str | os.PathLike) -> tuple[PageWords, ...]:
    """The pages of a Tesseract TSV file (``tesseract page.png page tsv``), in order.

    Rows of level 1 give a page's size, rows of level 5 its words; a blank text or a confidence
    below 0 is no word. Lines are Tesseract's (page, block, paragraph, line).

    Raises:
        WordsError: for other columns, a word before its page, or a bad box.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (UnicodeDecodeError, csv.Error) as error:
        raise WordsError(path, "", f"is not a TSV file in UTF-8 ({error})") from None
    columns = _TSV_COLUMNS.split()
    if not rows or rows[0] != columns:
        raise WordsError(path, "line 1", f"is not the header {_TSV_COLUMNS!r} with tabs")
    sizes: dict[str, tuple[int, int]] = {}
    found: dict[str, list[Word]] = {}
    lines: dict[tuple[str, ...], int] = {}
    for number, cells in enumerate(rows[1:], start=2):
        place = f"line {number}"
        if len(cells) == len(columns) - 1:  # rows that are no words may end before the text
            cells = [*cells, ""]
        if len(cells) != len(columns):
            raise WordsError(path, place, f"has {len(cells)} columns, not {len(columns)}")
        level, page, text = cells[0], cells[1], cells[11].strip()
        if level not in (_TSV_PAGE, _TSV_WORD):
            continue
        try:
            box, confidence = [int(cell) for cell in cells[6:10]], float(cells[10])
        except ValueError:
            reason = f"left, top, width, height, conf are {cells[6:11]}, not numbers"
            raise WordsError(path, place, reason) from None
        if level == _TSV_PAGE:
            if page in sizes or min(box[2:]) < 1:
                raise WordsError(path, place, f"page {page} is there twice or has no size")
            sizes[page], found[page] = (box[2], box[3]), []
        elif page not in sizes:
            raise WordsError(path, place, f"a word of page {page}, whose level-1 row is missing")
        elif text and confidence >= 0:
            line = lines.setdefault(tuple(cells[1:5]), len(lines))
            found[page] += split_entry(text, checked_box(box, *sizes[page], path, place), line)
    return tuple(checked_page(found[p], *sizes[p], path, f"page {p}") for p in sizes)
