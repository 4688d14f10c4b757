"""Rewards of boxes against hand-made values and slow references written from the definitions."""

import functools
import itertools

import numpy as np
import pytest

from evisrag_jax.rewards.box_rewards import (
    best_pairs,
    box_reward,
    count_reward,
    edit_distance,
    edit_reward,
    first_iou,
    mean_average_precision,
    page_iou,
    pairwise_iou,
    point_reward,
    weighted_detection,
)
from evisrag_jax.rewards.boxes import BoxGold, Frame, PageBoxes, PagePoints
from evisrag_jax.rewards.evisrag import RewardConfig, score_response
from evisrag_jax.rewards.gold import GoldError

NONE = np.zeros((0, 4))


def on_page(boxes, page=1):
    boxes = np.array(boxes, float).reshape(-1, 4)
    return PageBoxes(np.full(len(boxes), page, np.int64), boxes)


def random_boxes(rng, count, side=12):
    low = rng.integers(0, side - 2, (count, 2))
    return np.concatenate([low, low + rng.integers(1, 8, (count, 2))], 1).astype(float)


def test_iou_by_hand():
    a = np.array([[0.0, 0, 10, 10], [5, 5, 5, 9], [9, 9, 1, 1]])
    b = np.array([[0.0, 0, 10, 10], [5, 0, 15, 10], [10, 0, 20, 10]])
    np.testing.assert_allclose(pairwise_iou(a, b), [[1, 1 / 3, 0], [0, 0, 0], [0, 0, 0]])
    assert pairwise_iou(NONE, b).shape == (0, 3)


def test_iou_of_whole_numbers_by_counting_pixels():
    rng = np.random.default_rng(0)
    a, b = random_boxes(rng, 30), random_boxes(rng, 30)

    def pixels(box):
        x1, y1, x2, y2 = map(int, box)
        return set(itertools.product(range(x1, x2), range(y1, y2)))

    want = [[len(pixels(p) & pixels(q)) / len(pixels(p) | pixels(q)) for q in b] for p in a]
    np.testing.assert_allclose(pairwise_iou(a, b), want, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_assignment_is_the_best_of_all_permutations(seed):
    rng = np.random.default_rng(seed)
    n, m = rng.integers(1, 6, 2)
    iou = pairwise_iou(random_boxes(rng, n), random_boxes(rng, m))
    small, large = (iou, m) if n <= m else (iou.T, n)
    sums = [
        sum(small[i, j] for i, j in enumerate(order))
        for order in itertools.permutations(range(large), len(small))
    ]
    assert best_pairs(iou).sum() == pytest.approx(max(sums))
    assert box_reward(on_page(random_boxes(rng, 0)), on_page(random_boxes(rng, 0))) == 1.0


def test_missing_and_extra_boxes_cost_the_same():
    """Two gold boxes of side 10; one shifted by half overlaps a third."""
    gold = on_page([[0, 0, 10, 10], [50, 0, 60, 10]])
    assert box_reward(gold, gold) == 1.0
    assert box_reward(on_page(gold.boxes[::-1]), gold) == 1.0  # whatever the order
    assert box_reward(on_page([[5, 0, 15, 10], [50, 0, 60, 10]]), gold) == pytest.approx(2 / 3)
    assert box_reward(on_page(gold.boxes[:1]), gold) == 0.5
    assert box_reward(gold, on_page(gold.boxes[:1])) == 0.5
    assert box_reward(on_page([*gold.boxes, *gold.boxes]), gold) == 0.5  # no pay for repeats
    assert box_reward(on_page(NONE), gold) == box_reward(gold, on_page(NONE)) == 0.0


def test_greedy_matching_would_pay_less():
    """The first written box fits both gold ones, the second only the one that greed would take."""
    gold = on_page([[0, 0, 10, 10], [0, 0, 10, 6]])
    found = on_page([[0, 0, 10, 9], [0, 0, 10, 10]])
    np.testing.assert_allclose(page_iou(found, gold), [[0.9, 6 / 9], [1.0, 0.6]])
    assert box_reward(found, gold) == pytest.approx((1 + 6 / 9) / 2)


def test_boxes_match_within_their_page():
    gold = on_page([[0, 0, 10, 10]], page=2)
    assert box_reward(on_page([[0, 0, 10, 10]], page=1), gold) == 0.0
    assert mean_average_precision(on_page([[0, 0, 10, 10]], page=0), gold) == 0.0
    assert first_iou(on_page([[0, 0, 10, 10]], page=2), gold) == 1.0


def points(*xy):
    return PagePoints(np.ones(len(xy), np.int64), np.array(xy, float).reshape(-1, 2))


def test_points_are_paid_by_their_distance_inside_the_box():
    """A box of 20 x 10: 1 in the middle, 0.5 half-way to a side, 0 on the border and outside."""
    gold = on_page([[0, 0, 20, 10]])
    for xy, want in (((10, 5), 1), ((15, 5), 0.5), ((10, 2.5), 0.5), ((15, 1), 0.2), ((20, 5), 0),
                     ((30, 5), 0)):  # fmt: skip
        assert point_reward(points(xy), gold) == pytest.approx(want), xy
    assert point_reward(points((10, 5), (10, 5)), gold) == 0.5
    two = on_page([[0, 0, 20, 10], [0, 20, 20, 30]])
    assert point_reward(points((10, 25), (15, 5)), two) == pytest.approx(0.75)
    assert point_reward(points((10, 5)), on_page([[0, 0, 20, 10]], page=2)) == 0.0
    assert point_reward(points(), on_page(NONE)) == 1.0


def test_counts():
    pairs = {(3, 3): 1, (2, 4): 0.5, (4, 3): 0.75, (0, 2): 0, (2, 0): 0, (0, 0): 1}
    assert {pair: count_reward(*pair) for pair in pairs} == pytest.approx(pairs)


def test_edit_distance_equals_the_recursive_definition():
    @functools.cache
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(
            *(slow(a[1:], b) + 1, slow(a, b[1:]) + 1),
            slow(a[1:], b[1:]) + (a[0] != b[0]),
        )

    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abé "), rng.integers(0, 9))) for _ in range(40)]
    for a, b in itertools.pairwise([*texts, "", "", "kitten", "sitting"]):
        assert edit_distance(a, b) == slow(a, b), (a, b)
    assert edit_distance("kitten", "sitting") == 3
    assert edit_reward(" 4,2 million\n", ["4.2 million"]) == pytest.approx(10 / 11)
    assert edit_reward("b", ["aa", "ab"]) == 0.5 and edit_reward(" ", [""]) == 1.0


def slow_map(found, gold):
    """AP from its definition: for every threshold and recall, the best precision of a prefix of the list
    that reaches it."""
    aps = []
    for step in range(10):
        threshold, taken, right, prefixes = 0.5 + 0.05 * step, set(), 0, []
        for n in range(len(found)):
            options = []
            for m in range(len(gold)):
                iou = pairwise_iou(found[n : n + 1], gold[m : m + 1])[0, 0]
                if m not in taken and iou >= threshold - 1e-9:
                    options.append((iou, -m))
            if options:
                right += 1
                taken.add(-max(options)[1])
            prefixes.append((right / len(gold), right / (n + 1)))
        best = [
            max((p for r, p in prefixes if r >= k / 100 - 1e-9), default=0.0) for k in range(101)
        ]
        aps.append(sum(best) / 101)
    return sum(aps) / 10


@pytest.mark.parametrize("seed", range(5))
def test_map_equals_a_slow_one(seed):
    rng = np.random.default_rng(seed)
    gold = random_boxes(rng, int(rng.integers(1, 6)))
    found = np.concatenate([gold + rng.integers(-1, 2, gold.shape), random_boxes(rng, 3)])
    found = found[rng.permutation(len(found))]
    got = mean_average_precision(on_page(found), on_page(gold))
    assert got == pytest.approx(slow_map(found, gold), abs=1e-12)


def test_map_by_hand():
    """One of two found: recalls 0 .. 0.50 of 101. A wrong box in front halves the precision, one behind
    costs nothing. IoU 2/3 passes four of ten thresholds."""
    gold = on_page([[0, 0, 10, 10], [50, 0, 60, 10]])
    right, wrong = [0, 0, 10, 10], [80, 80, 90, 90]
    assert mean_average_precision(gold, gold) == 1.0
    assert mean_average_precision(on_page([right]), gold) == pytest.approx(51 / 101)
    assert mean_average_precision(on_page([wrong, right]), gold) == pytest.approx(51 / 202)
    assert mean_average_precision(on_page([right, wrong]), gold) == pytest.approx(51 / 101)
    near = on_page([[2, 0, 12, 10], [52, 0, 62, 10]])  # 8 / 12
    assert mean_average_precision(near, gold) == pytest.approx(0.4)
    assert mean_average_precision(on_page(NONE), on_page(NONE)) == 1.0
    assert mean_average_precision(on_page(NONE), gold) == 0.0


def test_weighted_detection_by_hand():
    """Of two gold boxes one is hit with IoU 0.8, one missed; of three boxes two are false alarms, one of
    them with an IoU of 1/3: 0.7 · 0.8 + 0.3 · (1 - (1/2 + 2/3) / 2)."""
    gold = on_page([[0, 0, 10, 10], [50, 0, 60, 10]])
    found = on_page([[0, 0, 10, 8], [55, 0, 65, 10], [80, 80, 90, 90]])
    assert weighted_detection(found, gold) == pytest.approx(0.7 * 0.8 + 0.3 * (1 - 7 / 12))
    assert weighted_detection(gold, gold) == 1.0
    assert weighted_detection(on_page(NONE), gold) == 0.0  # silence is not paid
    assert weighted_detection(on_page([[80, 80, 90, 90]]), gold) == pytest.approx(0.0, abs=1e-12)


FRAME = Frame((112, 84), (6, 8))
GOLD = BoxGold(on_page([[0, 0, 28, 28]]), (FRAME,))
TWO = BoxGold(on_page([[0, 0, 28, 28], [56, 0, 84, 28]]), (FRAME,))


def config(kind="perception_r1", **changes):
    sections = ("think", "answer") if kind == "vlm_r1" else ("answer",)
    return RewardConfig(**({"kind": kind, "sections": sections} | changes))


@pytest.mark.parametrize(
    ("response", "changes", "want"),
    [
        ("<answer>[[0, 0, 28, 28]]</answer>", {}, (1, 1)),
        ("<answer>[[14, 0, 42, 28]]</answer>", {}, (1 / 3, 1)),
        ("<answer>[[0, 0, 28, 28], [56, 0, 84, 28]]</answer>", {}, (0.5, 1)),
        ("[[0, 0, 28, 28]]", {}, (0, 0)),
        ("[[0, 0, 28, 28]]", {"sections": ()}, (1, 1)),
        ("boxes", {"sections": ()}, (0, 0)),
        ("<answer>the top left</answer>", {}, (0, 0)),
        ("so <answer>[[0, 0, 28, 28]]</answer>", {}, (1, 0)),
        ("\n<answer>[[0, 0, 28, 28]]</answer>", {}, (1, 0)),
        ("\n<answer>[[0, 0, 28, 28]]</answer>", {"mode": "strict"}, (1, 1)),
        ("<answer>1 1</answer>", {"units": "cells"}, (1, 1)),
        ("<answer>1 1 , 1 1</answer>", {"units": "cells"}, (0.5, 1)),
        ("<answer>[[14, 14]]</answer>", {"task": "point"}, (1, 1)),
        ("<answer>2 3 , 4 1</answer>", {"task": "count", "units": "cells"}, (0.5, 1)),
        (
            "<think>top</think> <answer>[[0, 0, 28, 28], [3, 3, 9, 9]]</answer>",
            {"kind": "vlm_r1"},
            (1, 1),
        ),
        ("<answer>[[0, 0, 28, 28]]</answer>", {"kind": "vlm_r1"}, (1, 0)),
        ("<think>top</think><answer>[]</answer>", {"kind": "vlm_r1"}, (0, 1)),
    ],
)
def test_channels_of_a_response(response, changes, want):
    """Each value by hand; the gold box is the first merged token."""
    got = score_response(response, GOLD, 20, config(**changes))
    assert (got["match"], got["format"]) == pytest.approx(want) and list(got) == ["match", "format"]


def test_several_boxes_are_a_detection():
    """With one of two found VLM-R1 pays its mAP, or 0.7 · 1 + 0.3 · (1 - (1/2 + 0) / 2)."""
    response = "<think>top</think><answer>[[0, 0, 28, 28]]</answer>"
    for task, want in (("", 51 / 101), ("map", 51 / 101), ("weighted", 0.7 + 0.3 * 0.75)):
        got = score_response(response, TWO, 20, config("vlm_r1", task=task))
        assert got["match"] == pytest.approx(want)


def test_text_is_compared_with_the_gold_answers():
    gold = "<evidence>\n</evidence>\n<answer>42</answer>\n<answer>forty</answer>"
    reads = config(task="text")
    assert score_response("<answer> 42 </answer>", gold, 9, reads) == {"match": 1, "format": 1}
    assert score_response("<answer>fort</answer>", gold, 9, reads)["match"] == pytest.approx(0.8)
    assert score_response("42", gold, 9, reads) == {"match": 0, "format": 0}
    with pytest.raises(GoldError, match="compares with a tagged text, not with BoxGold"):
        score_response("<answer>42</answer>", GOLD, 9, reads)
    with pytest.raises(GoldError, match="kind perception_r1 compares with boxes, not with str"):
        score_response("<answer>42</answer>", gold, 9, config())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "perception_r2"}, "kind='perception_r2'; one of evisrag, r1vl, perception_r1"),
        ({"kind": "vlm_r1", "task": "box"}, "task='box' of kind vlm_r1; one of map, weighted"),
        ({"task": "box"}, "task='box' of kind evisrag; which has no tasks"),
        ({"units": "cells"}, "units='cells' with kind='evisrag', task='', which has no boxes"),
        ({"kind": "perception_r1", "units": "mm"}, "units='mm'; one of pixels, cells"),
        (
            {"kind": "perception_r1", "task": "text", "units": "cells"},
            "task='text', which has no boxes",
        ),
        ({"kind": "perception_r1", "mode": "code"}, "has no released channels"),
        ({"kind": "perception_r1", "length_penalty": True}, "kind perception_r1 has none"),
        ({"kind": "perception_r1", "sections": ("think",)}, "in order, with answer"),
        ({"kind": "evisrag", "sections": ()}, "in order, with answer"),
        ({"kind": "vlm_r1", "unpaid": ("steps",)}, "of match, format"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**options)
