"""The RL trainer: collect groups, update, log; everything about the environment is an argument.

    params ─collect(params, k)─► Collected ─► RLBatch on the mesh ─► `updates` optimiser steps ─► metrics

The loop itself (metrics, validation, checkpoints, exact resume) is `training.loop.fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.prompts.sections import TAGS
from evisrag_jax.rl.collect import Collected
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.update import (
    RLBatch,
    UpdateConfig,
    compile_old_log_probs,
    compile_update,
    token_advantages,
)
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.training.batching import put_batch
from evisrag_jax.training.loop import FitResult, fit
from evisrag_jax.training.state import TrainState, full_params, state_shardings

Collect = Callable[[Any, int], Collected]

GAP_ALARM = 0.05  # mean |log-prob| difference between sampler and trainer (nats)
CLIPPED_STEPS = 3  # steps in a row with nothing but cut responses that call for a warning

log = logging.getLogger(__name__)


def fit_rl(
    *,
    run: RunFolder,
    state: TrainState,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    collect: Collect,
    mesh: Mesh,
    steps: int,
    checkpoints: Checkpoints,
    data: Any = None,
    validate: Callable[[Any, int], Mapping[str, Any]] | None = None,
    rollouts_every: int = 1,
    rollout_rows: int = 4,
    **loop: Any,
) -> FitResult:
    """Trains `state` to `steps` rollouts.

    Args:
        collect: (nested parameters, k) → the groups of step k; draws from `data` where that is given.
        data: the stream behind `collect`, whose place is saved with the state.
        validate: (nested parameters, k) → metrics.
        rollouts_every, rollout_rows: how often, and how many prompts a step, rollouts/ gets.
        loop: further arguments of `training.loop.fit`.
    """
    rl = settings.rl
    shardings = state_shardings(model, mesh, state)
    update = compile_update(model, settings, mesh, shardings)
    old_log_probs = compile_old_log_probs(model, settings, mesh, shardings)
    advantages = jax.jit(partial(_logged_advantages, rl=rl))
    watch = _Watch()

    def step_fn(state: TrainState, _: Any, k: int) -> tuple[TrainState, dict[str, Any]]:
        with run.timed("collect", k):
            got = collect(full_params(state.trainable, state.frozen), k)
        with run.timed("prepare", k):
            batch = put_batch(_batch(got), mesh)
            if rl.updates > 1:
                old = old_log_probs(state.trainable, state.frozen, batch.groups)
                batch = batch._replace(old=old)
        with run.timed("update", k):
            if k % rollouts_every == 0:
                shown = jax.device_get(advantages(batch))
                run.write_rollouts(k, _rows(got, shown, rl)[:rollout_rows])
            metrics: dict[str, Any] = {}
            for part in _parts(batch, rl.updates, mesh):
                state, metrics = update(state, part)
            metrics = jax.device_get(metrics)
        times = {f"time/{name}": seconds for name, seconds in got.times.items()}
        watch(got.metrics, metrics, k)
        return state, got.metrics | metrics | times

    def check(state: TrainState, k: int) -> Mapping[str, Any]:
        return validate(full_params(state.trainable, state.frozen), k)

    return fit(
        run=run,
        state=state,
        step_fn=step_fn,
        steps=steps,
        checkpoints=checkpoints,
        data=data,
        validate=None if validate is None else check,
        shown=("reward/overall", "loss/total"),
        **loop,
    )


def _batch(got: Collected) -> RLBatch:
    return RLBatch(got.groups, got.sampled, None, got.rewards, got.masks, got.valid)


def _parts(batch: RLBatch, updates: int, mesh: Mesh) -> list[RLBatch]:
    """The mini-batches of one rollout: every `updates`-th prompt, so devices keep their rows."""
    if updates == 1:
        return [batch]
    sharding = meshes.batch_sharding(mesh)
    return [_part(batch, updates=updates, part=i, sharding=sharding) for i in range(updates)]


@partial(jax.jit, static_argnames=("updates", "part", "sharding"))
def _part(batch: RLBatch, *, updates: int, part: int, sharding: Any) -> RLBatch:
    taken = jax.tree.map(lambda a: a.reshape(-1, updates, *a.shape[1:])[:, part], batch)
    return jax.lax.with_sharding_constraint(taken, sharding)


def _logged_advantages(batch: RLBatch, *, rl: RLConfig) -> Any:
    """[P, G, C, 2]: the least and the largest advantage on each channel's own tokens."""
    T = batch.groups.tokens.shape[-1]
    response = jnp.arange(T) < batch.groups.lengths[..., None]
    values, masks = token_advantages(batch.rewards, batch.masks, batch.valid, response, rl)
    shown = batch.masks & response[:, :, None] & batch.valid[..., None, None]
    values = jnp.broadcast_to(values, shown.shape)
    low = jnp.min(values, -1, where=shown, initial=0.0)
    high = jnp.max(values, -1, where=shown, initial=0.0)
    return jnp.where(-low > high, low, high)


def _rows(got: Collected, shown: np.ndarray, rl: RLConfig) -> list[dict[str, Any]]:
    """The collected rows with each sample's advantage by channel (its largest, by size)."""
    for p, row in enumerate(got.rows):
        for g, sample in enumerate(row["samples"]):
            sample["advantages"] = dict(
                zip(rl.reward.channels, map(float, shown[p, g]), strict=True)
            )
    return got.rows


class _Watch:
    """Warnings that a curve would show too late."""

    def __init__(self) -> None:
        self.clipped = 0

    def __call__(self, rollout: Mapping[str, float], update: Mapping[str, Any], k: int) -> None:
        gap = float(update["rollout/logp_gap_mean"])
        if gap > GAP_ALARM:
            log.warning(
                "step %d: sampled and trained log-probabilities differ by %.3f on average (alarm "
                "at %.2f): sampler and trainer do not compute the same distribution",
                *(k, gap, GAP_ALARM),
            )
        if k == 1 and rollout.get("reward/format", 1.0) < 0.5:
            log.warning(
                "step 1: only %.0f %% of the responses have the format (%s); start from a model "
                "that was fine-tuned on it",
                100 * rollout["reward/format"],
                " ".join(f"<{tag}>" for tag in TAGS),
            )
        self.clipped = self.clipped + 1 if rollout["rollout/clipped_ratio"] == 1 else 0
        if self.clipped == CLIPPED_STEPS:
            log.warning(
                "step %d: every response of the last %d steps was cut at max_tokens; raise it",
                *(k, CLIPPED_STEPS),
            )
