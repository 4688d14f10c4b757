"""Drawn pages: boxes hold exactly the ink, found again from the pixels alone; determinism."""

import numpy as np
import pytest

from evisrag_jax.pages.fonts import FONT_NAMES, fit_font, load_font
from evisrag_jax.pages.synthetic import (
    KINDS,
    LANDSCAPE,
    PORTRAIT,
    draw_chart,
    draw_form,
    draw_table,
    page_generator,
    random_page,
)

SEEDS = range(8)


def ink(page):
    """True where a pixel differs from the paper: independent of how anything was drawn."""
    return (np.asarray(page.image) != np.array(page.paper, np.uint8)).any(-1)


def inside(mask, rect, margin=0):
    x, y, w, h = rect
    top, left = max(0, y - margin), max(0, x - margin)
    return mask[top : y + h + margin, left : x + w + margin]


def check_boxes(page):
    marks = ink(page)
    height, width = marks.shape
    covered = np.zeros_like(marks)
    rules = np.zeros_like(marks)
    for rect in page.rules:
        inside(rules, rect)[...] = True
        assert inside(marks, rect).all()
    for box in page.boxes:
        x, y, w, h = box.rect
        assert x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height
        # Tight: ink touches all four edges.
        own = inside(marks, box.rect)
        assert own[0].any() and own[-1].any() and own[:, 0].any() and own[:, -1].any(), box
        if box.kind == "bar":
            assert own.all()
        # Nothing leaks: the ring of one pixel around the box is paper or a rule.
        ring = inside(marks & ~rules, box.rect, margin=1).sum()
        assert ring == own.sum(), box
        assert not inside(covered, box.rect).any(), f"{box} overlaps an earlier box"
        inside(covered, box.rect)[...] = True
    # And no ink is left outside boxes and rules.
    assert not (marks & ~covered & ~rules).any()


@pytest.mark.parametrize("size", [PORTRAIT, LANDSCAPE], ids=["portrait", "landscape"])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_are_the_ink(kind, size):
    for seed in SEEDS:
        page = random_page(page_generator(seed, 3), kind=kind, size=size)
        assert page.image.size == size
        assert page.image.mode == "RGB"
        assert page.kind == kind
        check_boxes(page)


@pytest.mark.parametrize("kind", ["table", "form"])
def test_a_box_shows_its_own_text(kind):
    """Redrawn with one value changed (same digits, same width), only that box changes."""

    def draw(value):
        rng = page_generator(5, 1)
        rows = [("Alder", "120"), ("Birch", "345"), ("Cedar", value)]
        if kind == "form":
            return draw_form(rng, "Trees", rows)
        return draw_table(rng, "Trees", ["2001"], [(label, [text]) for label, text in rows])

    first, second = draw("678"), draw("876")
    differ = (np.asarray(first.image) != np.asarray(second.image)).any(-1)
    area = np.zeros_like(differ)
    for page in (first, second):
        inside(area, page.find("Cedar", column="2001" if kind == "table" else "").rect)[...] = True
    assert differ.any()
    assert not (differ & ~area).any()


def test_contents_are_all_boxed_in_a_table():
    rows = [("North", ["1", "22"]), ("South", ["333", "4"])]
    page = draw_table(page_generator(1), "Totals", ["2020", "2021"], rows, note="Draft.")
    check_boxes(page)
    assert page.title == "Totals"
    texts = sorted((box.kind, box.text) for box in page.boxes)
    assert texts == sorted(
        [("title", "Totals"), ("note", "Draft."), ("header", "2020"), ("header", "2021")]
        + [("label", "North"), ("label", "South")]
        + [("value", value) for _, values in rows for value in values]
    )
    box = page.find("South", column="2020")
    assert (box.value, box.kind) == ("333", "value")
    # A value stands in its label's row and below its header.
    label, header = page.find("South", kind="label"), page.find("", column="2020", kind="header")
    middle = box.rect[1] + box.rect[3] / 2
    assert abs(middle - (label.rect[1] + label.rect[3] / 2)) <= 4
    assert header.rect[1] < box.rect[1]
    with pytest.raises(KeyError, match="no value box for label 'East'.*North"):
        page.find("East", column="2020")


def test_contents_are_all_boxed_in_a_form():
    for seed in SEEDS:
        page = draw_form(page_generator(seed), "Card", [("Name", "Ada Byron"), ("Room", "12")])
        check_boxes(page)
        assert {(b.label, b.value) for b in page.boxes if b.kind == "value"} == {
            ("Name", "Ada Byron"),
            ("Room", "12"),
        }
        name, room = page.find("Name"), page.find("Room")
        assert name.rect[1] < room.rect[1]


def test_bars_are_in_proportion():
    """Lengths within one pixel of number/maximum; both directions occur; zero has no bar."""
    bars = [("a", 100), ("b", 50), ("c", 25), ("d", 0)]
    lying = 0
    for seed in SEEDS:
        page = draw_chart(page_generator(seed), "Shares", bars, unit="%")
        check_boxes(page)
        found = {box.label: box for box in page.boxes if box.kind == "bar"}
        assert sorted(found) == ["a", "b", "c"]
        assert found["b"].value == "50%"
        axis = 2 if found["a"].rect[3] == found["b"].rect[3] else 3
        lying += axis == 2
        longest = found["a"].rect[axis]
        assert abs(found["b"].rect[axis] - longest / 2) <= 1
        assert abs(found["c"].rect[axis] - longest / 4) <= 1
        assert page.find("d").value == "0%"
    assert 0 < lying < len(SEEDS)


def test_a_page_depends_on_its_seed_and_place_only():
    first, again = (random_page(page_generator(3, 14)) for _ in range(2))
    assert np.array_equal(np.asarray(first.image), np.asarray(again.image))
    assert (first.boxes, first.rules, first.title) == (again.boxes, again.rules, again.title)
    other = random_page(page_generator(3, 15))
    assert other.boxes != first.boxes
    assert isinstance(page_generator(3).bit_generator, np.random.Philox)


def test_random_pages_vary():
    pages = [random_page(page_generator(9, index)) for index in range(40)]
    assert {page.kind for page in pages} == set(KINDS)
    assert {page.image.size for page in pages} == {PORTRAIT, LANDSCAPE}
    assert len({page.paper for page in pages}) > 20
    with pytest.raises(ValueError, match="unknown kind of page 'map'"):
        random_page(page_generator(0), kind="map")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda r: draw_table(r, "T", ["a"], [("x", ["1", "2"])]), "'x' has 2 values for 1"),
        (lambda r: draw_table(r, "T", ["a", "a"], [("x", ["1", "2"])]), r"doubled: \['a'\]"),
        (lambda r: draw_table(r, "T", [], [("x", [])]), "at least one column"),
        (lambda r: draw_table(r, "T", ["a"], [("word " * 60, ["1"])]), "do not fit"),
        (lambda r: draw_table(r, "T", ["a"], [(str(i), ["1"]) for i in range(200)]), "not fit"),
        (lambda r: draw_form(r, "T", [("a", "1"), ("a", "2")]), "doubled"),
        (lambda r: draw_form(r, "T", [("a", "word " * 60)]), "'word .* does not fit"),
        (lambda r: draw_form(r, "T", [(f"f{i}", "1") for i in range(200)]), "overlaps|not fit"),
        (lambda r: draw_form(r, "T", [("a", "   ")]), "leaves no ink"),
        (lambda r: draw_form(r, "word " * 90, [("a", "1")]), "does not fit"),
        (lambda r: draw_chart(r, "T", [("a", -1)]), "not negative"),
        (lambda r: draw_chart(r, "T", [("a", 0)]), "not all 0"),
        (lambda r: draw_chart(r, "T", [("a", float("nan")), ("b", 1)]), "finite"),
    ],
)
def test_what_cannot_be_drawn_exactly_is_refused(draw, message):
    for seed in range(3):
        with pytest.raises(ValueError, match=message):
            draw(page_generator(seed))


@pytest.mark.parametrize("name", FONT_NAMES)
def test_fonts_are_available_offline(name):
    font = load_font(name, 14)
    assert load_font(name, 14) is font
    assert load_font(name, 28).getlength("Evidence") > font.getlength("Evidence") > 20


def test_fonts_errors_and_fitting():
    with pytest.raises(ValueError, match="unknown font 'comic'; known: sans"):
        load_font("comic", 12)
    with pytest.raises(ValueError, match="below 1"):
        load_font("sans", 0)
    font = fit_font("sans", ["short", "a longer text"], 70, 30)
    assert (
        font.getlength("a longer text")
        <= 70
        < load_font("sans", font.size + 1).getlength("a longer text")
    )
    with pytest.raises(ValueError, match="'a longer text' does not fit into 10 pixels"):
        fit_font("sans", ["short", "a longer text"], 10, 30)
