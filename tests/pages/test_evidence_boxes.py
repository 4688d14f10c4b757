"""Evidence boxes: lines and padding by hand, and drawn pages whose true boxes are known."""

import numpy as np
import pytest

from evisrag_jax.data.miniworld import world
from evisrag_jax.data.miniworld.draw import draw_page, page_words, random_page, row_box
from evisrag_jax.pages import synthetic
from evisrag_jax.pages.evidence_boxes import evidence_boxes, half_token, word_boxes
from evisrag_jax.pages.plan import PixelBudget, VisionLayout, plan_resize
from evisrag_jax.pages.words import PageWords, Word, split_entry


def typed(*lines, width=400, height=300, numbered=True):
    """A page of typed lines: letters of 8 x 12 pixels, lines 20 pixels apart."""
    words = []
    for number, line in enumerate(lines):
        box = (10, 10 + 20 * number, 8 * len(line), 12)
        words += split_entry(line, box, number if numbered else None)
    return PageWords(tuple(words), width, height)


def status(found):
    return [(text.kind, text.status, text.places) for text in found.texts]


def iou(a, b):
    w = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    h = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    shared = max(w, 0) * max(h, 0)
    return shared / (a[2] * a[3] + b[2] * b[3] - shared)


def holds(outer, inner):
    return (
        outer[0] <= inner[0]
        and outer[1] <= inner[1]
        and outer[0] + outer[2] >= inner[0] + inner[2]
        and outer[1] + outer[3] >= inner[1] + inner[3]
    )


@pytest.mark.parametrize("numbered", [True, False], ids=["line ids", "overlap"])
def test_one_box_a_line(numbered):
    page = typed("total revenue of", "the year 2019", "rose", numbered=numbered)
    assert word_boxes(page, [1, 2, 3, 4]) == ((58, 10, 80, 12), (10, 30, 64, 12))
    assert word_boxes(page, []) == ()
    # Padded by 3 across and 14 down, cut at the top edge of the page.
    assert word_boxes(page, [0], (3, 14)) == ((7, 0, 46, 36),)


def test_words_without_lines_share_one_when_they_overlap():
    box = {"a": (0, 10, 5, 10), "b": (8, 14, 5, 10), "c": (16, 20, 5, 10)}
    page = PageWords(tuple(Word(text, place) for text, place in box.items()), 40, 40)
    assert word_boxes(page, [0, 1]) == ((0, 10, 13, 14),)  # 6 of 10 pixels shared
    assert word_boxes(page, [1, 2]) == ((8, 14, 5, 10), (16, 20, 5, 10))  # 4 of 10
    assert word_boxes(page, [0, 2]) == ((0, 10, 5, 10), (16, 20, 5, 10))


def test_half_a_token_in_pixels_of_the_original():
    """A page of 1120 x 560 resized to 560 x 280 has tokens of 56 pixels; padding is half of that."""
    plan = plan_resize(560, 1120, PixelBudget("half", 28 * 28, 560 * 280), VisionLayout())
    assert (plan.width, plan.height) == (560, 280)
    assert half_token(1120, 560, plan) == (28.0, 28.0)
    # Sides are rounded apart: 100 x 150 becomes 112 x 140.
    plan = plan_resize(150, 100, PixelBudget("any", 28 * 28, 10**6), VisionLayout())
    assert half_token(100, 150, plan) == (14 * 100 / 112, 14 * 150 / 140)


def test_evidence_and_answer():
    page = typed("Revenue of 2019 was 40", "million; 40 people", "and 40 dogs")
    found = evidence_boxes("Revenue of 2019 was 40 million", ["40"], page)
    # The answer stands three times, but inside the evidence once: only that is meant.
    assert status(found) == [("evidence", "found", 1), ("answer", "found", 3)]
    assert found.boxes == ((10, 10, 176, 12), (10, 30, 64, 12))
    assert found.words == (0, 1, 2, 3, 4, 5)
    alone = evidence_boxes(None, ["40"], page)
    assert status(alone) == [("answer", "found", 3)] and len(alone.boxes) == 3
    assert status(evidence_boxes(" ", ["40"], page, max_places=2)) == [("answer", "ambiguous", 3)]
    # An answer elsewhere adds its box.
    other = evidence_boxes("Revenue of 2019 was 40", ["dogs", "cats", "dogs"], page)
    assert status(other) == [
        ("evidence", "found", 1),
        ("answer", "found", 1),
        ("answer", "missing", 0),
    ]
    assert other.boxes == ((10, 10, 176, 12), (66, 50, 32, 12))


def test_no_box_is_ever_guessed():
    page = typed("Revenue of 2019 was 40", "million")
    none = evidence_boxes("Revenue of 2019 was 400 million", ["400"], page)
    assert none.boxes == () and none.words == ()
    assert [(text.status, text.score) for text in none.texts] == [("missing", 0.0)] * 2
    assert evidence_boxes(None, [], page).texts == ()


def test_evidence_by_its_sentences():
    page = typed("Costs fell to 12 in May", "see the annex", "Sales rose to 31 in June")
    found = evidence_boxes("Sales rose to 31 in June. Costs fell to 12 in May; see 9.", [], page)
    assert [(text.text, text.status) for text in found.texts] == [
        ("Sales rose to 31 in June.", "found"),
        ("Costs fell to 12 in May", "found"),
    ]
    assert found.boxes == ((10, 50, 192, 12), (10, 10, 184, 12))


def recognised(page, rng):
    """Words of a drawn page as a recogniser gives them: boxes off by up to a tenth of the letters'
    height, some words broken in two, letters misread in long words, lines numbered or not."""
    words = []
    for line, box in enumerate(box for box in page.boxes if box.text):
        for word in split_entry(box.text, box.rect, line):
            x, y, w, h = word.box
            off = rng.uniform(-0.1, 0.1, 4) * h
            place = tuple(np.array([x, y, max(w, 2), h]) + [off[0], off[1], off[2], off[3]])
            text = word.text
            if len(text) > 5 and text.isalpha() and rng.random() < 0.5:
                text = text[:3] + "~" + text[3:] if rng.random() < 0.5 else text[:-1] + "q"
            if text.isalpha() and len(text) > 6 and rng.random() < 0.3:
                cut = (place[0], place[1], place[2] / 2, place[3])
                rest = (place[0] + place[2] / 2, *cut[1:])
                words += [Word(text[:4], cut, line), Word(text[4:], rest, line)]
            else:
                words.append(Word(text, place, line))
    return PageWords(tuple(words), *page.image.size)


@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_drawn_pages(kind):
    """Every value of thirty pages: found, its box overlaps the truth by half, and padded holds it.

    Where a value stands more than once on a page, one of its boxes is the true one.
    """
    values = 0
    for seed in range(10):
        rng = synthetic.page_generator(seed, 11)
        drawn = synthetic.random_page(rng, kind=kind)
        page = recognised(drawn, rng)
        plan = plan_resize(page.height, page.width, PixelBudget("b", 784, 401_408), VisionLayout())
        pad = half_token(page.width, page.height, plan)
        for box in (box for box in drawn.boxes if box.kind in ("value", "title")):
            bare = evidence_boxes(None, [box.text], page)
            assert bare.texts[0].status == "found", box
            assert max(iou(found, box.rect) for found in bare.boxes) >= 0.5, box
            padded = evidence_boxes(None, [box.text], page, pad=pad)
            assert any(holds(found, box.rect) for found in padded.boxes), box
            values += 1
    assert values > 40


def test_mini_world_rows():
    """The row "field value" is found and its box is exactly the one that the mini world says; a
    value off by one is not found. Without line ids, words that were moved apart have a box each,
    and around them is the same box."""
    split = 0
    for seed in range(30):
        rng = world.stream(seed, "train", 0, task=9)
        spec = random_page(rng, world.KNOWN_ENTITIES[seed % len(world.KNOWN_ENTITIES)])
        pixels, ink = draw_page(spec, rng)
        size = pixels.shape[1], pixels.shape[0]
        drawn = [(row, text, tuple(ink[row, col].tolist())) for row, col, text in page_words(spec)]
        lined = PageWords(tuple(Word(text, box, row) for row, text, box in drawn), *size)
        plain = PageWords(tuple(Word(text, box) for _, text, box in drawn), *size)
        for field, value in spec.rows:
            true = tuple(row_box(spec, ink, field))
            found = evidence_boxes(f"{field} {value}", [str(value)], lined)
            assert found.boxes == (true,)
            assert found.texts[0].score == 1.0
            apart = evidence_boxes(f"{field} {value}", [], plain).boxes
            left, top = min(b[0] for b in apart), min(b[1] for b in apart)
            right, bottom = max(b[0] + b[2] for b in apart), max(b[1] + b[3] for b in apart)
            assert (left, top, right - left, bottom - top) == true
            split += len(apart) > 1
            assert evidence_boxes(f"{field} {value + 1}", [], lined).boxes == ()
    assert split < 20
