"""The paper that synthetic pages are drawn on: it records the exact box of every text and bar.

A box is measured from the pixels that changed when its piece was drawn, so it is the tight extent
of the ink and not an estimate from font metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from evisrag_jax.pages.fonts import BOLD, FONT_NAMES, fit_font

Rect = tuple[int, int, int, int]

_FAMILIES = tuple(name for name in FONT_NAMES if "bold" not in name)


@dataclass(frozen=True)
class Box:
    """One drawn piece of content.

    Attributes:
        rect: [x, y, w, h] in pixels, the tight extent of the ink; x and y count from the page's top
            left corner.
        kind: ``title``, ``header`` (a column's name), ``label`` (a row's, field's or bar's name),
            ``value``, ``bar`` or ``note``.
        label: the row, field or bar the piece belongs to; the text itself for a title or note.
        column: the column it belongs to, in tables.
        value: the value written (``value``) or shown (``bar``).
    """

    rect: Rect
    kind: str
    label: str = ""
    column: str = ""
    value: str = ""

    @property
    def text(self) -> str:
        """What is written in the box; empty for a bar."""
        if self.kind == "value":
            return self.value
        return {"header": self.column, "bar": ""}.get(self.kind, self.label)


@dataclass(frozen=True)
class DrawnPage:
    """A page and all that was drawn on it.

    Attributes:
        image: RGB.
        kind: ``table``, ``form`` or ``chart``.
        title: the page's title.
        boxes: every text and bar, in drawing order.
        rules: rectangles of lines that carry no content (grid lines, underlines, axes).
        paper: colour of everything else.
    """

    image: Image.Image
    kind: str
    title: str
    boxes: tuple[Box, ...]
    rules: tuple[Rect, ...]
    paper: tuple[int, int, int]

    def find(self, label: str, *, column: str = "", kind: str = "value") -> Box:
        """The box of one label (and, in tables, column).

        Raises:
            KeyError: if there is none, naming the labels there are.
        """
        for box in self.boxes:
            if (box.kind, box.label, box.column) == (kind, label, column):
                return box
        known = sorted({(box.label, box.column) for box in self.boxes if box.kind == kind})
        raise KeyError(f"no {kind} box for label {label!r}, column {column!r}; there are {known}")


class Canvas:
    """A page in the making: its style, and drawing that records exact boxes."""

    def __init__(self, rng: np.random.Generator, size: tuple[int, int], title: str):
        tint = 255 - rng.integers(0, 14, 3)
        self.paper = tuple(int(v) for v in tint)
        self.ink = tuple(int(v) for v in rng.integers(0, 80, 3))
        self.line = tuple(int(v) for v in np.repeat(rng.integers(120, 190), 3))
        self.font = str(rng.choice(_FAMILIES))
        self.image = Image.new("RGB", size, self.paper)
        self.draw = ImageDraw.Draw(self.image)
        self.boxes: list[Box] = []
        self.rules: list[Rect] = []
        self.margin = int(rng.integers(30, 52))
        self.left, self.right = self.margin, size[0] - self.margin
        self.bottom = size[1] - self.margin

        largest = int(rng.integers(19, 27))
        bold = BOLD.get(self.font, self.font)
        font = fit_font(bold, [title], self.right - self.left, largest)
        centred = bool(rng.integers(0, 2))
        x = size[0] / 2 if centred else self.left
        self.text(
            (x, self.margin + 14), title, font, "title", "mm" if centred else "lm", label=title
        )
        self.top = self.margin + 14 + 14 + int(rng.integers(16, 40))

    def text(self, xy, text: str, font, kind: str, anchor: str, **place: str) -> None:
        """Write text and record the extent of the pixels it changed."""
        width, height = self.image.size
        left, top, right, bottom = self.draw.textbbox(xy, text, font=font, anchor=anchor)
        if left < 0 or top < 0 or right > width or bottom > height:
            raise ValueError(f"{kind} {text!r} does not fit on a page of {width} x {height} pixels")
        area = (
            max(0, int(left) - 4),
            max(0, int(top) - 4),
            min(width, int(right) + 5),
            min(height, int(bottom) + 5),
        )
        before = self.image.crop(area)
        self.draw.text(xy, text, font=font, fill=self.ink, anchor=anchor)
        changed = ImageChops.difference(before, self.image.crop(area)).getbbox()
        if changed is None:
            raise ValueError(f"{kind} {text!r} leaves no ink")
        x, y = area[0] + changed[0], area[1] + changed[1]
        rect = (x, y, changed[2] - changed[0], changed[3] - changed[1])
        self.record(Box(rect, kind, **place))

    def record(self, box: Box) -> None:
        """Keep a box, which must be clear of everything drawn before."""
        self._refuse_overlap(box.rect, f"{box.kind} {box.text!r}", self.rules)
        self.boxes.append(box)

    def rule(self, x: float | int, y: float | int, width: float | int, height: float | int) -> None:
        """A line without content, as a filled rectangle clear of every box; rules may cross each
        other."""
        rect = (round(x), round(y), round(width), round(height))
        self._refuse_overlap(rect, "a rule", ())
        self._fill(rect, self.line)
        self.rules.append(rect)

    def _refuse_overlap(self, rect: Rect, what: str, rules: Sequence[Rect]) -> None:
        taken = [(box.rect, f"{box.kind} {box.text!r}") for box in self.boxes]
        for other, name in taken + [(rule, "a rule") for rule in rules]:
            if _overlap(rect, other):
                raise ValueError(
                    f"{what} at {rect} overlaps {name} at {other}: use fewer rows or shorter texts"
                )

    def bar(self, rect: Rect, colour, label: str, value: str) -> None:
        """A chart's bar; one of no length is left out."""
        if rect[2] > 0 and rect[3] > 0:
            self._fill(rect, colour)
            self.record(Box(rect, "bar", label=label, value=value))

    def _fill(self, rect: Rect, colour) -> None:
        x, y, width, height = rect
        self.draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)

    def note(self, rng: np.random.Generator, text: str) -> None:
        """A small line at the foot of the page."""
        font = fit_font(self.font, [text], self.right - self.left, int(rng.integers(10, 13)))
        self.text((self.left, self.bottom - 7), text, font, "note", "lm", label=text)
        self.bottom -= 30

    def page(self, kind: str, title: str) -> DrawnPage:
        return DrawnPage(self.image, kind, title, tuple(self.boxes), tuple(self.rules), self.paper)


def _overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]
