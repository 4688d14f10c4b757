"""How well written boxes match the gold ones: the rewards of Perception-R1 and VLM-R1, each in [0, 1].

    perception_r1   task        reward beside the format's 0 or 1
                    box         Σ IoU of matched pairs / max(N, M)
                    point       the same with 1 - distance inside the matched box
                    count       1 - |N - M| / max(N, M)
                    text        1 - edit distance / longer length, best of the gold answers
    vlm_r1          one gold box: IoU of the first box written; otherwise
                    map         mean of AP at IoU 0.50, 0.55, .., 0.95
                    weighted    0.7 · mean IoU of the hits + 0.3 · (1 - (missed + false share) / 2)

N boxes written, M gold ones; pairs are the best assignment (Hungarian), within a page. Sources: baselines
spec 3.1, which names the parts. Decisions of this project, as neither the spec nor a paper fixes them:

  * N = M = 0 is right (1); of N and M one 0 and the other not is wrong (0), also under "weighted", where a
    share of nothing would pay for silence
  * max(N, M) divides, so that a missing box and one too many cost the same
  * the distance of a point is the larger of its two offsets from the middle, in halves of the box's sides:
    0 in the middle, 1 on the border, and nothing is paid from there on
  * a count is paid by how near it is
  * AP has one class (a record's boxes have no labels), no confidences (the order of writing counts), the
    best unmatched gold box for each box, and precision at 101 recalls, as COCO has it
  * a hit has IoU 0.5 or more; the weights 0.7 and 0.3
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64
from scipy.optimize import linear_sum_assignment

from evisrag_jax.rewards.boxes import BoxGold, PageBoxes, PagePoints, parse_boxes, parse_points

#: Tasks of each kind; the first is the default.
TASKS = {"perception_r1": ("box", "point", "count", "text"), "vlm_r1": ("map", "weighted")}
THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
HIT = 0.5
POSITION_WEIGHT = 0.7
_SLACK = 1e-9  # of sums of binary fractions


def box_score(text: str | None, gold: BoxGold, task: str, units: str) -> tuple[float, bool]:
    """The reward of an answer (`boxes.answer_region`) and whether its list can be read; a malformed one
    is paid nothing. task: of `TASKS`, without "text"."""
    if task == "point":
        points = parse_points(text, gold.frames, units)
        return (0.0, False) if points is None else (point_reward(points, gold.boxes), True)
    found = parse_boxes(text, gold.frames, units)
    if found is None:
        return 0.0, False
    if task in ("map", "weighted") and len(gold.boxes) == 1:
        return first_iou(found, gold.boxes), True
    rewards = {
        "box": box_reward,
        "count": lambda a, b: count_reward(len(a), len(b)),
        "map": mean_average_precision,
        "weighted": weighted_detection,
    }
    return rewards[task](found, gold.boxes), True


def pairwise_iou(
    a: Float64[np.ndarray, "N 4"], b: Float64[np.ndarray, "M 4"]
) -> Float64[np.ndarray, "N M"]:
    """Intersection over union of corners x1, y1, x2, y2; 0 where a box is empty or reversed."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), -1)
    area_a, area_b = (np.prod(np.clip(x[:, 2:] - x[:, :2], 0, None), -1) for x in (a, b))
    union = area_a[:, None] + area_b[None] - shared
    return np.where(shared > 0, shared / np.where(union > 0, union, 1.0), 0.0)


def page_iou(found: PageBoxes, gold: PageBoxes) -> Float64[np.ndarray, "N M"]:
    """`pairwise_iou`, 0 between pages."""
    return pairwise_iou(found.boxes, gold.boxes) * (found.page[:, None] == gold.page)


def best_pairs(worth: Float64[np.ndarray, "N M"]) -> Float64[np.ndarray, " K"]:
    """The worth of each pair of the assignment whose sum is largest; K = min(N, M)."""
    return worth[linear_sum_assignment(worth, maximize=True)]


def assigned_mean(worth: Float64[np.ndarray, "N M"]) -> float:
    """Σ of `best_pairs` / max(N, M); 1 where there is nothing on either side."""
    return float(best_pairs(worth).sum() / max(worth.shape)) if max(worth.shape) else 1.0


def box_reward(found: PageBoxes, gold: PageBoxes) -> float:
    """Perception-R1: Σ IoU of the matched pairs / max(N, M)."""
    return assigned_mean(page_iou(found, gold))


def point_reward(found: PagePoints, gold: PageBoxes) -> float:
    """Perception-R1: Σ (1 - distance) of the matched points / max(N, M), see the module for distance."""
    middle = (gold.boxes[:, :2] + gold.boxes[:, 2:]) / 2
    half = (gold.boxes[:, 2:] - gold.boxes[:, :2]) / 2
    distance = (np.abs(found.points[:, None] - middle) / half).max(-1)
    worth = np.clip(1 - distance, 0, None) * (found.page[:, None] == gold.page)
    return assigned_mean(worth)


def count_reward(found: int, gold: int) -> float:
    """Perception-R1: 1 - |N - M| / max(N, M)."""
    return 1 - abs(found - gold) / max(found, gold) if found or gold else 1.0


def edit_reward(text: str, golds: Sequence[str]) -> float:
    """Perception-R1's OCR: 1 - Levenshtein distance / length of the longer text, the best of `golds`;
    outer white space does not count."""
    text = text.strip()
    scores = []
    for gold in map(str.strip, golds):
        longer = max(len(text), len(gold))
        scores.append(1 - edit_distance(text, gold) / longer if longer else 1.0)
    return max(scores)


def edit_distance(a: str, b: str) -> int:
    """Least number of characters to insert, delete or replace."""
    codes = np.array([ord(c) for c in b], np.int64)
    places = np.arange(len(b) + 1)
    row = places
    for i, c in enumerate(a, start=1):
        step = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(c)))
        # An insertion adds 1 a place to what stands left of it.
        row = np.minimum.accumulate(np.concatenate([[i], step]) - places) + places
    return int(row[-1])


def first_iou(found: PageBoxes, gold: PageBoxes) -> float:
    """VLM-R1's REC: IoU of the first box written with the one gold box."""
    return float(page_iou(found, gold)[0, 0]) if len(found) else 0.0


def mean_average_precision(found: PageBoxes, gold: PageBoxes) -> float:
    """VLM-R1's mAP over `THRESHOLDS`."""
    if not len(found) or not len(gold):
        return float(len(found) == len(gold))
    iou = page_iou(found, gold)
    return float(np.mean([_average_precision(_hits(iou, t), len(gold)) for t in THRESHOLDS]))


def _hits(iou: Float64[np.ndarray, "N M"], threshold: float) -> Bool[np.ndarray, " N"]:
    """Which boxes, in their order, take a gold box that none before has taken."""
    free = iou.copy()
    hits = np.zeros(len(iou), bool)
    for n, row in enumerate(free):
        best = int(row.argmax())
        if row[best] >= threshold - _SLACK:
            hits[n] = True
            free[:, best] = -1.0
    return hits


def _average_precision(hits: Bool[np.ndarray, " N"], gold: int) -> float:
    """Mean over recalls 0, 0.01, .., 1 of the highest precision at that recall or more."""
    right = np.cumsum(hits)
    precision, recall = right / np.arange(1, len(hits) + 1), right / gold
    best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(best[np.searchsorted(recall, np.arange(101) / 100 - _SLACK)].mean())


def weighted_detection(found: PageBoxes, gold: PageBoxes) -> float:
    """VLM-R1's weighted reward: where the hits are, and how complete and clean the list is."""
    if not len(found) or not len(gold):
        return float(len(found) == len(gold))
    iou = page_iou(found, gold)
    hits = best_pairs(np.where(iou >= HIT - _SLACK, iou, 0.0))
    hits = hits[hits > 0]
    position = float(hits.mean()) if len(hits) else 0.0
    missed, false = 1 - len(hits) / len(gold), 1 - len(hits) / len(found)
    return POSITION_WEIGHT * position + (1 - POSITION_WEIGHT) * (1 - (missed + false) / 2)
