"""Boxes in responses and records, on pages small enough to count by hand."""

import json

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.data.schema import Record
from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.patches import make_patches
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.prompts.tokenizer import decode_with_offsets, encode_response, load_tokenizer
from evisrag_jax.rewards.boxes import (
    BoxGold,
    Frame,
    answer_region,
    covered_cells,
    gold_boxes,
    parse_boxes,
    parse_points,
    record_boxes,
    write_boxes,
)
from evisrag_jax.rewards.gold import GoldError
from experiments.mini.tokenizer import build

# 224 x 84 original pixels, resized to 112 x 84: 3 rows and 4 columns of merged tokens.
PAGE = Frame((224, 84), (6, 8))
PLAIN = Frame((112, 84), (6, 8))


def record(boxes, images=2):
    names = tuple(f"page{i}.png" for i in range(images))
    return Record("r7", "?", names, ("a",), True, boxes=boxes)


@pytest.mark.parametrize(
    "text",
    [
        "[[10, 20, 30, 40], [1, 2, 3.5, 4]]",
        '[{"bbox_2d": [10, 20, 30, 40], "label": "total"}, {"bbox_2d": [1, 2, 3.5, 4]}]',
        'Here:\n```json\n[{"bbox_2d": [10, 20, 30, 40]}, [1, 2, 3.5, 4]]\n```\nDone.',
        "```\n[[10, 20, 30, 40], [1, 2, 3.5, 4]]```",
        "[1]: [10, 20, 30, 40]\n [1]: [[1, 2, 3.5, 4]]",
    ],
)
def test_pixels_of_the_resized_page_become_original_ones(text):
    """The page was made half as wide: x counts twice, y once."""
    got = parse_boxes(text, [PAGE])
    np.testing.assert_allclose(got.boxes, [[20, 20, 60, 40], [2, 2, 7, 4]])
    assert got.page.tolist() == [1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a box",
        "[[1, 2, 3]]",
        "[[1, 2, 3, 4, 5]]",
        "[1, 2, 3]",
        "[[1, 2, 3, 4], 5]",
        "[[1, 2, 3, 4]",
        "[[1, 2, 3, 4]] and more",
        '[{"bbox": [1, 2, 3, 4]}]',
        '[{"bbox_2d": [1, 2, 3, "4"]}]',
        '[{"bbox_2d": [1, 2, 3, 4], "page": "1"}]',
        '[{"bbox_2d": [1, 2, 3, 4], "page": -1}]',
        '[{"bbox_2d": [1, 2, 3, 4], "page": true}]',
        "[[true, 2, 3, 4]]",
        "[[NaN, 2, 3, 4]]",
        "[[1, 2, Infinity, 4]]",
        "[[1, 2, 1e300, 4]]",
        f"[[1, 2, 3, {'9' * 5000}]]",
        "[" * 100_000,
        "7",
        "{}",
        "see [1]: \n[1]: [[1, 2, 3, 4]]",
        "[1]:\n[2]: [[1, 2, 3, 4]]",
        "2 3 , 4 1",
    ],
)
def test_malformed_lists_are_none(text):
    assert parse_boxes(text, [PAGE]) is None


@pytest.mark.parametrize(
    "text", ["2 3 4", "2 3 ,", ", 2 3", "2,3", "-1 2", "2.5 3", "[[1, 2]]", ""]
)
def test_malformed_cells_are_none(text):
    assert parse_boxes(text, [PAGE], "cells") is None


@pytest.mark.parametrize("units", ["pixels", "cells"])
def test_no_text_ever_raises(units):
    """Single characters of good answers replaced, removed or doubled at random."""
    rng = np.random.default_rng(0)
    good = [
        '[1]: [{"bbox_2d": [1, 2, 3, 4]}]\n[2]: none',
        "2 3 , 4 1",
        "```json\n[[1, 2, 3, 4]]```",
    ]
    letters = '[]{}",:0 9-.eE\n`N<>'
    read = 0
    for _ in range(2000):
        text = list(str(rng.choice(good)))
        for _ in range(int(rng.integers(1, 4))):
            place = int(rng.integers(len(text)))
            text[place] = str(rng.choice(["", text[place] * 2, *letters]))
        for parse in (parse_boxes, parse_points):
            read += parse("".join(text), [PAGE, PLAIN], units) is not None
    assert read > 50


@pytest.mark.parametrize("nothing", ["[]", "none", " no relevant information ", "```json\n[]\n```"])
def test_no_box(nothing):
    got = parse_boxes(nothing, [PAGE])
    assert len(got) == 0 and got.boxes.shape == (0, 4)
    assert parse_boxes("none", [PAGE], "cells").boxes.shape == (0, 4)


def test_pages_of_boxes():
    """By line or by key; without one on the only page, and of several on none."""
    lines = "[2]: [[1, 2, 3, 4], [5, 6, 7, 8]]\n[1]: []\n[9]: [[1, 1, 2, 2]]"
    got = parse_boxes(lines, [PAGE, PLAIN])
    assert got.page.tolist() == [2, 2, 9]
    np.testing.assert_allclose(got.boxes[1], [5, 6, 7, 8])  # page 2 was not resized
    keyed = '[{"page": 1, "bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [1, 2, 3, 4]}]'
    assert parse_boxes(keyed, [PAGE, PLAIN]).page.tolist() == [1, 0]
    assert parse_boxes(keyed, [PAGE]).page.tolist() == [1, 1]


def test_cells_are_merged_tokens():
    """Column 2, row 3 of tokens of 28 resized pixels, which are 56 x 28 original ones."""
    got = parse_boxes("2 3 , 4 1", [PAGE], "cells")
    np.testing.assert_allclose(got.boxes, [[56, 56, 112, 84], [168, 0, 224, 28]])
    middle = parse_points("2 3", [PAGE], "cells")
    np.testing.assert_allclose(middle.points, [[84, 70]])
    with pytest.raises(ValueError, match="units='tokens'; one of pixels, cells"):
        parse_boxes("2 3", [PAGE], "tokens")


def test_points():
    for text in ("[[10, 20]]", "[10, 20]", '[{"point_2d": [10, 20], "label": "a"}]'):
        np.testing.assert_allclose(parse_points(text, [PAGE]).points, [[20, 20]])
    assert parse_points("[[1, 2, 3, 4]]", [PAGE]) is None
    assert parse_points(None, [PAGE]) is None


def test_where_an_answer_stands():
    two = "<answer>[]</answer> <answer>none</answer>"
    assert answer_region("<think>x</think><answer>[]</answer>") == "[]"
    assert [answer_region(two, which) for which in ("first", "last", "single")] == [
        *("[]", "none"),
        None,
    ]
    assert answer_region("[]") == "[]" and answer_region("[]", tagged=True) is None
    assert answer_region("<answer>[]") is None  # cut


def test_the_frame_of_a_prepared_page():
    """100 x 50 pixels become 112 x 56: the published rounding to multiples of 28."""
    layout = VisionLayout()
    page = make_patches(Image.new("RGB", (100, 50)), layout, PixelBudget("any", 784, 50_176))
    frame = Frame.of(page, layout)
    assert frame == Frame((100, 50), (4, 8)) and frame.cell == 28
    np.testing.assert_allclose(frame.scale, [100 / 112, 50 / 56])


@pytest.mark.parametrize(
    ("box", "want"),
    [
        ((0, 0, 28, 28), [(1, 1)]),
        ((20, 20, 40, 22), [(1, 1), (2, 1)]),  # patch centres at 21 and 35 across, 21 down
        ((22, 0, 34, 28), [(2, 1)]),  # none across: the token under the middle, which is at 28
        ((60, 30, 84, 84), [(3, 2), (3, 3)]),
        ((0, 0, 112, 84), [(c, r) for r in (1, 2, 3) for c in (1, 2, 3, 4)]),
        ((110, 82, 112, 84), [(4, 3)]),
        ((7, 7, 35, 35), [(1, 1)]),  # from a centre, included, to the next token's first, excluded
        ((7, 7, 7.5, 7.5), [(1, 1)]),
    ],
)
def test_cells_of_a_box_on_a_grid_of_three_by_four(box, want):
    """CED spec 1.3: a merged token is selected when one of its four patches has its centre in the box."""
    assert covered_cells(np.array(box, float), PLAIN) == want
    wide = np.array(box, float) * [2, 1, 2, 1]
    assert covered_cells(wide, PAGE) == want


def test_cells_of_random_boxes_by_looking_at_every_patch():
    rng = np.random.default_rng(1)
    for _ in range(200):
        x, y = rng.uniform(0, 100), rng.uniform(0, 75)
        box = np.array([x, y, rng.uniform(x + 1, 112), rng.uniform(y + 1, 84)])
        across = [c for c in range(8) if box[0] <= 14 * c + 7 < box[2]]
        down = [r for r in range(6) if box[1] <= 14 * r + 7 < box[3]]
        across = across or [int((box[0] + box[2]) // 28)]
        down = down or [int((box[1] + box[3]) // 28)]
        want = {(c // 2 + 1, r // 2 + 1) for r in down for c in across}
        assert set(covered_cells(box, PLAIN)) == want


def test_gold_boxes_are_corners_in_original_pixels():
    gold = gold_boxes(
        record((((10.0, 20.0, 30.0, 40.0),), ((100.0, 80.0, 50.0, 9.0),))), [PAGE, PLAIN]
    )
    np.testing.assert_allclose(gold.boxes.boxes, [[10, 20, 40, 60], [100, 80, 112, 84]])  # clipped
    assert gold.boxes.page.tolist() == [1, 2] and gold.frames == (PAGE, PLAIN)
    cells = gold_boxes(record((((0.0, 0.0, 112.0, 28.0),), ())), [PAGE, PLAIN], "cells")
    np.testing.assert_allclose(cells.boxes.boxes, [[0, 0, 56, 28], [56, 0, 112, 28]])
    twice = record((((0.0, 0.0, 28.0, 28.0), (2.0, 2.0, 20.0, 20.0)),), 1)
    assert len(gold_boxes(twice, [PLAIN], "cells").boxes) == 1
    nothing = gold_boxes(record(((), ())), [PAGE, PLAIN], "cells")
    assert len(nothing.boxes) == 0


def test_records_that_cannot_be_compared_with_are_named():
    with pytest.raises(GoldError, match="record 'r7': has no boxes"):
        record_boxes(record(None))
    with pytest.raises(GoldError, match=r"record 'r7': boxes has 1 entries for 2 image\(s\)"):
        record_boxes(record(((),)))
    outside = record(((), ((112.0, 0.0, 5.0, 5.0),)))
    message = r"page1.png: record 'r7': the box with corners \[112.0, 0.0, 117.0, 5.0\] lies outside its 112 x 84"
    with pytest.raises(PageError, match=message) as error:
        gold_boxes(outside, [PAGE, PLAIN])
    assert error.value.kind == "box"


def test_written_boxes_are_read_back():
    gold = gold_boxes(record((((20.0, 20.0, 40.0, 20.0),), ())), [PAGE, PLAIN])
    assert write_boxes(gold) == "[1]: [[10, 20, 30, 40]]\n[2]: []"
    np.testing.assert_allclose(
        parse_boxes(write_boxes(gold), gold.frames).boxes, [[20, 20, 60, 40]]
    )
    cells = gold_boxes(record((((0.0, 0.0, 112.0, 28.0),), ())), [PAGE, PLAIN], "cells")
    assert write_boxes(cells, "cells") == "[1]: 1 1 , 2 1\n[2]: no relevant information"
    back = parse_boxes(write_boxes(cells, "cells"), cells.frames, "cells")
    np.testing.assert_allclose(back.boxes, cells.boxes.boxes)
    one = BoxGold(gold.boxes, (PAGE,))
    assert json.loads(write_boxes(one)) == [[10, 20, 30, 40]]


def test_the_mini_vocabulary_can_write_every_cell(tmp_path):
    """Words, labels and commas come back from ids as they are read; every cell of 140 x 112 pixels."""
    tok = load_tokenizer(build(tmp_path))
    frames = (Frame((140, 112), (8, 10)), Frame((140, 112), (8, 10)))
    whole = record((((0.0, 0.0, 140.0, 112.0),), ()))
    gold = gold_boxes(whole, frames, "cells")
    assert len(gold.boxes) == 20
    ids = encode_response(tok, f"<answer>\n{write_boxes(gold, 'cells')}\n</answer>")
    assert tok.convert_tokens_to_ids("<unk>") not in ids
    text, _ = decode_with_offsets(tok, np.array(ids, np.int32))
    back = parse_boxes(answer_region(text), frames, "cells")
    np.testing.assert_allclose(back.boxes, gold.boxes.boxes)
    assert back.page.tolist() == [1] * 20
