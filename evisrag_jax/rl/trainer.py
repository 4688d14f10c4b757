"""The RL trainer: collect groups, update, log; everything about the environment is an argument.

    params ─collect(params, k)─► Collected ─► RLBatch on the mesh ─► `updates` optimiser steps ─► metrics
                                     └──────► rollouts/step_k.jsonl, with the advantages

The loop itself (metrics, validation, checkpoints, exact resume) is `training.loop.fit`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.rl.alarms import Alarms
from evisrag_jax.rl.collect import Collected
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.insight import token_runs
from evisrag_jax.rl.interference import compile_interference
from evisrag_jax.rl.passes import (
    UpdateConfig,
    compile_masked_log_probs,
    compile_old_log_probs,
    compile_params,
    compile_reference_log_probs,
)
from evisrag_jax.rl.update import (
    RLBatch,
    compile_update,
    token_advantages,
    trained_mask,
)
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.runtime.timeline import StepTimeline
from evisrag_jax.runtime.watchdog import beat
from evisrag_jax.training.batching import put_batch
from evisrag_jax.training.layout import SamplingLayout
from evisrag_jax.training.loop import FitResult, fit
from evisrag_jax.training.state import Flat, TrainState, state_shardings

Collect = Callable[[Any, int], Collected]

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
    layout: SamplingLayout | None = None,
    data: Any = None,
    validate: Callable[[Any, int], Mapping[str, Any]] | None = None,
    rollouts_every: int = 1,
    rollout_rows: int = 4,
    reference: Flat | None = None,
    interference_every: int = 0,
    **loop: Any,
) -> FitResult:
    """Trains `state` to `steps` rollouts.

    Args:
        collect: (nested parameters, k) → the groups of step k; draws from `data` where that is given.
            The parameters are in the compute dtype and gone after the call.
        layout: where those parameters lie; None for as in training.
        data: the stream behind `collect`, whose place is saved with the state.
        validate: (nested parameters, k) → metrics; its parameters are as those of `collect`.
        rollouts_every, rollout_rows: rollouts/ gets so many prompts of the first, of every so many-th
            and of the last step.
        reference: see `passes.hold_reference`; needed with `loss.kl_coef`.
        interference_every: steps between two measurements of `rl.interference`, the first step's
            included; 0 for none.
        loop: further arguments of `training.loop.fit`.
    """
    rl = settings.rl
    shardings = state_shardings(model, mesh, state)
    update = compile_update(model, settings, mesh, shardings)
    old_log_probs = compile_old_log_probs(model, settings, mesh, shardings)
    masked_log_probs = compile_masked_log_probs(model, settings, mesh, shardings)
    reference_log_probs = compile_reference_log_probs(model, settings, mesh, shardings)
    interference = compile_interference(model, settings, mesh, shardings)
    if rl.loss.kl_coef and reference is None:
        raise ValueError(f"loss.kl_coef={rl.loss.kl_coef} needs a reference")
    sampler = compile_params(settings, shardings, layout)
    advantages = jax.jit(
        partial(shown_advantages, rl=rl),
        in_shardings=meshes.batch_sharding(mesh),
        out_shardings=meshes.replicated(mesh),
    )
    timeline = StepTimeline(run)
    alarms = Alarms(rl.reward, whole=rl.step_prompts == "none")

    def step_fn(state: TrainState, _: Any, k: int) -> tuple[TrainState, dict[str, Any]]:
        timeline.start(k)
        with timeline.phase("reshard"):
            params = sampler(state)
            if layout is not None and not layout.same:
                params = jax.block_until_ready(params)
        got = collect(params, k)
        del params  # or the sampler's copy would stay through the update
        timeline.add(got.spans)
        beat(f"step {k}: update")
        with timeline.phase("prepare"):
            batch = put_batch(host_batch(got), mesh)
        if rl.needs_old:
            with timeline.phase("old_log_probs"):
                old = old_log_probs(state.trainable, state.frozen, batch.groups)
                batch = batch._replace(old=jax.block_until_ready(old))
        if rl.loss.kl_coef:
            with timeline.phase("reference"):
                ref = reference_log_probs(reference, state.frozen, batch.groups)
                batch = batch._replace(ref=jax.block_until_ready(ref))
        if rl.masked.active and not rl.masked.gradient:
            with timeline.phase("masked"):
                rows = (batch.groups, batch.pages, batch.salts)
                hidden = masked_log_probs(state.trainable, state.frozen, rows)
                batch = batch._replace(masked=jax.block_until_ready(hidden))
        angle = {}
        if interference_every and (k == 1 or k % interference_every == 0):
            with timeline.phase("interference"):
                angle = jax.device_get(interference(state, batch))
        writes = k in (1, steps) or k % rollouts_every == 0
        shown = advantages(batch) if writes else None
        with timeline.phase("update"):
            rows = []
            for part in parts(batch, rl.updates, mesh):
                state, metrics = update(state, part)
                rows.append(metrics)
            if writes:  # while the device works
                with timeline.phase("write"):
                    values = [a[got.places] for a in jax.device_get(shown)]
                    named = with_advantages(got.rows, *values, rl)
                    run.write_rollouts(k, named[:rollout_rows])
            metrics = over_updates(jax.device_get(rows))
        if not alarms.steps:  # the first step here may be one in the middle of a run
            for row in run.read_metrics():
                alarms(row, {}, row["step"])
        for alarm in alarms(got.metrics, metrics, k):
            log.warning("step %d: %s", k, alarm.message)
            run.add_alarm(dataclasses.asdict(alarm))
        return state, got.metrics | metrics | angle | timeline.finish()

    def check(state: TrainState, k: int) -> Mapping[str, Any]:
        return validate(sampler(state), k)

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


def host_batch(got: Collected) -> RLBatch:
    """The arrays of one rollout, still in the host's memory."""
    arrays = (got.rewards, got.masks, got.valid, got.trained, got.stale)
    return RLBatch(got.groups, got.sampled, None, *arrays, pages=got.pages, salts=got.salts)


def parts(batch: RLBatch, updates: int, mesh: Mesh) -> list[RLBatch]:
    """The mini-batches of one rollout: every `updates`-th prompt, so devices keep their rows."""
    if updates == 1:
        return [batch]
    sharding = meshes.batch_sharding(mesh)
    return [_part(batch, updates=updates, part=i, sharding=sharding) for i in range(updates)]


@partial(jax.jit, static_argnames=("updates", "part", "sharding"))
def _part(batch: RLBatch, *, updates: int, part: int, sharding: Any) -> RLBatch:
    taken = jax.tree.map(lambda a: a.reshape(-1, updates, *a.shape[1:])[:, part], batch)
    return jax.lax.with_sharding_constraint(taken, sharding)


def over_updates(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One metric row of a rollout's updates: counters as the last one left them, else sum, maximum or
    mean over the updates."""
    fold = {"rollout/trained_tokens": np.sum, "rollout/logp_gap_max": np.max}
    return {
        name: rows[-1][name]
        if name == "lr" or name.startswith("optim/")
        else fold.get(name, np.mean)([row[name] for row in rows])
        for name in rows[-1]
    }


def shown_advantages(
    batch: RLBatch, *, rl: RLConfig
) -> tuple[Float[Array, "P G C"], Float[Array, "P G Z T"], Bool[Array, "P G Z T"]]:
    """The advantage on each channel's own tokens that is farthest from 0; and those of all tokens, with
    the masks of the loss."""
    values, masks = token_advantages(batch, rl)
    own = batch.masks & trained_mask(batch)[:, :, None]
    spread = jnp.broadcast_to(values, own.shape)
    low = jnp.min(spread, -1, where=own, initial=0.0)
    high = jnp.max(spread, -1, where=own, initial=0.0)
    return jnp.where(-low > high, low, high), values, masks


def with_advantages(
    rows: list[dict[str, Any]],
    shown: Float[np.ndarray, "P G C"],
    values: Float[np.ndarray, "P G Z T"],
    masks: Bool[np.ndarray, "P G Z T"],
    rl: RLConfig,
) -> list[dict[str, Any]]:
    """Rollout rows, each sample with its advantage by channel, and by token as runs of characters."""
    names = rl.reward.channels if values.shape[2] == len(rl.reward.channels) else ("all channels",)
    for p, row in enumerate(rows):
        for g, sample in enumerate(row["samples"]):
            named = zip(rl.reward.channels, shown[p, g].tolist(), strict=True)
            sample["advantages"] = dict(named)
            offsets = sample.pop("offsets", None)
            if offsets is None:  # an environment that keeps no text positions
                continue
            n = len(offsets)
            sample["token_advantages"] = {
                name: token_runs(values[p, g, z, :n], masks[p, g, z, :n], offsets)
                for z, name in enumerate(names)
            }
    return rows
