"""The trainer's host side: mini-batches of a rollout, metrics over updates, logged advantages, alarms."""

import logging

import jax
import numpy as np
import pytest

from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.rl.trainer import (
    Watch,
    logged_advantages,
    over_updates,
    parts,
    with_advantages,
)
from evisrag_jax.rl.update import RLBatch
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.batching import put_batch
from evisrag_jax.training.forward import GroupBatch


def batch(P=4, G=3, C=6, T=8):
    """Random masks, rewards and lengths; one response is cut and left out."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, T + 1, (P, G)).astype(np.int32)
    tokens = np.arange(P * G * T, dtype=np.int32).reshape(P, G, T)
    trained = np.ones((P, G), bool)
    trained[1, 1] = False
    return RLBatch(
        groups=GroupBatch(None, None, tokens, lengths),
        sampled=np.zeros((P, G, T), np.float32),
        old=None,
        rewards=rng.standard_normal((P, G, C)).astype(np.float32),
        masks=rng.random((P, G, C, T)) < 0.7,
        valid=np.ones((P, G), bool),
        trained=trained,
        stale=np.zeros(P, bool),
    )


def test_mini_batches_take_every_nth_prompt():
    """So that each device keeps rows of its own; together they are the batch, each prompt once."""
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    whole = batch()
    placed = put_batch(whole, mesh)
    assert parts(placed, 1, mesh) == [placed]
    two = parts(placed, 2, mesh)
    for i, part in enumerate(two):
        np.testing.assert_array_equal(part.groups.tokens, whole.groups.tokens[i::2])
        np.testing.assert_array_equal(part.trained, whole.trained[i::2])
        assert part.old is None and part.groups.tokens.sharding.num_devices == 2


def test_metrics_of_several_updates_become_one_row():
    rows = [
        {"loss/total": 1.0, "rollout/trained_tokens": 5, "rollout/logp_gap_max": 0.3, "lr": 0.1},
        {"loss/total": 3.0, "rollout/trained_tokens": 7, "rollout/logp_gap_max": 0.2, "lr": 0.2},
    ]
    got = over_updates([row | {"optim/empty": i} for i, row in enumerate(rows)])
    want = {"loss/total": 2.0, "rollout/trained_tokens": 12, "rollout/logp_gap_max": 0.3}
    assert got == want | {"lr": 0.2, "optim/empty": 1}


def test_logged_advantages_are_those_of_the_channels():
    """Code: the z-score of each channel, 0 where it has no trained token. Rows take them by name."""
    code = RewardConfig(mode="code")
    rl = RLConfig(estimator="code", reward=code, loss=PolicyLossConfig.code())
    data = batch()
    data.masks[2, 0, 3] = False
    got = np.asarray(jax.jit(lambda b: logged_advantages(b, rl=rl))(data))
    r = data.rewards.astype(np.float64)
    want = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
    t = np.arange(8) < data.groups.lengths[..., None]
    seen = (data.masks & (t & data.trained[..., None])[:, :, None]).any(-1)
    np.testing.assert_allclose(got, np.where(seen, want, 0.0), rtol=2e-5, atol=1e-6)
    assert not seen[1, 1].any() and not seen[2, 0, 3]
    rows = [{"samples": [{} for _ in range(3)]}]
    sample = with_advantages(rows, got, rl)[0]["samples"][2]
    assert sample["advantages"] == dict(zip(code.channels, got[0, 2].tolist(), strict=True))


@pytest.fixture
def warned(caplog):
    """Messages of the trainer's log."""
    caplog.set_level(logging.WARNING, logger="evisrag_jax.rl.trainer")
    return lambda: [record.getMessage() for record in caplog.records]


def test_b51_a_gap_between_sampler_and_trainer_is_an_alarm(warned):
    watch = Watch()
    watch({}, {"rollout/logp_gap_mean": 0.049}, 2)
    assert not warned()
    watch({}, {"rollout/logp_gap_mean": 0.051}, 3)
    assert "step 3: sampled and trained log-probabilities differ by 0.051" in warned()[0]


def test_b46_three_steps_of_cut_responses_are_said(warned):
    """B46: and a step with one whole response starts the count again."""
    watch, fine = Watch(), {"rollout/logp_gap_mean": 0.0}
    for k, ratio in enumerate([1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0], start=1):
        watch({"rollout/clipped_ratio": ratio}, fine, k)
    assert (
        len(warned()) == 1 and "step 6: every response of the last 3 steps was cut" in warned()[0]
    )


def test_a_model_without_the_format_is_said_once(warned):
    watch, fine = Watch(), {"rollout/logp_gap_mean": 0.0}
    for k in (1, 2):
        watch({"reward/format": 0.25}, fine, k)
    assert len(warned()) == 1 and "only 25 % of the responses have the format" in warned()[0]
