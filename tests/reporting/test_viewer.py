"""The viewers: responses cut at their tags, groups with rewards and advantages, verdicts on predictions."""

import json
from pathlib import Path

import numpy as np
import pytest

from evisrag_jax.reporting.display import format_number, format_signed
from evisrag_jax.reporting.folder import RunFolder, read_folder
from evisrag_jax.reporting.images import ImageStore
from evisrag_jax.reporting.predictions import predictions_viewer, refuses, share_room, verdict
from evisrag_jax.reporting.response import evidence_records, missing_tags, response_blocks
from evisrag_jax.reporting.viewer import rollout_viewer, shade, spread, stretches
from tests.reporting.fake_run import CHANNELS, make_predictions, make_rollout, tagged, write_jsonl


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path, side=200, image_bytes=20_000, total_bytes=100_000)


def test_a_whole_response():
    blocks = response_blocks(tagged("looked", ["A: 1", None], "so", "1"))
    assert [b.tag for b in blocks] == ["observe", "evidence", "think", "answer"]
    assert blocks[0].text == "looked" and blocks[3].text == "1" and missing_tags(blocks) == []
    assert [(r.page, r.text, r.irrelevant) for r in blocks[1].records] == [
        ("1", "A: 1", False),
        ("2", "no relevant information", True),
    ]


@pytest.mark.parametrize(
    ("text", "expected", "missing"),
    [
        ("hello", [("", "hello", True)], ["observe", "evidence", "think", "answer"]),
        (
            "a<answer>1</answer>b",
            [("", "a", True), ("answer", "1", True), ("", "b", True)],
            ["observe", "evidence", "think"],
        ),
        (
            "<think>x<answer>1</answer>",
            [("think", "x", False), ("answer", "1", True)],
            ["observe", "evidence", "think"],
        ),
        ("<answer>cut", [("answer", "cut", False)], ["observe", "evidence", "think", "answer"]),
        (
            "</think><b>t</b>",
            [("", "</think><b>t</b>", True)],
            ["observe", "evidence", "think", "answer"],
        ),
        (
            "<answer>1</answer><answer>2</answer>",
            [("answer", "1", True), ("answer", "2", True)],
            ["observe", "evidence", "think"],
        ),
        ("", [], ["observe", "evidence", "think", "answer"]),
    ],
)
def test_damaged_responses_keep_their_text(text, expected, missing):
    blocks = response_blocks(text)
    assert [(b.tag, b.text, b.closed) for b in blocks] == expected and missing_tags(
        blocks
    ) == missing


def test_sections_stand_in_for_a_missing_text():
    assert [(b.tag, b.text) for b in response_blocks("", {"think": "x", "answer": "1"})] == [
        ("think", "x"),
        ("answer", "1"),
    ]


def test_evidence_records():
    records = evidence_records("Here:\n [1]: a [2] b\nmore\n[3] No relevant information.\n")
    assert [(r.page, r.text, r.irrelevant) for r in records] == [
        ("", "Here:", False),
        ("1", "a [2] b\nmore", False),
        ("3", "No relevant information.", True),
    ]
    assert evidence_records("free text") == ()


def test_a_group_shows_rewards_and_advantages_of_every_sample(tmp_path, store):
    row = make_rollout(np.random.default_rng(3), tmp_path, 7, 2, 0.5)
    write_jsonl(tmp_path / "rollouts" / "step_000007.jsonl", [row])
    viewer = rollout_viewer(read_folder(tmp_path), store, steps=3, groups=3)
    [group] = viewer.groups
    assert viewer.shown == "1 of 1 recorded step" and group.step == 7 and group.columns == CHANNELS
    sums = [sum(s["rewards"].values()) for s in row["samples"]]
    best, worst = int(np.argmax(sums)), int(np.argmin(sums))
    order = [best, worst, *(i for i in range(len(sums)) if i not in (best, worst))]
    assert [s.best for s in group.samples].index(True) == 0
    assert [s.worst for s in group.samples].index(True) == 1
    shown = [(row["samples"][i], sums[i]) for i in order]
    for view, (sample, total) in zip(group.samples, shown, strict=True):
        assert view.total == format_number(total, 2)
        for cell, name in zip(view.cells, CHANNELS, strict=True):
            assert cell.reward == format_number(sample["rewards"][name], 2)
            assert cell.advantage == format_signed(sample["advantages"][name])
            assert cell.shade == shade(sample["advantages"][name])
    assert [(p.gold, p.relevant) for p in group.pages] == [
        ("", False),
        (row["evidence"][1], True),
        ("", False),
    ]


def test_advantages_over_the_tokens():
    """Text between runs has none; runs that overlap, are malformed or reach beyond the text are left out."""
    runs = [[0, 2, 1.5], [1, 3, 9], [3, 4, -0.6], "x", [4, 99, 1], [4, 5, None]]
    got = [(part.text, part.advantage, part.shade) for part in stretches("abcdef", runs)]
    assert got == [
        *(("ab", format_signed(1.5), "adv-p3"), ("c", "", "")),
        *(("d", format_signed(-0.6), "adv-n1"), ("ef", "", "")),
    ]
    assert stretches("ab", None)[0].text == "ab"


def test_loose_rows_are_shown_as_far_as_they_go(tmp_path, store):
    rows = [
        {},
        {"samples": "none"},
        {
            "samples": [
                None,
                {"rewards": {"overall": 2, "a": None}, "advantages": {"b": float("nan")}},
            ]
        },
        {"images": None, "answers": "one", "evidence": "x", "step": "7", "is_sufficient": 1},
    ]
    write_jsonl(tmp_path / "rollouts" / "step_000001.jsonl", rows)
    groups = rollout_viewer(read_folder(tmp_path), store, steps=9, groups=9).groups
    assert [len(g.samples) for g in groups] == [0, 0, 1, 0] and groups[3].answers == ("one",)
    [sample] = groups[2].samples
    assert (
        groups[2].columns == ("a", "b")
        and sample.total == "2.00"
        and sample.cells[0].reward == "n/a"
    )
    assert sample.cells[1].advantage == "nan" and sample.cells[1].shade == ""
    assert rollout_viewer(RunFolder(tmp_path), store, steps=9, groups=9) is None


def test_shades_diverge_from_zero():
    assert [shade(a) for a in (-9.0, -1.0, -0.2, 0.0, 0.2, 0.6, 2.0, None)] == [
        "adv-n4",
        "adv-n2",
        "",
        "",
        "",
        "adv-p1",
        "adv-p4",
        "",
    ]


def test_spread_takes_first_and_last():
    assert (
        spread(3, 5) == [0, 1, 2]
        and spread(100, 2) == [0, 99]
        and spread(9, 1) == [8]
        and spread(9, 0) == []
    )
    assert len(set(spread(61, 6))) == 6


OFFICIAL = json.loads((Path(__file__).parents[1] / "golden" / "eval.json").read_text())["cases"]


@pytest.mark.parametrize(
    "case", [c for c in OFFICIAL if isinstance(c["gold"], list)], ids=lambda c: c["name"]
)
def test_verdicts_equal_the_official_accuracy(case):
    """Against the released evaluation's "acc" of the same extracted answer, golds and sufficiency."""
    row = {
        "answer": case["extracted"],
        "answers": case["gold"],
        "is_sufficient": case["is_sufficient"],
    }
    assert verdict(row) == ("right" if case["metrics"]["acc"] else "wrong")


def test_a_verdict_of_the_run_itself_counts_more():
    assert verdict({"answer": "1", "answers": ["2"], "accuracy": 1.0}) == "right"
    assert verdict({"answer": "1", "answers": ["1"], "correct": False}) == "wrong"
    assert verdict({"answer": "1", "answers": []}) == "unjudged"


def test_the_judge_is_named(store):
    rows = [
        {"id": str(i), "answer": "1", "answers": ["1"], "accuracy": 1.0, "mode": "strict"}
        for i in range(3)
    ]
    assert predictions_viewer(rows, store, limit=9).judge == "as the run judged them (mode strict)"
    del rows[0]["accuracy"]
    assert (
        predictions_viewer(rows, store, limit=9).judge
        == "2 as the run judged them (mode strict), the others judged here"
    )
    failed = {"id": "a", "finish": "error", "error": "p.png: truncated", "answer": ""}
    assert predictions_viewer([failed], store, limit=9).rows[0].flags == (
        "error: p.png: truncated",
    )


def test_predictions_shown_hold_both_verdicts(store):
    rows = make_predictions(np.random.default_rng(5), 200)
    viewer = predictions_viewer(rows, store, limit=40)
    right = sum(verdict(r) == "right" for r in rows)
    assert viewer.counts == {"right": right, "wrong": 200 - right} and viewer.total == 200
    assert viewer.shown == {"right": 20, "wrong": 20} and len(viewer.rows) == 40
    assert (
        sum(t.total for t in viewer.tallies) == 200
        and sum(t.right for t in viewer.tallies) == right
    )
    kinds = [r["is_sufficient"] for r in rows]
    assert [t.total for t in viewer.tallies] == [sum(kinds), 200 - sum(kinds)]
    refused = [
        r for r in rows if r["is_sufficient"] and verdict(r) == "wrong" and refuses(r["answer"])
    ]
    assert viewer.tallies[0].refused == len(refused) > 0


def test_room_is_shared_evenly():
    assert share_room([100, 100, 0], 40) == [20, 20, 0]
    assert share_room([100, 5, 0], 40) == [35, 5, 0]
    assert share_room([1, 2, 3], 40) == [1, 2, 3] and share_room([5, 5, 5], 0) == [0, 0, 0]
