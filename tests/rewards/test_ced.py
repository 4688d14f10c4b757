"""CED's margin, gate and reward: published values, the table of the spec, and the routes (1.2, 1.5)."""

import dataclasses

import numpy as np
import pytest

from evisrag_jax.rewards.ced.config import CedConfig, RegionConfig, preset
from evisrag_jax.rewards.ced.reward import ced_reward, gate, margin, raw_gap, support, z_score
from evisrag_jax.rewards.ced.spans import record_tokens, scope_tokens

MARGINS = np.array([-1.0, -0.15, 0.0, 0.15, 0.8, 1.0])
PAPER = [[-0.10, 0.11, 0.35, 0.59, 0.78, 0.80], [-0.10, -0.05, -0.09, -0.13, -0.09, -0.075]]
RELEASED = [[-0.10, 0.17, 0.50, 0.83, 1.08, 1.10], [-0.10, -0.06, -0.125, -0.19, -0.17, -0.15]]


def one(name, right, m, **kinds):
    return float(ced_reward(np.array(right), np.array(m), preset(name), **kinds))


def test_gate():
    config = CedConfig()
    assert gate(np.array(0.0), config) == 0.5
    assert gate(np.array(-0.1516), config) == pytest.approx(0.18, abs=5e-4)
    m = np.linspace(-1, 1, 41)
    assert gate(m, config) == pytest.approx(1 / (1 + np.exp(-2 * m / 0.2)), abs=1e-12)
    sigmoid = dataclasses.replace(config, gate="sigmoid")
    assert gate(m, sigmoid) == pytest.approx(1 / (1 + np.exp(-m / 0.2)), abs=1e-12)
    for hard in (
        dataclasses.replace(config, gate="hard"),
        dataclasses.replace(config, tau_gate=0.0),
    ):
        assert gate(np.array([-0.1, 0.0, 0.1]), hard).tolist() == [0, 1, 1]
    assert gate(m, dataclasses.replace(config, gate="none")).tolist() == [1] * 41


def test_the_published_pair():
    """Two right answers of one group, of gates 0.18 and 1.00: rewards 0.11 and 0.78."""
    assert one("paper", True, -0.1516) == pytest.approx(0.111, abs=5e-4)
    assert one("paper", True, 0.80) == pytest.approx(0.780, abs=5e-4)
    assert one("released", True, -0.1516) == pytest.approx(0.165, abs=5e-4)


@pytest.mark.parametrize(("name", "table"), [("paper", PAPER), ("released", RELEASED)])
def test_value_table(name, table):
    for right, wanted in zip((True, False), table, strict=True):
        got = ced_reward(np.full(6, right), MARGINS, preset(name))
        assert got == pytest.approx(wanted, abs=0.00501)  # the table's last digit


def test_other_modes():
    assert one("correctness_only", True, 0.9) == 1 and one("correctness_only", False, 0.9) == -0.25
    assert one("additive", True, 0.5) == pytest.approx(1.05)
    assert one("additive", False, -0.5) == pytest.approx(-0.30)
    base = 0.7 * np.tanh(0.1 / 0.2)
    assert one("soft_shaping", True, 0.1) == pytest.approx(0.25 + 0.75 * base)
    assert one("soft_shaping", True, -0.1) == pytest.approx(0.25)  # max(0, base)
    assert one("soft_shaping", False, 0.1) == pytest.approx(-0.60 + 0.20 * base)
    assert one("soft_shaping", False, 0.1, parsable=np.array(False)) == pytest.approx(
        -1 + 0.1 * base
    )
    assert one("soft_shaping", False, 0.1, gold=np.array(False)) == pytest.approx(0.25 * base)


def test_routes():
    """Unaudited responses are paid for correctness; unparsable ones at most the penalty; no gold pays
    the tie-breaker alone; the yes/no term counts where there is one."""
    right, m = np.array([True, False]), np.array([0.8, 0.8])
    plain = ced_reward(right, m, preset("paper"), audited=np.array([False, False]))
    assert plain.tolist() == [1.0, -0.25]
    assert one("paper", False, 1.0, parsable=np.array(False)) == -0.75
    assert one("released", False, 1.0, parsable=np.array(False)) == pytest.approx(-0.15, abs=1e-4)
    assert one("paper", False, 0.5, gold=np.array(False)) == pytest.approx(0.05)
    added = one("paper", True, 0.0, answer_margin=np.array(0.5)) - one("paper", True, 0.0)
    assert added == pytest.approx(0.3 * np.tanh(0.5))
    assert one("paper", True, 0.0, answer_margin=np.array(np.nan)) == pytest.approx(0.35)
    assert one("paper", True, 1.0, answer_margin=np.array(5.0)) == 1.0  # clipped
    kept = dataclasses.replace(preset("released"), gate_applies="correct_only")
    wrong = ced_reward(np.array(False), np.array(-1.0), kept)
    assert float(wrong) == pytest.approx(-0.35)


def test_margins():
    """Population std; the tanh of one z-score; floors for rounding noise; K = 0 and 1."""
    config = dataclasses.replace(CedConfig(), sigma_floor=0.05)
    evidence, controls = np.array(0.5), np.array([0.1, 0.2, 0.3])
    z = (0.5 - 0.2) / (np.sqrt(0.02 / 3) + 0.05)
    assert z_score(evidence, controls, config) == pytest.approx(z)
    assert margin(evidence, controls, config) == pytest.approx(np.tanh(z))
    assert raw_gap(evidence, controls, config) == pytest.approx(0.3)
    raw = dataclasses.replace(config, margin="raw")
    assert margin(evidence, controls, raw) == pytest.approx(0.3)
    tanh_raw = dataclasses.replace(config, margin="tanh_raw")
    assert margin(evidence, controls, tanh_raw) == pytest.approx(np.tanh(0.3))
    assert margin(evidence, np.zeros(0), config) == pytest.approx(np.tanh(0.5))
    assert z_score(evidence, np.array([0.1]), config) == pytest.approx(0.4 / 0.05)
    noise = np.array([3e-7, -2e-7, 1e-7])
    assert margin(np.array(4e-7), noise, CedConfig()) == 0.0


def test_support():
    logp = np.array([[-1.0, -2.0, -4.0], [-3.0, np.nan, np.nan]])
    span = np.array([[True, False, True], [False, False, False]])
    assert support(logp, span).tolist() == [-2.5, 0.0]


TEXT = "<evidence>\n[1]: red 3\n[2]: no relevant information\n</evidence>\n<answer> 42 </answer>"


def offsets_of(text, size=1):
    return np.array([[i, min(i + size, len(text))] for i in range(0, len(text), size)], np.int32)


def picked(tokens, text, size=1):
    return "".join(
        text[a:b] for (a, b), on in zip(offsets_of(text, size), tokens, strict=True) if on
    )


def test_scopes():
    offsets = offsets_of(TEXT)
    assert picked(scope_tokens(TEXT, offsets, "answer"), TEXT) == "42"
    assert picked(scope_tokens(TEXT, offsets, "answer", tags=True), TEXT) == "<answer> 42 </answer>"
    body = "[1]: red 3\n[2]: no relevant information"
    assert picked(scope_tokens(TEXT, offsets, "evidence"), TEXT) == body
    assert scope_tokens(TEXT, offsets, "full").all()
    assert not scope_tokens("42", offsets_of("42"), "answer").any()
    assert not scope_tokens("<answer> </answer>", offsets_of("<answer> </answer>"), "answer").any()
    records = record_tokens(TEXT, offsets)
    assert {i: picked(own, TEXT) for i, own in records.items()} == {
        1: "red 3",
        2: "no relevant information",
    }
    wide = scope_tokens(TEXT, offsets_of(TEXT, 3), "answer")
    assert "42" in picked(wide, TEXT, 3) and wide.sum() <= 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "x"}, "mode='x'; one of gated"),
        ({"margin": "x"}, "margin='x'; one of tanh_z"),
        ({"sigma_floor": 0.0}, "sigma_floor=0 divides by 0"),
        ({"tau_gate": -1.0}, "tau_gate=-1.0; not negative"),
        ({"tau_ans": 0.0}, "tau_ans=0.0; positive"),
        ({"clip": (1.0, -1.0)}, "clip="),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        CedConfig(**fields)


def test_region_switches_are_checked():
    with pytest.raises(ValueError, match="neutraliser='x'; one of mean"):
        RegionConfig(neutraliser="x")
    with pytest.raises(ValueError, match="ring=0"):
        RegionConfig(ring=0)
    with pytest.raises(ValueError, match="max_iou=1"):
        RegionConfig(max_iou=1.0)
    with pytest.raises(ValueError, match="preset 'x'; one of paper, released"):
        preset("x")
