"""Alarms: each begins when it should, is said once, and may come again."""

import pytest

from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.alarms import Alarms

FINE = {
    "rollout/logp_gap_mean": 0.0,
    "reward/format": 1.0,
    "rollout/length_mean": 50.0,
    "loss/entropy": 0.5,
    "loss/kl": 0.001,
    "rollout/soft_credit": 0.05,
}


def said(alarms, *rows, first=1):
    """(step, name) of what rows raise, in order."""
    out = []
    for step, row in enumerate(rows, start=first):
        out += [(one.step, one.name) for one in alarms(FINE | row, {}, step)]
    return out


def test_b51_a_gap_between_sampler_and_trainer():
    rows = ({"rollout/logp_gap_mean": 0.049}, {"rollout/logp_gap_mean": 0.051})
    alarms = Alarms()
    assert said(alarms, *rows) == [(2, "logp_gap")]
    (told,) = Alarms()({}, FINE | {"rollout/logp_gap_mean": 0.2}, 3)
    assert told.message.startswith("sampled and trained log-probabilities differ by 0.200")


def test_b46_three_steps_of_cut_responses():
    """B46: a step with one whole response starts the count again."""
    rows = [{"rollout/clipped_ratio": r} for r in (1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0)]
    assert said(Alarms(), *rows) == [(6, "clipped")]


def test_b64_a_model_without_the_format_is_said_at_the_first_step():
    """B64: under half of the responses; with two sections these two are named; never with step prompts."""
    bare = {"reward/format": 0.25}
    assert said(Alarms(), bare, bare) == [(1, "format_start")]
    two = Alarms(RewardConfig(sections=("think", "answer"), unpaid=("perception",)))
    (told,) = two(FINE | bare, {}, 1)
    assert "(<think> <answer>)" in told.message and "25%" in told.message
    assert said(Alarms(whole=False), bare) == []
    assert said(Alarms(), {"reward/format": 0.5}) == []


@pytest.mark.parametrize(
    ("name", "row", "almost"),
    [
        ("format_collapse", {"reward/format": 0.49}, {"reward/format": 0.51}),
        ("length", {"rollout/length_mean": 24.0}, {"rollout/length_mean": 26.0}),
        ("length", {"rollout/length_mean": 101.0}, {"rollout/length_mean": 99.0}),
        ("entropy", {"loss/entropy": 0.04}, {"loss/entropy": 0.06}),
        ("kl", {"loss/kl": 0.11}, {"loss/kl": 0.09}),
        ("soft_credit", {"rollout/soft_credit": 0.31}, {"rollout/soft_credit": 0.29}),
        ("no_information", {"rollout/all_no_info": 0.95}, {"rollout/all_no_info": 0.85}),
    ],
)
def test_against_the_first_steps(name, row, almost):
    """Five fine steps, then: just inside, outside (said once), inside, outside again (said again)."""
    rows = [{}] * 5 + [almost, row, row, {}, row]
    assert said(Alarms(), *rows) == [(7, name), (10, name)]


def test_nothing_to_learn_and_nothing_left_to_learn():
    reward = RewardConfig(unpaid=("perception",))
    flat = {"reward/derivation_flat": 1.0, "reward/format_flat": 1.0, "reward/perception_flat": 0.0}
    assert said(Alarms(reward), flat, flat, flat) == [(3, "flat")]
    assert said(Alarms(), flat, flat, flat) == [], "perception still differs, and is paid"
    top = {f"reward/{n}_high": 0.96 for n in ("perception", "derivation", "format")}
    assert said(Alarms(), top) == [(1, "at_the_top")]


def test_a_run_that_goes_on_is_fed_what_it_logged():
    """Rows of metrics.jsonl hold more than numbers of this kind; they set the base for what follows."""
    alarms = Alarms()
    for step in range(1, 6):
        assert alarms(FINE | {"step": step, "nonfinite": ["x"], "lr": None}, {}, step) == []
    assert alarms.steps == 5
    assert said(alarms, {"loss/entropy": 0.01}, first=6) == [(6, "entropy")]
