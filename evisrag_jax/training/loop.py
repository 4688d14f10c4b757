"""The skeleton that SFT and RL share: steps, metrics, validation, checkpoints, exact resume.

    restore ─► [ step_fn(state, data, k) ─► metrics row ─► validate? ─► save? ] k = 1 … steps ─► save

A run that is stopped and started again does what the uninterrupted run does: state, data position and
host facts come back from the latest checkpoint, and rows written after it are dropped. A restored
state does not stand beside the initial one: that one's buffers are freed first. Device work of a step
runs with the transfer guard on "disallow": inputs are put on devices explicitly or not at all.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from evisrag_jax.runtime import processes
from evisrag_jax.runtime.checkpoints import CheckpointError, Checkpoints
from evisrag_jax.runtime.compile_cache import CompileCounter
from evisrag_jax.runtime.metrics import MetricWriter
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.runtime.watchdog import beat, watching
from evisrag_jax.training.state import TrainState, from_checkpoint, to_checkpoint
from evisrag_jax.training.stopping import Preempted, Stopping

Metrics = Mapping[str, Any]

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a gradient that is not finite; names step and checkpoint."""


@runtime_checkable
class Data(Protocol):
    """What a step draws from, whose place can be saved as plain JSON (`data.pipeline.RecordStream`)."""

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: Mapping[str, Any]) -> None: ...


StepFn = Callable[[TrainState, Any, int], tuple[TrainState, Metrics]]
Validate = Callable[[TrainState, int], Metrics]


@dataclass(frozen=True)
class FitResult:
    """How a run ended.

    state, step: after the last update.  restored: the step it went on from, None for a fresh run.
    metrics, validation: the last rows ({} when there was none).  seconds: of this process.
    compiles: programs made ready in this process.
    """

    state: TrainState
    step: int
    restored: int | None
    metrics: dict[str, Any]
    validation: dict[str, Any]
    seconds: float
    compiles: int


def fit(
    *,
    run: RunFolder,
    state: TrainState,
    step_fn: StepFn,
    steps: int,
    checkpoints: Checkpoints,
    data: Data | None = None,
    validate: Validate | None = None,
    extras: dict[str, Any] | None = None,
    counters: Callable[[], Metrics] | None = None,
    save_every: int = 100,
    log_every: int = 1,
    eval_every: int = 0,
    max_skipped: int = 10,
    preempt_seconds: float = 300.0,
    best_metric: str | None = None,
    tensorboard: bool = True,
    wandb: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    shown: tuple[str, ...] = ("loss/total",),
    stuck_after: int = 0,
    name: str = "train",
) -> FitResult:
    """Train to `steps` updates, going on from the latest checkpoint if there is one.

    Args:
        run: the started run folder.
        state: the initial state on its devices; the template of a restored one. Its buffers are
            gone afterwards: donated by `step_fn`, or freed before a state is restored.
        step_fn: (state, data, k) → (state after update k, its metrics), k counted from 1. It draws
            what it needs from `data` by `next`; StopIteration ends the run early. Metrics are
            scalars, on the device or the host.
        steps: updates in all, restored ones included.
        checkpoints: where states go, with `data`'s state and `extras` beside them.
        data: what step_fn draws from; None if it draws from nothing that has a place.
        validate: (state, k) → metrics of the state after k updates: before the first update, every
            `eval_every` and after the last. Runs without the transfer guard.
        extras: plain JSON facts that step_fn keeps between steps, changed in place (a controller's
            coefficient, counters). Saved and restored.
        counters: further metrics of every row, about this process (caches, say).
        save_every, log_every, eval_every: in updates; 0 saves at the end only, never validates.
        max_skipped: updates in a row without a finite gradient, as "optim/skipped_in_a_row" of a
            logged row counts them, that end the run; 0 for no limit.
        preempt_seconds: after SIGTERM or SIGUSR1, what the running step and the save may take
            before the process ends itself (`training.stopping`).
        best_metric: the validation metric that checkpoints are rated by.
        tensorboard, wandb: further places for metrics.
        progress: a live bar; None shows one on a terminal.
        shown: metrics beside the bar.
        stuck_after: seconds without progress after which the process ends (`runtime.watchdog`).
        name: what the bar calls this run.
    Raises:
        KeyboardInterrupt: after an interrupt, once the last whole step has been saved. A second
            interrupt stops at once.
        Preempted: the same after SIGTERM or SIGUSR1.
        NonFiniteError: see max_skipped.
        CheckpointError: a save failed; one in the background, at the end of the step after it.
    """
    if steps < 1 or min(save_every, eval_every) < 0 or log_every < 1:
        raise ValueError(
            f"steps={steps} and log_every={log_every} must be at least 1, save_every={save_every} "
            f"and eval_every={eval_every} not negative"
        )
    extras = {} if extras is None else extras
    state, done = _restore(run, state, checkpoints, data, extras)
    if done < steps:
        checkpoints.check_room(to_checkpoint(jax.tree.map(_shape, state)))
    restored = None if done < 0 else done
    begin, compiles = time.perf_counter(), CompileCounter()
    metrics: dict[str, Any] = {}
    validation: dict[str, Any] = {}
    k = max(done, 0)
    saved, validated = k, -1
    place = _place(data, extras)

    primary = processes.is_primary()
    writer = MetricWriter(
        run,
        resume_step=done,
        tensorboard=tensorboard and primary,
        wandb=wandb if primary else None,
    )
    bar = _Bar(name, steps, progress, shown)
    with writer, bar, Stopping(preempt_seconds) as stopping, watching(stuck_after):

        def save() -> None:
            nonlocal saved
            if k > saved:
                beat(f"step {k}: save")
                rating = validation.get(best_metric) if best_metric and validated == k else None
                checkpoints.save(k, to_checkpoint(state), place, metric=rating)
                saved = k

        def check() -> None:
            nonlocal validated
            beat(f"step {k}: validate")
            validation.clear()
            validation.update(writer.write(k, validate(state, k)))
            validated = k

        def stop_if_not_finite() -> None:
            row = metrics.get("optim/skipped_in_a_row") or 0
            if max_skipped and metrics.get("step") == k and row >= max_skipped:
                checkpoints.wait()
                good = checkpoints.latest_step()
                where = "no checkpoint yet" if good is None else checkpoints.directory / str(good)
                raise NonFiniteError(
                    f"step {k}: the gradients of the last {row:.0f} updates were not finite and "
                    f"nothing was learnt from them (max_skipped={max_skipped}); last checkpoint: "
                    f"{where}. Look at the records and the learning rate of these steps"
                )

        wants_eval = validate is not None and eval_every > 0
        if wants_eval and done < 0:
            check()
        try:
            bar.update(k, validation)
            while k < steps and not stopping.at(k):
                before = time.perf_counter()
                beat(f"step {k + 1}")
                try:
                    with jax.transfer_guard("disallow"):
                        state, device_metrics = step_fn(state, data, k + 1)
                except StopIteration:
                    break
                k, place = k + 1, _place(data, extras)
                checkpoints.check()
                if k % log_every == 0 or k == steps:
                    row = dict(jax.device_get(dict(device_metrics)))
                    row["time/step"] = time.perf_counter() - before
                    more = {} if counters is None else counters()
                    metrics = writer.write(k, row | _more(data) | dict(more) | compiles.metrics())
                bar.update(k, metrics)
                stop_if_not_finite()
                # The last validation comes before the last save, or a kill between them would lose it.
                if wants_eval and (k % eval_every == 0 or k == steps):
                    check()
                if save_every and k % save_every == 0:
                    save()
            if wants_eval and max(validated, done, 0) < k and not stopping.reason:
                check()
        except KeyboardInterrupt:
            stopping.interrupt()
        if not _is_gone(state):
            save()
        checkpoints.wait()
    if stopping.reason and k < steps:
        if stopping.reason == "preempted":
            raise Preempted(f"preempted after step {k}; run the same command to go on")
        raise KeyboardInterrupt(
            f"stopped after step {k} of {steps}; the run goes on from step {saved}"
        )
    seconds = time.perf_counter() - begin
    return FitResult(state, k, restored, metrics, validation, seconds, compiles.count)


def _restore(
    run: RunFolder,
    state: TrainState,
    checkpoints: Checkpoints,
    data: Data | None,
    extras: dict[str, Any],
) -> tuple[TrainState, int]:
    """State and step of the latest checkpoint, or (state, -1); forgets what the run wrote later."""
    latest, damaged = processes.from_primary(
        lambda: [checkpoints.latest_step(), list(checkpoints.damaged().items())],
        "the latest checkpoint",
    )
    if latest is None and damaged:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged)
        raise CheckpointError(
            f"{checkpoints.directory}: no checkpoint is whole ({reasons}); remove the folder to "
            "start the run from nothing"
        )
    if latest is None:
        # A run that died before its first checkpoint starts again from nothing.
        run.truncate(-1)
        if data is not None:
            data.set_state(data.get_state())
        processes.barrier("start")
        return state, -1
    for step, reason in damaged:
        log.warning("step %d cannot be used (%s); going on from step %d", step, reason, latest)
    like = jax.tree.map(_shape, state)
    template = to_checkpoint(like)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    found = checkpoints.restore_latest(template)
    run.truncate(found.step)
    if data is not None:
        data.set_state(found.extra["data"])
    extras.clear()
    extras.update(found.extra["extras"])
    processes.barrier("restore")
    return from_checkpoint(found.state, like), found.step


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    """An array without its buffer."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def start_folder(
    folder: RunFolder, config: Any, may_differ: Sequence[str], facts: Mapping[str, Any]
) -> bool:
    """Starts a run folder, new or gone on with, in the one process that writes; whether it held the run
    already. `facts` go to versions.json. RunFolderError for another config's folder."""

    def start() -> bool:
        resumed = folder.has_steps
        if not resumed:
            for path in folder.path.glob("rejected*.jsonl"):
                path.unlink()
        folder.start(config, resume=resumed, may_differ=may_differ, **facts)
        return resumed

    return processes.from_primary(start, "start of the run folder")


def _place(data: Data | None, extras: dict[str, Any]) -> dict[str, Any]:
    """Data position and host facts between two steps."""
    return {"data": None if data is None else data.get_state(), "extras": copy.deepcopy(extras)}


def _more(data: Data | None) -> dict[str, float]:
    metrics = getattr(data, "metrics", None)
    return {} if metrics is None else metrics()


def _is_gone(state: TrainState) -> bool:
    """Whether a broken step has already given the state's buffers away."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))


class _Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, name: str, steps: int, on: bool | None, shown: tuple[str, ...]):
        console = Console(stderr=True)
        on = console.is_terminal if on is None else on
        self._shown = shown
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not (on and jax.process_index() == 0),
        )
        self._task = self._bar.add_task(name, total=steps, note="")

    def update(self, done: int, metrics: Metrics) -> None:
        note = "  ".join(
            f"{name.rsplit('/', 1)[-1]} {metrics[name]:.4g}"
            for name in self._shown
            if metrics.get(name) is not None
        )
        self._bar.update(self._task, completed=done, note=note)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
