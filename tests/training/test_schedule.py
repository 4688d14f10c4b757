"""Learning-rate schedules: released numbers, the closed formula, and use inside optax under jit."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from evisrag_jax.training.schedule import constant_with_warmup, cosine_with_warmup

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "schedule.json"


def rates(schedule, count):
    return [float(schedule(k)) for k in range(count)]


def test_golden_schedule_warmup():
    """Released constant schedule: with any warm-up the first update has rate 0."""
    data = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for case in data["lr"]:
        schedule = constant_with_warmup(data["base_lr"], case["warmup_steps"], first_step_lr="zero")
        want = case["lr_used_at_update"]
        np.testing.assert_allclose(rates(schedule, len(want)), want, rtol=1e-6, atol=0)


def test_first_step_base_wastes_no_update():
    assert rates(constant_with_warmup(2.0, 0), 3) == [2.0, 2.0, 2.0]
    assert rates(constant_with_warmup(2.0, 4), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_matches_the_formula(final):
    schedule = cosine_with_warmup(3.0, 20, 5, final=final, first_step_lr="zero")
    for k in range(25):
        progress = min(max(k - 5, 0) / 15, 1.0)
        want = (
            3.0 * min(1.0, k / 5) * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
        )
        assert float(schedule(k)) == pytest.approx(want, abs=1e-6)
    assert float(cosine_with_warmup(3.0, 10)(0)) == 3.0


def test_optax_takes_them_under_jit():
    """sgd with the schedule moves by exactly the scheduled rates."""
    tx = optax.sgd(constant_with_warmup(1.0, 2, first_step_lr="zero"))
    params, state = jnp.zeros(()), tx.init(jnp.zeros(()))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jnp.ones(()), state)
        return optax.apply_updates(params, updates), state

    seen = []
    for _ in range(4):
        params, state = step(params, state)
        seen.append(float(params))
    assert seen == [0.0, -0.5, -1.5, -2.5]


def test_bad_settings_are_refused():
    for make, message in (
        (lambda: constant_with_warmup(1.0, -1), "warmup=-1"),
        (lambda: constant_with_warmup(1.0, first_step_lr="half"), "first_step_lr='half'"),
        (lambda: cosine_with_warmup(1.0, 5, 5), "total=5"),
        (lambda: cosine_with_warmup(1.0, 5, final=2.0), "final=2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
