"""Three-axis positions: the official numbers, and known failures B20, B22 and B23."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evisrag_jax.prompts.positions import merged_grid, mrope_positions
from evisrag_jax.prompts.tokenizer import SpecialIds

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "mrope.json").read_text("utf-8"))
IDS = SpecialIds(
    im_start=1, im_end=2, endoftext=3, vision_pad=4, vision_start=9003, vision_end=9004,
    image_pad=9001, video_pad=9002,
)  # fmt: skip
IMAGE, START, END = 9001, 9003, 9004


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden(case):
    """Equal to the official function where a token is real; its left padding is cut off first."""
    real = np.asarray(case["attention_mask"], bool)
    grids = [(rows, cols) for _, rows, cols in case["image_grid_thw"] or []]
    positions, following = mrope_positions(np.asarray(case["input_ids"])[real], grids, IDS)
    np.testing.assert_array_equal(positions, np.asarray(case["position_ids"])[:, real])
    assert [[following + k for k in range(5)]] * 3 == case["next_5_response_positions"]
    assert positions.dtype == np.int32


def test_b20_one_image_and_b22_first_new_position():
    """B20: 4 text tokens, grid (1, 4, 6), 3 text tokens; B22: the first new token stands at 10."""
    ids = [10, 11, 12, START, *[IMAGE] * 6, END, 13, 14]
    positions, following = mrope_positions(ids, [(4, 6)], IDS)
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9],
        [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9],
        [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9],
    ]
    assert following == 10
    assert following - len(ids) == -3


def test_text_only_counts_up():
    """B18, B22: no image means 0, 1, 2, … on all axes, whatever prompt came before."""
    positions, following = mrope_positions(list(range(20, 27)), [], IDS)
    np.testing.assert_array_equal(positions, np.tile(np.arange(7), (3, 1)))
    assert following == 7
    positions, following = mrope_positions([], [], IDS)
    assert positions.shape == (3, 0)
    assert following == 0


def test_images_without_text_between_are_told_apart_by_their_grids():
    """Two images back to back, 2 then 4 merged tokens: the second starts after the first."""
    positions, following = mrope_positions([5, *[IMAGE] * 6], [(2, 4), (4, 4)], IDS)
    assert positions.tolist() == [
        [0, 1, 1, 3, 3, 3, 3],
        [0, 1, 1, 3, 3, 4, 4],
        [0, 1, 2, 3, 4, 3, 4],
    ]
    assert following == 5


def test_other_merge_size():
    positions, following = mrope_positions([IMAGE] * 6, [(2, 3)], IDS, merge=1)
    assert positions.tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert following == 3


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        (
            [5, *[IMAGE] * 3, 6],
            [(4, 4)],
            r"image 0: grid \(4, 4\) needs 4 tokens in a row, found 3",
        ),
        ([*[IMAGE] * 2, 6, *[IMAGE] * 2], [(4, 4)], "image 0: .* found 2"),
        ([IMAGE, 6, IMAGE, IMAGE], [(2, 2), (2, 4), (2, 2)], "image 2: .* found 0"),
        ([*[IMAGE] * 4, 6, IMAGE], [(4, 4)], "1 image tokens more than the 1 image grids"),
        ([IMAGE, 9002], [(2, 2)], "video tokens"),
        ([IMAGE] * 3, [(3, 4)], "3x4 patches"),
    ],
)
def test_disagreement_is_refused_by_name(ids, grids, message):
    with pytest.raises(ValueError, match=message):
        mrope_positions(ids, grids, IDS)


def test_left_padding_is_refused():
    """B23: the engine pads on the right; a prompt padded on the left is refused by name."""
    with pytest.raises(ValueError, match="padded on the left"):
        mrope_positions([3, 3, 10, 11], [], IDS)


def test_merged_grid():
    assert merged_grid((4, 6)) == (2, 3)
    assert merged_grid((8, 12), merge=4) == (2, 3)
    for grid in ((0, 2), (-2, 2), (2, 5)):
        with pytest.raises(ValueError, match="multiples of 2"):
            merged_grid(grid)
