"""Draws mini-world pages: 140 x 112 px, a grid of 5 x 4 cells of 28 px, one word a cell, exact ink
boxes.

Row 0 holds the title, rows 1-3 one "field value" pair each. Letters come from cached alpha masks,
so a page costs some tens of microseconds of numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8
from PIL import Image, ImageDraw, ImageFont

from evisrag_jax.data.miniworld.world import FIELDS, VALUES

CELL, COLS, ROWS = 28, 5, 4
WIDTH, HEIGHT = COLS * CELL, ROWS * CELL
MARGIN = 1  # px a word stays away from the edge of its cell
FACES = (  # font file and size in px; monospaced words of four letters fit a cell at 10 px only
    ("DejaVuSans.ttf", 10),
    ("DejaVuSans.ttf", 11),
    ("DejaVuSerif.ttf", 10),
    ("DejaVuSerif.ttf", 11),
    ("DejaVuSansMono.ttf", 10),
)
STYLES = ("form", "table", "bars")
_BASELINE = 18
_PAIRS = tuple((f, v) for f in range(COLS) for v in range(f + 1, COLS))
_PAIRS_WITH_ROOM = tuple(p for p in _PAIRS if p[1] < COLS - 1)


@dataclass(frozen=True, slots=True)
class PageSpec:
    """Content and layout of a page; row r of `rows` stands in grid row r + 1.

    `field_cols` and `value_cols` give the grid columns of each row's two words; `face`
    indexes FACES. `leader` draws a dotted line from field to value (style "form").
    """

    title: str
    rows: tuple[tuple[str, int], ...]
    style: str = "form"
    title_col: int = 0
    field_cols: tuple[int, ...] = (0, 0, 0)
    value_cols: tuple[int, ...] = (1, 1, 1)
    face: int = 0
    leader: bool = False

    def value(self, field: str) -> int | None:
        """Value of `field` on this page, or None when the page has no such row."""
        for name, value in self.rows:
            if name == field:
                return value
        return None


@functools.cache
def _font(face: int) -> ImageFont.FreeTypeFont:
    import matplotlib  # carries the DejaVu fonts

    file, size = FACES[face]
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / file
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


@functools.cache
def word_mask(word: str, face: int) -> tuple[Float32[np.ndarray, "h w 1"], int]:
    """Alpha mask float32[h, w, 1] in [0, 1], cropped to the ink, and its top from the baseline.

    Raises ValueError for a word that does not fit a cell.
    """
    canvas = Image.new("L", (8 * CELL, 3 * CELL))
    ImageDraw.Draw(canvas).text((CELL, CELL), word, font=_font(face), fill=255, anchor="ls")
    left, top, right, bottom = canvas.getbbox() or (0, 0, 0, 0)
    room = CELL - 2 * MARGIN
    if not 0 < right - left <= room or bottom - top > room:
        raise ValueError(
            f"word {word!r} takes {right - left} x {bottom - top} px in {FACES[face]}; "
            f"a cell holds {room} x {room}"
        )
    alpha = np.asarray(canvas, dtype=np.float32)[top:bottom, left:right, None] / 255
    alpha.setflags(write=False)
    return alpha, top - CELL


def random_page(
    rng: np.random.Generator,
    entity: str,
    *,
    fields: Sequence[str] = FIELDS,
    must: Sequence[str] = (),
    avoid: Sequence[str] = (),
    values: Mapping[str, int] | None = None,
    style: str | None = None,
) -> PageSpec:
    """Random page of `entity` with three rows in random order.

    Rows of `must` are always there, those of `avoid` never; the rest is drawn from `fields`.
    `values` fixes single values. Raises ValueError where three such rows cannot be found.
    """
    n_rows = ROWS - 1
    pool = [f for f in fields if f not in must and f not in avoid]
    spare = n_rows - len(must)
    if spare < 0 or spare > len(pool):
        raise ValueError(
            f"page of {entity}: {len(must)} given and {len(pool)} free fields "
            f"do not make {n_rows} rows"
        )
    u = iter(rng.random(24).tolist())
    names = list(must)
    for _ in range(spare):
        names.append(pool.pop(int(next(u) * len(pool))))
    for i in range(n_rows - 1, 0, -1):  # Fisher-Yates
        j = int(next(u) * (i + 1))
        names[i], names[j] = names[j], names[i]
    given = values or {}
    draws = [VALUES[int(next(u) * len(VALUES))] for _ in names]
    rows = tuple((name, given.get(name, value)) for name, value in zip(names, draws, strict=True))
    drawn_style = STYLES[int(next(u) * len(STYLES))]
    style = drawn_style if style is None else style
    pairs = _PAIRS_WITH_ROOM if style == "bars" else _PAIRS
    first = pairs[int(next(u) * len(pairs))]
    aligned = next(u) < 0.5
    cols = [first if aligned else pairs[int(next(u) * len(pairs))] for _ in names]
    return PageSpec(
        title=entity,
        rows=rows,
        style=style,
        title_col=int(next(u) * COLS),
        field_cols=tuple(c[0] for c in cols),
        value_cols=tuple(c[1] for c in cols),
        face=int(next(u) * len(FACES)),
        leader=next(u) < 0.4,
    )


def page_words(spec: PageSpec) -> list[tuple[int, int, str]]:
    """(grid row, grid column, word) of every word, the title first, then field and value of each
    row.
    """
    words = [(0, spec.title_col, spec.title)]
    for r, (field, value) in enumerate(spec.rows):
        words.append((r + 1, spec.field_cols[r], field))
        words.append((r + 1, spec.value_cols[r], str(value)))
    return words


def draw_page(
    spec: PageSpec, rng: np.random.Generator
) -> tuple[UInt8[np.ndarray, "112 140 3"], Int32[np.ndarray, "4 5 4"]]:
    """Pixels uint8[112, 140, 3] and ink boxes int32[4, 5, 4] ([x, y, w, h] of each cell's word,
    zeros where blank).

    `rng` gives paper, inks and the place of each word in its cell (up to 3 px sideways, 2 px up or
    down), so equal spec and generator state give equal pixels. Decoration lies under the words and
    is always near the paper's colour.
    """
    u = rng.random(32).tolist()
    light = 222 + 33 * u[0]
    paper = [light - 16 * u[1 + c] for c in range(3)]
    ink = np.array([100 * u[4 + c] for c in range(3)], dtype=np.float32)
    title_ink = (
        np.array([100 * u[7 + c] for c in range(3)], dtype=np.float32) if u[10] < 0.5 else ink
    )
    shade = np.array([p - 12 - 20 * u[11] for p in paper], dtype=np.uint8)
    line = np.array([p - 45 - 35 * u[12] for p in paper], dtype=np.uint8)

    page = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    page.reshape(HEIGHT, -1)[:] = np.tile(np.array(paper, dtype=np.uint8), WIDTH)
    placed = []
    for i, (row, col, word) in enumerate(page_words(spec)):
        alpha, top = word_mask(word, spec.face)
        h, w = alpha.shape[:2]
        x = (CELL - w) // 2 + int(u[13 + i] * 7) - 3
        y = _BASELINE + top + int(u[20 + i] * 5) - 2
        x = col * CELL + min(max(x, MARGIN), CELL - MARGIN - w)
        y = row * CELL + min(max(y, MARGIN), CELL - MARGIN - h)
        placed.append((row, col, x, y, w, h, alpha))
    _decorate(page, spec, placed, shade, line, bordered=u[27] < 0.5)

    boxes = np.zeros((ROWS, COLS, 4), dtype=np.int32)
    for row, col, x, y, w, h, alpha in placed:
        cell = page[y : y + h, x : x + w]
        cell[:] = cell + (((title_ink if row == 0 else ink) - cell) * alpha + 0.5)
        boxes[row, col] = (x, y, w, h)
    return page, boxes


def _decorate(
    page, spec: PageSpec, placed: list, shade: np.ndarray, line: np.ndarray, bordered: bool
) -> None:
    if spec.style == "table":
        for r in range(1, len(spec.rows) + 1, 2):
            page[r * CELL : (r + 1) * CELL] = shade
        for r in range(1, len(spec.rows) + 1):
            page[r * CELL] = line
        if bordered:
            for row, field, value in zip(
                range(1, ROWS), spec.field_cols, spec.value_cols, strict=False
            ):
                page[row * CELL : (row + 1) * CELL, (field + 1) * CELL] = line
                if value != field + 1:
                    page[row * CELL : (row + 1) * CELL, value * CELL] = line
    elif spec.style == "bars":
        starts = [(v + 1) * CELL + 2 for v in spec.value_cols]
        rooms = [WIDTH - 2 - s for s in starts if s < WIDTH - 2]
        if rooms:
            for r, start in enumerate(starts):
                if start < WIDTH - 2:
                    length = max(2, round(min(rooms) * spec.rows[r][1] / 100))
                    page[(r + 1) * CELL + 8 : (r + 1) * CELL + 20, start : start + length] = shade
    elif spec.leader:
        for r in range(len(spec.rows)):
            _, _, x, y, w, h, _ = placed[1 + 2 * r]
            page[y + h - 1, x + w + 3 : placed[2 + 2 * r][2] - 2 : 3] = line


def cell_labels(
    spec: PageSpec,
) -> tuple[Shaped[np.ndarray, "4 5"], Shaped[np.ndarray, "4 5"], Shaped[np.ndarray, "4 5"]]:
    """Labels of the cells, three object arrays [4, 5] with None where there is none.

    words: the word drawn in the cell; row_field: at value cells, the field of their row;
    page_title: at field and value cells, the title of the page.
    """
    words = np.full((ROWS, COLS), None, dtype=object)
    row_field = np.full((ROWS, COLS), None, dtype=object)
    page_title = np.full((ROWS, COLS), None, dtype=object)
    for row, col, word in page_words(spec):
        words[row, col] = word
        if row:
            page_title[row, col] = spec.title
    for r, (field, _) in enumerate(spec.rows):
        row_field[r + 1, spec.value_cols[r]] = field
    return words, row_field, page_title


def row_box(spec: PageSpec, boxes: Int32[np.ndarray, "4 5 4"], field: str) -> list[int]:
    """[x, y, w, h] around the ink of `field` and its value (pixels of the page); ValueError if
    there is no such row.
    """
    for r, (name, _) in enumerate(spec.rows):
        if name == field:
            pair = boxes[r + 1, [spec.field_cols[r], spec.value_cols[r]]]
            x, y = pair[:, 0].min(), pair[:, 1].min()
            right, bottom = (pair[:, 0] + pair[:, 2]).max(), (pair[:, 1] + pair[:, 3]).max()
            return [int(x), int(y), int(right - x), int(bottom - y)]
    raise ValueError(f"page of {spec.title} has no row {field!r}")
