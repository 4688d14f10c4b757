"""Boxes to tokens on hand-made grids, rings, and places in prompts of several images (CED spec 1.3)."""

import numpy as np
import pytest

from evisrag_jax.pages.regions import (
    box_tokens,
    feature_rows,
    prompt_tokens,
    ring,
    token_iou,
)

SIZE, GRID = (112, 84), (6, 8)  # 3 x 4 tokens of 28 px, resized pixels = original pixels


def cells(tokens):
    return [tuple(place) for place in np.argwhere(tokens).tolist()]


@pytest.mark.parametrize(
    ("box", "centre", "overlap"),
    [
        ([28, 28, 28, 28], [(1, 1)], [(1, 1)]),  # one token exactly
        ([20, 20, 40, 40], [(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 1)]),  # centres 21, 35, 49
        ([22, 30, 11, 20], [(1, 0)], [(1, 0)]),  # between the centres 21 and 35
        ([30, 30, 3, 3], [(1, 1)], [(1, 1)]),  # no patch centre, little of the cell: its middle
        ([55, 2, 4, 4], [(0, 2)], [(0, 2)]),  # over an edge, more of it to the right
        ([-50, -50, 60, 60], [(0, 0)], [(0, 0)]),  # cut at the corner
        ([4, 66, 76, 10], [(2, 0), (2, 1), (2, 2)], [(2, 0), (2, 1), (2, 2)]),  # thinner than a patch
        ([0, 0, 112, 84], "all", "all"),
        ([-10, -10, 500, 500], "all", "all"),
        ([112, 10, 20, 20], [], []),  # outside
        ([5, 5, 0, 10], [], []),  # no area
    ],
)  # fmt: skip
def test_one_box(box, centre, overlap):
    every = [(r, c) for r in range(3) for c in range(4)]
    for rule, wanted in (("centre", centre), ("overlap", overlap)):
        tokens = box_tokens([box], SIZE, GRID, rule=rule)
        assert cells(tokens) == (every if wanted == "all" else wanted), rule


def test_centre_rule_against_every_patch():
    """Drawn boxes at another scale than 1: the slow reading of the rule."""
    rng = np.random.default_rng(0)
    size = (331, 190)
    for _ in range(200):
        x, y = rng.uniform(-20, 300), rng.uniform(-20, 170)
        w, h = rng.uniform(1, 150, 2)
        x1, x2 = (np.clip(v * 112 / 331, 0, 112) for v in (x, x + w))
        y1, y2 = (np.clip(v * 84 / 190, 0, 84) for v in (y, y + h))
        wanted = np.zeros((3, 4), bool)
        down = [row for row in range(6) if y1 <= row * 14 + 7 < y2]
        across = [col for col in range(8) if x1 <= col * 14 + 7 < x2]
        for row in down or [min((y1 + y2) // 28, 5)]:
            for col in across or [min((x1 + x2) // 28, 7)]:
                wanted[int(row) // 2, int(col) // 2] = x2 > x1 and y2 > y1
        assert (box_tokens([[x, y, w, h]], size, GRID) == wanted).all()


def test_boxes_are_united_and_checked():
    assert cells(box_tokens([[0, 0, 28, 28], [84, 56, 28, 28]], SIZE, GRID)) == [(0, 0), (2, 3)]
    assert not box_tokens([], SIZE, GRID).any()
    with pytest.raises(ValueError, match="rule 'corner'; one of centre, overlap"):
        box_tokens([], SIZE, GRID, rule="corner")
    with pytest.raises(ValueError, match="not four finite numbers"):
        box_tokens([[0, 0, np.nan, 4]], SIZE, GRID)


def test_rings():
    one = np.zeros((5, 6), bool)
    one[0, 0] = True
    assert cells(ring(one, 1)) == [(0, 1), (1, 0), (1, 1)]  # the border cuts it
    assert ring(one, 2).sum() == 8
    barred = np.zeros_like(one)
    barred[:2, :2] = True
    assert cells(ring(one, 2, exclude=barred)) == [(0, 2), (1, 2), (2, 0), (2, 1), (2, 2)]
    # nothing beside the barred tokens: the whole rest of the page, then the barred ones after all
    assert (ring(one, 1, exclude=barred) == ~barred).all()
    assert (ring(one, 1, exclude=np.ones_like(one)) == ~one).all()
    assert ring(np.ones_like(one)).all()
    assert not ring(np.zeros_like(one)).any()


def test_rings_against_distances():
    rng = np.random.default_rng(1)
    for width in (1, 2, 3):
        region = rng.random((7, 9)) < 0.05
        region[3, 4] = True
        places = np.argwhere(region)
        wanted = np.zeros_like(region)
        for place in np.ndindex(*region.shape):
            distance = np.abs(places - place).max(1).min()
            wanted[place] = 0 < distance <= width
        assert (ring(region, width) == wanted).all()


def test_several_images():
    """Each image has its own start; a region of the second never lands in the first."""
    slot = np.array([-1, 0, 0, 0, 0, 0, 0, -1, -1, 1, 1, -1])
    token = np.array([0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 0])
    first, second = np.zeros((2, 3), bool), np.zeros((1, 2), bool)
    first[1, 2] = second[0, 1] = True
    assert np.flatnonzero(prompt_tokens([first, second], slot, token)).tolist() == [1 + 5, 9 + 1]
    rows = feature_rows([first, second], 3, 8)
    assert np.flatnonzero(rows.reshape(-1)).tolist() == [5, 8 + 1]
    with pytest.raises(ValueError, match="1 regions for a prompt of 2 images"):
        prompt_tokens([first], slot, token)
    with pytest.raises(ValueError, match="do not fit into 1 of 8"):
        feature_rows([first, second], 1, 8)
    assert token_iou(first, first) == 1 and token_iou(first, ~first) == 0
