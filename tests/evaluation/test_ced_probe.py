"""The CED probe: perturbed regions and summaries of hand-made audits."""

import numpy as np
import pytest

from evisrag_jax.evaluation import proposals
from evisrag_jax.evaluation.ced_probe import group_statistics, scored_tokens, summarise_probe
from evisrag_jax.rewards.ced.config import CedConfig
from evisrag_jax.rollout.requests import Completion

SIZE = (400, 300)
BOX = [100, 80, 120, 60]


def one(name, sample="a"):
    found = proposals.propose(name, [[BOX], []], [SIZE, SIZE], sample)
    return None if found is None else found[0][0]


def test_proposals():
    assert one("evidence") == tuple(map(float, BOX))
    for name, (low, high) in proposals.IOU_BINS.items():
        for sample in "abcdef":
            box = one(name, sample)
            assert box[2:] == (120, 60) and low <= proposals.box_iou(BOX, box) <= high
            assert 0 <= box[0] <= 280 and 0 <= box[1] <= 240
    for factor in proposals.SCALES:
        x, y, w, h = one(f"scale_{factor:g}")
        assert (w, h) == (120 * factor, 60 * factor)
        assert (x + w / 2, y + h / 2) == (160, 110)
    for share in proposals.SHIFTS:
        x, y, w, h = one(f"shift_{share:g}")
        assert abs(x - 100) == pytest.approx(120 * share) and abs(y - 80) == pytest.approx(
            60 * share
        )
    assert one("random") == one("random") != one("random", "b")
    whole = proposals.propose("iou_0.3", [[[0, 0, 400, 300]]], [SIZE], "a")
    assert whole is None  # a box as large as the page cannot be moved on it
    with pytest.raises(ValueError, match="proposal 'x'; one of evidence, random"):
        one("x")


def test_iou():
    assert proposals.box_iou([0, 0, 2, 2], [1, 1, 2, 2]) == pytest.approx(1 / 7)
    assert proposals.box_iou([0, 0, 2, 2], [2, 0, 2, 2]) == 0


def row(id, response, answer, right, m, family="counting"):
    audit = {"drop": m, "controls": [0.0, 0.0], "z": m, "gap": m, "m": m}
    return {
        "id": id,
        "family": family,
        "response": response,
        "text": f"<answer> {answer} </answer>",
        "answer": answer,
        "right": right,
        "logp": -0.1 * response,
        "degenerate": False,
        "proposals": {} if m is None else {"evidence": audit},
    }


def test_summary():
    """Two questions of two responses: rates count ties as no, groups differ by margin alone."""
    rows = [row("a", 0, "3", True, 0.8), row("a", 1, "3", True, -0.2)]
    rows += [row("b", 0, "4", False, 0.0), row("b", 1, "4", False, 0.0)]
    summary = summarise_probe(rows, CedConfig())
    evidence = summary["proposals"]["evidence"]
    assert evidence["n"] == 4 and evidence["rate"] == 0.25 and evidence["m"] == pytest.approx(0.15)
    assert evidence["m_se"] == pytest.approx(np.std([0.3, 0.0], ddof=1) / 2**0.5)
    assert summary["accuracy"] == 0.5 and summary["audited"] == 4
    groups = summary["groups"]
    assert groups["zero_variance"] == 0.5 and groups["correctness_zero_variance"] == 1.0
    assert groups["same_answer_different_reward"] == 0.5
    assert groups["non_constant"] == 0.5
    first = 0.78 - (0.7 / (1 + np.exp(2 * 0.2 / 0.2)) - 0.02)
    assert groups["std"] == pytest.approx(first / 4, abs=2e-3)
    reranked = summary["rerank"]
    assert reranked["paper"]["rnc"] == 0.5 and reranked["correctness_only"]["rnc"] == 0.0
    assert reranked["paper"]["everything"]["accuracy"] == 0.5


def test_groups_of_unaudited_responses_are_paid_for_correctness():
    rows = [row("a", 0, "3", True, 0.8) | {"proposals": {}}, row("a", 1, "4", False, 0.1)]
    rows[1]["proposals"] = {}
    groups = group_statistics(rows, CedConfig())
    assert groups["std"] == groups["correctness_std"] == pytest.approx(0.625)
    assert group_statistics(rows[:1], CedConfig()) == {"groups": 0}


def test_scored_tokens():
    """Lines of pages with boxes, never one that says nothing is there; the answer without its prefix."""
    text = (
        "<evidence>\n[1]: red 3\n[2]: no relevant information\n</evidence>\n<answer> 42 </answer>"
    )
    length = len(text)
    offsets = np.stack([np.arange(length), np.arange(length) + 1], 1).astype(np.int32)
    ids = np.arange(length, dtype=np.int32)
    done = Completion(ids, np.zeros(length, np.float32), text, offsets, "stop", length)

    def said(scope, pages):
        ids, span = scored_tokens(done, scope, pages)
        return "".join(text[i] for i, on in zip(ids, span, strict=True) if on), len(ids)

    assert said("records", [1, 2]) == ("red 3", length)
    assert said("records", [2]) == ("", length)
    assert said("answer", [1]) == ("42", length)
    assert said("answer_alone", [1]) == ("42", len("<answer> 42 </answer>"))
    assert said("full", [1]) == (text, length)
