"""Ink: counted pixel by pixel, and the margin told from the text of drawn pages."""

import numpy as np
import pytest

from evisrag_jax.pages.ink import ink_density, ink_table, token_ink
from evisrag_jax.pages.synthetic import page_generator, random_page


def test_counted_by_hand():
    gray = np.full((4, 6), 250, np.uint8)
    gray[1:3, 2:4] = 10
    gray[0, 0] = 250 - 63  # a tint just below the contrast
    gray[3, 5] = 250 - 64
    table = ink_table(gray)
    assert table[-1, -1] == 5
    boxes = [(2, 1, 2, 2), (0, 0, 6, 4), (3, 1, 2, 2), (0, 0, 2, 2), (9, 9, 3, 3), (2.4, 0.6, 2, 2)]
    assert ink_density(table, boxes).tolist() == [1, 5 / 24, 0.5, 0, 0, 1]
    assert ink_density(table, []).shape == (0,)
    # Out of the page on two sides: only what is on it counts.
    assert ink_density(table, [(-5, -5, 8, 7)]).tolist() == [1 / 6]


def test_light_on_dark_is_ink_as_well():
    page = np.asarray(random_page(page_generator(3)).image.convert("L"))
    table, inverse = ink_table(page), ink_table(255 - page)
    assert 0 < table[-1, -1] < page.size / 4
    np.testing.assert_array_equal(table, inverse)


def test_noise_of_a_scan_is_paper():
    rng = np.random.default_rng(0)
    gray = np.clip(rng.normal(225, 12, (200, 300)), 0, 255).astype(np.uint8)
    assert ink_density(ink_table(gray), [(0, 0, 300, 200)])[0] < 1e-3


def test_boxes_do_not_change_and_equal_a_slow_count():
    rng = np.random.default_rng(1)
    gray = np.where(rng.random((90, 70)) < 0.2, 30, 240).astype(np.uint8)
    corners = rng.integers(0, 60, (200, 2))
    boxes = np.concatenate([corners, rng.integers(1, 40, (200, 2))], 1).astype(float)
    kept = boxes.copy()
    densities = ink_density(ink_table(gray), [tuple(box) for box in boxes.tolist()])
    np.testing.assert_array_equal(boxes, kept)
    for (x, y, w, h), density in zip(boxes.astype(int), densities, strict=True):
        assert density == pytest.approx((gray[y : y + h, x : x + w] == 30).mean(), abs=1e-12)


def test_text_against_margin():
    for seed in range(5):
        page = random_page(page_generator(seed, 4), kind="table")
        table = ink_table(np.asarray(page.image.convert("L")))
        text = ink_density(table, [box.rect for box in page.boxes])
        margin = ink_density(table, [(0, 0, 20, page.image.height)])
        assert text.min() > 0.1 and margin[0] == 0


def test_of_merged_tokens():
    gray = np.full((4, 9), 240, np.uint8)
    gray[:2, 3:6] = 10  # all of the middle token of the first row
    gray[3, 6:] = 10  # the lower half of the last token
    # Patches of a page that was resized to 4 x 6 of them: two rows of three tokens, 2 x 3 pixels each.
    assert token_ink(gray, (4, 6)).tolist() == [[0, 1, 0], [0, 0, 0.5]]
    assert token_ink(gray, (2, 3), merge=1).tolist() == [[0, 1, 0], [0, 0, 0.5]]


def test_refusals():
    with pytest.raises(ValueError, match="contrast=0"):
        ink_table(np.zeros((2, 2), np.uint8), contrast=0)
    with pytest.raises(ValueError, match="no pixels"):
        ink_table(np.zeros((0, 2), np.uint8))
