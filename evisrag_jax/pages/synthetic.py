"""Drawn document pages with exact boxes: tables, forms and bar charts.

Two boxes never overlap: a layout that would let them raises. A page is a function of its content
and of the generator it is given, so drawn pages are ground truth for questions, evidence boxes and
page retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evisrag_jax.pages.canvas import Canvas, DrawnPage
from evisrag_jax.pages.fonts import BOLD, fit_font, load_font

PORTRAIT = (620, 800)
LANDSCAPE = (800, 620)
KINDS = ("table", "form", "chart")

_BAR_COLOURS = ((54, 96, 146), (190, 92, 44), (70, 128, 72), (128, 80, 140), (96, 96, 96))


def page_generator(seed: int, *place: int) -> np.random.Generator:
    """The Philox generator of one page: equal for equal (seed, place), independent otherwise."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *place])))


def _names_differ(names: Sequence[str], what: str) -> None:
    if len(names) == 0:
        raise ValueError(f"a page needs at least one {what}")
    doubled = sorted({name for name in names if list(names).count(name) > 1})
    if doubled:
        raise ValueError(f"{what} names must differ, doubled: {doubled}")


def draw_table(
    rng: np.random.Generator,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    *,
    size: tuple[int, int] = PORTRAIT,
    note: str | None = None,
) -> DrawnPage:
    """A table with a header row: one label a row, one value a column.

    Args:
        rng: draws style and spacing.
        columns: names of the value columns.
        rows: (label, one value a column).
        size: (width, height) of the page in pixels.
        note: a line at the foot of the page.

    Raises:
        ValueError: if names repeat, a row has the wrong number of values, or the content does not
            fit the page.
    """
    _names_differ(columns, "column")
    _names_differ([label for label, _ in rows], "row")
    for label, values in rows:
        if len(values) != len(columns):
            raise ValueError(f"row {label!r} has {len(values)} values for {len(columns)} columns")
    canvas = Canvas(rng, size, title)
    if note:
        canvas.note(rng, note)

    height = min(int(rng.integers(28, 46)), (canvas.bottom - canvas.top) // (len(rows) + 1))
    largest = min(int(rng.integers(12, 17)), int(height * 0.6))
    cells = [[label for label, _ in rows]]
    cells += [[name, *(values[c] for _, values in rows)] for c, name in enumerate(columns)]
    bold, pad = BOLD.get(canvas.font, canvas.font), 16
    for number in range(largest, 7, -1):
        plain, strong = load_font(canvas.font, number), load_font(bold, number)
        widths = [max(max(plain.getlength(t), strong.getlength(t)) for t in c) + pad for c in cells]
        spare = canvas.right - canvas.left - sum(widths)
        if spare >= 0:
            break
    else:
        raise ValueError(
            f"table {title!r}: {len(rows)} rows of {len(cells)} columns do not fit into "
            f"{canvas.right - canvas.left} x {canvas.bottom - canvas.top} pixels"
        )
    widths = [width + spare * rng.uniform(0.6, 1.0) / len(widths) for width in widths]
    edges = canvas.left + np.concatenate([[0.0], np.cumsum(widths)])
    gridded = bool(rng.integers(0, 2))
    right_aligned = bool(rng.integers(0, 2))

    for index in range(len(rows) + 2):
        if gridded or index in (0, 1, len(rows) + 1):
            y = canvas.top + index * height
            canvas.rule(edges[0], y, edges[-1] - edges[0], 2 if index == 1 else 1)
    if gridded:
        for x in edges:
            canvas.rule(x, canvas.top, 1, (len(rows) + 1) * height + 1)

    def cell(row: int, place_in_row: int, text: str, font, kind: str, **place: str) -> None:
        y = canvas.top + (row + 0.5) * height + 1
        if right_aligned and place_in_row:
            canvas.text((edges[place_in_row + 1] - pad / 2, y), text, font, kind, "rm", **place)
        else:
            canvas.text((edges[place_in_row] + pad / 2, y), text, font, kind, "lm", **place)

    for c, name in enumerate(columns):
        cell(0, c + 1, name, strong, "header", column=name)
    for r, (label, values) in enumerate(rows):
        cell(r + 1, 0, label, plain, "label", label=label)
        for c, value in enumerate(values):
            cell(r + 1, c + 1, value, plain, "value", label=label, column=columns[c], value=value)
    return canvas.page("table", title)


def draw_form(
    rng: np.random.Generator,
    title: str,
    fields: Sequence[tuple[str, str]],
    *,
    size: tuple[int, int] = PORTRAIT,
    note: str | None = None,
) -> DrawnPage:
    """A form: a field's name and, beside it or under it, its value; values may be underlined.

    Args:
        rng: draws style and spacing.
        fields: (label, value).
        size: (width, height) of the page in pixels.
        note: a line at the foot of the page.

    Raises:
        ValueError: if labels repeat or the content does not fit the page.
    """
    _names_differ([label for label, _ in fields], "field")
    canvas = Canvas(rng, size, title)
    if note:
        canvas.note(rng, note)
    stacked = bool(rng.integers(0, 2))
    lined = bool(rng.integers(0, 2))
    columns = 2 if size[0] > size[1] and len(fields) > 3 else 1
    per_column = -(-len(fields) // columns)
    height = (canvas.bottom - canvas.top) / per_column
    height = int(min(height, rng.integers(56, 76) if stacked else rng.integers(34, 58)))
    width = (canvas.right - canvas.left) / columns - 20
    largest = min(int(rng.integers(13, 18)), int(height * (0.3 if stacked else 0.5)))
    share = 1.0 if stacked else float(rng.uniform(0.38, 0.46))
    bold = BOLD.get(canvas.font, canvas.font)
    label_font = fit_font(bold, [label for label, _ in fields], width * share - 8, largest)
    room = width * (1.0 if stacked else 1 - share) - 8
    value_font = fit_font(canvas.font, [value for _, value in fields], room, largest)

    for index, (label, value) in enumerate(fields):
        x = canvas.left + (index // per_column) * (width + 20)
        y = canvas.top + (index % per_column) * height
        value_x = x if stacked else x + width * share
        label_y = y + height * (0.25 if stacked else 0.45)
        value_y = y + height * (0.65 if stacked else 0.45)
        canvas.text((x, label_y), label, label_font, "label", "lm", label=label)
        canvas.text((value_x, value_y), value, value_font, "value", "lm", label=label, value=value)
        if lined:
            canvas.rule(value_x, y + height - 2, room, 1)
    return canvas.page("form", title)


def draw_chart(
    rng: np.random.Generator,
    title: str,
    bars: Sequence[tuple[str, float | int]],
    *,
    unit: str = "",
    size: tuple[int, int] = PORTRAIT,
    note: str | None = None,
) -> DrawnPage:
    """A bar chart, upright or lying, with each bar's number written at its end.

    A bar's length is in proportion to its number, to the pixel; a bar of 0 has no box of kind
    ``bar``.

    Args:
        rng: draws style, spacing and direction.
        bars: (label, number), numbers not negative and not all 0.
        unit: written behind each number.
        size: (width, height) of the page in pixels.
        note: a line at the foot of the page.

    Raises:
        ValueError: if labels repeat, a number is negative, or the content does not fit the page.
    """
    _names_differ([label for label, _ in bars], "bar")
    most = max(number for _, number in bars)
    if not all(np.isfinite(number) and number >= 0 for _, number in bars) or most <= 0:
        raise ValueError(f"chart {title!r}: numbers must be finite, not negative and not all 0")
    canvas = Canvas(rng, size, title)
    if note:
        canvas.note(rng, note)
    colour = _BAR_COLOURS[int(rng.integers(len(_BAR_COLOURS)))]
    thickness = float(rng.uniform(0.45, 0.75))
    values = [f"{number:g}{unit}" for _, number in bars]
    labels = [label for label, _ in bars]
    largest = int(rng.integers(12, 16))
    draw = _upright_bars if rng.integers(0, 2) else _lying_bars
    lengths = [number / most for _, number in bars]
    draw(canvas, labels, values, lengths, colour, thickness, largest)
    return canvas.page("chart", title)


def _upright_bars(canvas, labels, values, lengths, colour, thickness, largest) -> None:
    slot = (canvas.right - canvas.left) / len(labels)
    font = fit_font(canvas.font, labels + values, slot - 8, largest)
    base = canvas.bottom - 30
    tallest = base - canvas.top - 24
    if tallest < 20:
        raise ValueError(f"only {tallest} pixels are left for bars")
    canvas.rule(canvas.left, base, canvas.right - canvas.left, 2)
    for index, (label, value, length) in enumerate(zip(labels, values, lengths, strict=True)):
        middle = canvas.left + (index + 0.5) * slot
        height, width = round(tallest * length), round(slot * thickness)
        canvas.bar((round(middle - width / 2), base - height, width, height), colour, label, value)
        canvas.text(
            (middle, base - height - 12), value, font, "value", "mm", label=label, value=value
        )
        canvas.text((middle, base + 16), label, font, "label", "mm", label=label)


def _lying_bars(canvas, labels, values, lengths, colour, thickness, largest) -> None:
    slot = min((canvas.bottom - canvas.top) / len(labels), 72)
    if slot < 14:
        raise ValueError(f"{len(labels)} bars leave {slot:.0f} pixels each")
    room = canvas.right - canvas.left
    font = fit_font(canvas.font, labels, room * 0.35, min(largest, int(slot * 0.7)))
    axis = canvas.left + round(max(font.getlength(label) for label in labels)) + 12
    longest = canvas.right - axis - 2 - round(max(font.getlength(value) for value in values)) - 12
    if longest < 20:
        raise ValueError(f"only {longest} pixels are left for bars")
    canvas.rule(axis, canvas.top, 2, slot * len(labels))
    for index, (label, value, length) in enumerate(zip(labels, values, lengths, strict=True)):
        middle = canvas.top + (index + 0.5) * slot
        width, height = round(longest * length), round(slot * thickness)
        x = axis + 2
        canvas.bar((x, round(middle - height / 2), width, height), colour, label, value)
        canvas.text((x + width + 8, middle), value, font, "value", "lm", label=label, value=value)
        canvas.text((axis - 8, middle), label, font, "label", "rm", label=label)


_PLACES = (
    "Alder Bay",
    "Brookfield",
    "Carrow",
    "Dunmere",
    "Eastholm",
    "Fenwick",
    "Glenport",
    "Harrowby",
)
_PLACES += (
    "Inverlee",
    "Juniper Hill",
    "Kestrel",
    "Lindow",
    "Marsh End",
    "Northgate",
    "Oakham",
    "Penrose",
)
_THEMES = (
    "Freight handled",
    "Visitors",
    "Rainfall",
    "New permits",
    "Library loans",
    "Bus journeys",
)
_FIELDS = ("Reference", "Account", "Case file", "Permit", "Invoice", "Meter", "Parcel", "Ward")
_FIELDS += ("Contact", "Station", "Route", "Amount due")


def random_page(
    rng: np.random.Generator, *, kind: str | None = None, size: tuple[int, int] | None = None
) -> DrawnPage:
    """A page with invented content: every choice, the kind and the page size included, comes from
    the generator.

    Args:
        rng: for instance ``page_generator(seed, index)``.
        kind: one of ``KINDS``; drawn if absent.
        size: (width, height) in pixels; portrait or landscape is drawn if absent.

    Raises:
        ValueError: for an unknown kind.
    """
    kind = kind or str(rng.choice(KINDS))
    if kind not in KINDS:
        raise ValueError(f"unknown kind of page {kind!r}; known: {', '.join(KINDS)}")
    size = size or (PORTRAIT, LANDSCAPE)[int(rng.integers(2))]
    year = int(rng.integers(1990, 2030))
    theme = str(rng.choice(_THEMES))
    note = f"Source: county records, {year + 1}." if rng.integers(0, 2) else None
    count = int(rng.integers(4, 9))
    if kind == "form":
        fields = [str(name) for name in rng.choice(_FIELDS, count, replace=False)]
        title = f"{rng.choice(_PLACES)} office, form {int(rng.integers(10, 99))}"
        pairs = [(name, f"{rng.choice(_PLACES)} {int(rng.integers(10, 9999))}") for name in fields]
        return draw_form(rng, title, pairs, size=size, note=note)
    places = [str(name) for name in rng.choice(_PLACES, count, replace=False)]
    if kind == "table":
        years = [str(year + step) for step in range(int(rng.integers(2, 5)))]
        rows = [(name, [str(int(rng.integers(10, 9999))) for _ in years]) for name in places]
        return draw_table(rng, f"{theme} by town", years, rows, size=size, note=note)
    unit = ("", "%", " t")[int(rng.integers(3))]
    bars = [(name, int(rng.integers(1, 100))) for name in places[:6]]
    return draw_chart(rng, f"{theme} by town, {year}", bars, unit=unit, size=size, note=note)
