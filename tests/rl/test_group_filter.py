"""The group filter: released band, spread, both; B55's filter cases."""

import numpy as np
import pytest

from evisrag_jax.rl.filter import FilterConfig, filter_groups


def judge(groups, rule="both", **options):
    """Groups of single-channel rewards."""
    rewards = np.asarray(groups, np.float32)[..., None]
    return filter_groups(rewards, np.ones(rewards.shape[:2], bool), FilterConfig(rule, **options))


GROUPS = [
    [3.5] * 8,  # constant, inside the band
    [0.0] * 7 + [0.04],  # mean 0.005 with spread
    [7.0] * 8,  # always right
    [0.0] * 8,  # always wrong
    [0.0] * 4 + [7.0] * 4,
    [6.9] * 8,  # on the edge: the band is open
]


def test_b55_constant_group_has_no_signal_although_its_mean_is_in_the_band():
    """B55: [3.5] * 8 passes the released band only; mean 0.005 with spread the variance only."""
    assert judge(GROUPS, "mean_band").keep.tolist() == [True, False, False, False, True, False]
    assert judge(GROUPS, "variance").keep.tolist() == [False, True, False, False, True, False]
    both = judge(GROUPS)
    assert both.keep.tolist() == [False, False, False, False, True, False]
    assert both.reasons == ("constant", "low", "constant", "constant", "", "constant")
    assert judge(GROUPS, "mean_band").reasons == ("", "low", "high", "low", "", "high")


def test_summary_and_empty_keep():
    """Nothing kept is a result (the release indexes an empty list); so is no group at all."""
    none = judge(GROUPS[:1])
    assert not none.keep.any()
    want = {
        "groups": 1,
        "kept": 0,
        "dropped_constant": 1,
        "dropped_low": 0,
        "mean": 3.5,
        "spread": 0,
    }
    assert {key: none.summary()[key] for key in want} == want
    empty = filter_groups(
        np.zeros((0, 8, 6), np.float32), np.zeros((0, 8), bool), FilterConfig("both")
    )
    assert empty.keep.shape == (0,) and empty.summary()["groups"] == 0


def test_spread_looks_at_channels_and_at_valid_responses():
    """Channels that cancel in the sum are a signal; what a padding row holds is none."""
    rewards = np.zeros((1, 3, 2), np.float32)
    rewards[0, 0], rewards[0, 1] = (1, 0), (0, 1)
    valid = np.asarray([[True, True, False]])
    assert filter_groups(rewards, valid, FilterConfig("both")).keep.all()
    rewards[0, :2], rewards[0, 2] = 1.0, 9.0
    got = filter_groups(rewards, valid, FilterConfig("both"))
    assert not got.keep.any() and got.mean[0] == 2.0 and got.spread[0] == 0.0
    nobody = filter_groups(rewards, np.zeros((1, 3), bool), FilterConfig("both"))
    assert nobody.reasons == ("constant",) and np.isfinite(nobody.mean).all()


def test_bad_settings_are_refused():
    for options, message in (
        ({"rule": "std"}, "rule='std'"),
        ({"low": 2.0, "high": 1.0}, "empty band"),
        ({"min_spread": -1.0}, "min_spread=-1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            FilterConfig(**options)
