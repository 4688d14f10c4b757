"""What rewards say beside their mean, on hand-made groups."""

import numpy as np
import pytest

from evisrag_jax.data.schema import Record
from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.insight import (
    ALL_NO_INFO,
    EMPTY,
    EXACT,
    channel_metrics,
    flags,
    response_metrics,
    token_runs,
)

ASKED = Record("q", "?", ("a.png", "b.png"), ("23",), True)
LACKING = Record("q", "?", ("a.png",), ("23",), False)


def response(evidence="[1]: Oslo rain 23", think="so", answer="23"):
    return (
        f"<observe> two pages </observe>\n<evidence>\n{evidence}\n</evidence>\n"
        f"<think> {think} </think>\n<answer> {answer} </answer>"
    )


@pytest.mark.parametrize(
    ("text", "record", "want"),
    [
        (response(), ASKED, EXACT),
        (response("[1]: no relevant information\n[2]: No relevant information."), ASKED,
         EXACT | ALL_NO_INFO),
        (response("[1]: no relevant information\n[2]: Oslo 23", answer="24"), ASKED, 0),
        (response("nothing"), ASKED, EXACT),
        (response(think=" ", answer=""), ASKED, EMPTY),
        (response(answer="insufficient to answer"), LACKING, EXACT),
        (response(), LACKING, 0),
        ("no tags", ASKED, 0),
    ],
)  # fmt: skip
def test_flags_of_a_response(text, record, want):
    assert flags(text, record) == want


def test_channels_by_hand():
    """Two groups of three; the third response of the second group does not exist."""
    rewards = np.zeros((2, 3, 3))
    rewards[0, :, 1] = [0, 0.5, 1]
    rewards[:, :, 2] = 1
    rewards[1, 2] = 9.0
    valid = np.array([[True] * 3, [True, True, False]])
    got = channel_metrics(rewards, valid, RewardConfig())
    assert got["reward/derivation_flat"] == 0.5 and got["reward/format_flat"] == 1.0
    assert got["reward/derivation_low"] == 3 / 5 and got["reward/derivation_high"] == 1 / 5
    assert got["reward/derivation_std"] == pytest.approx(np.std([0, 0.5, 1, 0, 0]))
    assert got["reward/format_high"] == 1.0 and got["reward/perception_low"] == 1.0
    assert channel_metrics(rewards, np.zeros((2, 3), bool), RewardConfig()) == {}


def test_bounds_of_every_channel():
    code = RewardConfig(mode="code").bounds
    assert code["accuracy"] == (0, 3) and code["overlong"] == (-1, 0) and code["isThink"] == (-1, 0)
    assert RewardConfig(kind="r1vl").bounds == {
        "correct": (0, 1),
        "steps": (0, 0.1),
        "validity": (0, 1),
    }


def test_credit_that_no_exact_answer_earns():
    """Mean derivation 0.5 with one exact answer of four: soft credit 0.25; lengths by right and wrong."""
    bits = np.array([[EXACT, 0], [ALL_NO_INFO | EMPTY, 0]], np.uint8)
    rewards = np.zeros((2, 2, 3))
    rewards[..., 1] = [[1, 0.5], [0, 0.5]]
    length = np.array([[10, 20], [30, 40]], np.int32)
    got = response_metrics(bits, length, rewards, RewardConfig())
    assert got["rollout/soft_credit"] == pytest.approx(0.25) and got["rollout/exact"] == 0.25
    assert got["rollout/all_no_info"] == got["rollout/empty_sections"] == 0.25
    assert got["rollout/length_right"] == 10 and got["rollout/length_wrong"] == 30
    none = response_metrics(bits * 0, length, rewards, RewardConfig())
    assert "rollout/length_right" not in none


def test_tokens_of_one_value_are_one_run():
    """A token without characters (the end) and one that is not shown break nothing and are in no run."""
    offsets = np.array([[0, 2], [2, 5], [5, 6], [6, 9], [9, 9]], np.int32)
    values = np.array([0.5, 0.5, 9.0, 0.5, 0.5])
    shown = np.array([True, True, False, True, True])
    assert token_runs(values, shown, offsets) == [[0, 5, 0.5], [6, 9, 0.5]]
    assert token_runs(values, np.ones(5, bool), offsets) == [[0, 5, 0.5], [5, 6, 9.0], [6, 9, 0.5]]
