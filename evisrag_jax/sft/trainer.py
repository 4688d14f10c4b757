"""The SFT run: from a config and a folder to trained weights, resumable at every step.

    records ─group─► stream ─batch─► sft_update ─► metrics, checkpoints ─► RUN/model (Hugging Face)

Started again with the same config, a run goes on from its latest checkpoint and ends as if it had
never stopped; with another config it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from evisrag_jax.data.pipeline import Example, ReadSettings, RecordStream, Rejected
from evisrag_jax.data.schema import Record
from evisrag_jax.data.sources import read_records
from evisrag_jax.models.attention_check import start_up_check
from evisrag_jax.models.lora import add_adapters
from evisrag_jax.prompts.template import load_template
from evisrag_jax.prompts.tokenizer import SpecialIds
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.runtime import processes
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.precision import default_precision, parse_dtype
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.runtime.timeline import StepTimeline
from evisrag_jax.sft.config import SFTConfig, SFTConfigError
from evisrag_jax.sft.objective import UpdateConfig, compile_loss, compile_update
from evisrag_jax.sft.targets import Targets, group_records
from evisrag_jax.training.batching import (
    Limits,
    check_divides,
    empty_batch,
    make_group_batch,
    prepare,
    put_batch,
    size,
    trained_tokens,
)
from evisrag_jax.training.export import export, export_adapter
from evisrag_jax.training.feature_cache import for_run as features_for
from evisrag_jax.training.layout import SamplingLayout
from evisrag_jax.training.loop import FitResult, fit, start_folder
from evisrag_jax.training.optimiser import for_adapters, for_run, make_optimiser
from evisrag_jax.training.page_cache import PageCache
from evisrag_jax.training.pretrained import load_pretrained
from evisrag_jax.training.state import (
    TrainState,
    full_params,
    init_state,
    place,
    state_shardings,
)
from evisrag_jax.training.stopping import preemption_ends_this
from evisrag_jax.training.table import announce

# What may change when a run goes on: nothing here changes a number.
MAY_DIFFER = (
    *("data.threads", "data.ahead", "data.cache_mb", "data.feature_cache_mb"),
    *("data.feature_cache_dir", "save_every", "log_every", "keep"),
    *("max_skipped", "preempt_seconds"),
    *("tensorboard", "export", "export_dtype", "mesh", "stuck_after"),
)


class SFTRun:
    """Everything of one run: model, records, batches and the compiled update.

    Args:
        config: the run.
        folder: its started run folder; refused records are written there unless `resumed`.
        resumed: the folder holds this run already.
    """

    def __init__(self, config: SFTConfig, folder: RunFolder, *, resumed: bool = False):
        if not config.model.path or not config.data.path:
            raise SFTConfigError("model.path and data.path are needed (--model and --data)")
        start_up_check()
        self.config, self.folder = config, folder
        self._warm = False
        self._timeline = StepTimeline(folder)
        self._held_out: tuple[list[Record], Targets] | None = None
        self.mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        check_divides(config.batch, self.mesh, config.micro)
        self.own = config.batch // jax.process_count()  # rows of this process
        self.records, self.targets = self._read(config.data.path, None if resumed else folder)
        self.pretrained = load_pretrained(
            config.model.path,
            dtype=config.model.param_dtype,
            budget=config.data.budget or None,
            mesh=self.mesh,
        )
        self.cache = PageCache(config.data.cache_mb * 2**20)
        self.steps = config.steps or max(1, int(config.epochs * len(self.records)) // config.batch)
        optim = for_run(config.optim, self.steps, config.warmup_ratio)
        self.optim = for_adapters(optim, config.lora)
        self._compile()

    def _compile(self) -> None:
        config, self.model = self.config, self.pretrained.config
        compute = config.model.compute_dtype
        if compute == "auto":
            compute = default_precision().compute
        self.settings = UpdateConfig(
            optim=self.optim,
            micro=config.micro,
            compute=parse_dtype(compute, field="model.compute_dtype").name,
            remat=config.remat,
            chunk=config.chunk,
            lora=config.lora,
        )
        params = self.pretrained.params
        if config.lora.rank:
            params = add_adapters(params, self.model, config.lora, self.mesh, seed=config.seed)
        state = init_state(params, self.optim, make_optimiser(self.optim))
        self.shardings = state_shardings(self.model, self.mesh, state)
        announce(self.folder, self.model, self.mesh, state, self.shardings)
        self.trains = sorted(state.trainable)
        self.state: TrainState | None = place(state, self.shardings)
        self.layout = SamplingLayout(self.model, self.mesh)
        # From here on the state alone holds the parameters: an update may give their buffers away.
        self.pretrained = dataclasses.replace(self.pretrained, params=None)
        try:
            self.features = features_for(
                self.model,
                self.pretrained.layout,
                [(b.windows, b.tokens) for b in config.shapes if b.images],
                state.trainable,
                config.data,
                dtype=self.settings.compute,
                mesh=self.layout.mesh,
            )
        except OSError as error:
            raise SFTConfigError(f"data.feature_cache_dir: {error}") from error
        self.update = compile_update(self.model, self.settings, self.mesh, self.shardings)
        self.loss = compile_loss(self.model, self.settings, self.mesh, self.shardings)

    def _read(self, path: str, log: RunFolder | None) -> tuple[list[Record], Targets]:
        """Groups of a data file; what cannot be used is written to `log`'s rejected.jsonl."""

        def refuse(id: str, reason: str, detail: str) -> None:
            if log is not None:
                log.reject(id=id, reason=reason, detail=detail, path=path, stage="read")

        records = read_records(
            path,
            image_root=self.config.data.image_root or None,
            on_error=lambda e: refuse(str(e.id or f"row {e.row}"), e.kind, str(e)),
        )
        group = self.config.largest.group
        heads, targets, empty = group_records(records, self.config.data.target, group)
        for record in empty:
            detail = f"record {record.id}: has no {self.config.data.target} to train on"
            refuse(record.id, "no_response", detail)
        if not heads:
            raise SFTConfigError(
                f"{path}: none of its {len(records)} readable records has a "
                f"{self.config.data.target} to train on"
            )
        return heads, targets

    def stream(
        self, records: Sequence[Record], targets: Targets, *, training: bool = True
    ) -> RecordStream:
        """Batches of prepared records: endless and shuffled, or once in file order."""
        data, index, count = self.config.data, jax.process_index(), jax.process_count()
        share = {"process_index": index, "process_count": count, "lanes": self.config.batch}
        if not training:  # a finite stream is of one process: each gets records of its own
            share, records = {}, records[index::count]
        return RecordStream(
            records,
            partial(
                prepare,
                tokenizer=self.pretrained.tokenizer,
                template=load_template(data.template),
                layout=self.pretrained.layout,
                budget=self.pretrained.budget,
                limits=Limits.of(self.config.shapes),
                cache=self.cache,
                features=self.features,
                targets=targets,
                images_first=data.images_first,
                system=data.system or None,
                exif_transpose=data.exif_transpose,
            ),
            self.own,
            seed=self.config.seed,
            epochs=None if training else 1,
            shuffle=training,
            **share,
            gather=processes.gather,
            read=ReadSettings(data.threads, max(data.ahead, data.threads, self.own)),
            rejected=Rejected(self.folder.rejected_by(index)) if training else None,
        )

    def host_batch(self, examples: Sequence[Example]) -> Any:
        """The numpy batch of a list of examples: this process's rows of it, in the shape that holds those
        of all processes."""
        items = [example.item for example in examples]
        return make_group_batch(
            items,
            self.config.shapes,
            layout=self.pretrained.layout,
            features=self.features,
            prompts=self.own,
            agree=_largest if jax.process_count() > 1 else None,
            pad_id=SpecialIds.from_tokenizer(self.pretrained.tokenizer).endoftext,
        )

    def load_features(self, state: TrainState) -> None:
        """Gives the feature cache its tower, once a run."""
        if self.features is None or self.features.loaded:
            return
        tower = {"vision": full_params({}, state.frozen)["vision"]}
        if not self.layout.same:
            whole = full_params(self.shardings.trainable, self.shardings.frozen)
            tower = self.layout.reshard(whole, ("vision",))(tower)
        self.features.take(tower)

    def counters(self) -> dict[str, float]:
        """What the caches of this process did so far."""
        features = {} if self.features is None else self.features.metrics()
        return self.cache.metrics() | features

    def warm_up(self, state: TrainState) -> TrainState:
        """Compile and run every shape on empty rows, the largest first; the state stays as it is.

        A shape that does not fit in memory fails here and not when its first long record arrives.
        """
        pad_id = SpecialIds.from_tokenizer(self.pretrained.tokenizer).endoftext
        for bucket in sorted(self.config.shapes, key=size, reverse=True):
            own = dataclasses.replace(bucket, prompts=self.own)
            batch = empty_batch(
                own, pad_id=pad_id, layout=self.pretrained.layout, features=self.features
            )
            state, _ = self.update(state, put_batch(batch, self.mesh))
        return state

    def step(self, state: TrainState, data: RecordStream, k: int) -> tuple[TrainState, dict]:
        """Update k; the first of a process runs every other shape before it."""
        timeline = self._timeline
        timeline.start(k)
        with timeline.phase("encode"):
            self.load_features(state)
        with timeline.phase("prepare"):
            examples = next(data)
            batch = self.host_batch(examples)
        if not self._warm and len(self.config.shapes) > 1:
            with timeline.phase("warm_up"):
                state = self.warm_up(state)
        self._warm = True
        with timeline.phase("update"):
            state, metrics = self.update(state, put_batch(batch, self.mesh))
            if (
                k % self.config.log_every == 0 or k == self.steps
            ):  # else the next step's preparation overlaps
                metrics = jax.block_until_ready(metrics)
        shape = batch.tokens.shape[0] * batch.tokens.shape[1] * batch.tokens.shape[2]
        return state, {
            **metrics,
            **timeline.finish(),
            "batch/records": float(len(examples) * jax.process_count()),
            "batch/response_fill": trained_tokens(batch) / shape,
            "batch/prompt_fill": float(np.mean(batch.prompt.lengths))
            / batch.prompt.tokens.shape[1],
        }

    def validate(self, state: TrainState, _: int) -> dict[str, float]:
        """eval/loss: mean -log p over the response tokens of the validation file."""
        self.load_features(state)
        if self._held_out is None:
            self._held_out = self._read(self.config.data.validation, None)
            if len(self._held_out[0]) < jax.process_count():
                raise SFTConfigError(
                    f"{self.config.data.validation}: {len(self._held_out[0])} records are fewer than the "
                    f"{jax.process_count()} processes"
                )
        stream = self.stream(*self._held_out, training=False)
        totals: dict[str, float] = {}
        # As many batches as the process with the most records has: all take part in each.
        share = -(-len(self._held_out[0]) // jax.process_count())
        for _ in range(-(-share // self.own)):
            batch = self.host_batch(next(stream, ()))
            sums = jax.device_get(
                self.loss(state.trainable, state.frozen, put_batch(batch, self.mesh))
            )
            totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
        stream.close()
        weight = totals.get("weight", 0.0)
        return {
            "eval/loss": totals["nll"] / weight if weight else float("nan"),
            "eval/tokens": weight,
            "eval/skipped": float(np.sum(processes.gather(np.int32(stream.skipped.total())))),
        }

    def _take_state(self) -> TrainState:
        """The initial state, given away: a restored one then does not stand beside it in memory."""
        if self.state is None:
            raise SFTConfigError("this run has been fitted; make another SFTRun to go on")
        state, self.state = self.state, None
        return state

    def fit(self, checkpoints: Checkpoints, **settings: Any) -> tuple[FitResult, RecordStream]:
        """Train to the end; further settings go to `training.loop.fit`."""
        config = self.config
        stream = self.stream(self.records, self.targets)
        try:
            result = fit(
                run=self.folder,
                state=self._take_state(),
                step_fn=self.step,
                steps=self.steps,
                checkpoints=checkpoints,
                data=stream,
                validate=self.validate if config.data.validation else None,
                counters=self.counters,
                save_every=config.save_every,
                log_every=config.log_every,
                max_skipped=config.max_skipped,
                preempt_seconds=config.preempt_seconds,
                eval_every=config.eval_every or (self.steps if config.data.validation else 0),
                best_metric="eval/loss" if config.data.validation else None,
                tensorboard=config.tensorboard,
                stuck_after=config.stuck_after,
                name="sft",
                **settings,
            )
        finally:
            stream.close()
        return result, stream


def _largest(needs: np.ndarray) -> np.ndarray:
    return processes.gather(needs).max(0)


def identity(run: SFTRun) -> dict[str, Any]:
    """What a checkpoint must share with the run that reads it."""
    facts = {"model": run.model, "optim": run.optim, "trains": run.trains}
    return {"kind": "sft", "lora": run.config.lora, **facts}


def train(
    config: SFTConfig, out: str | Path, *, facts: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """One run in the folder `out`, new or gone on with; returns its summary.

    Args:
        config: the run.
        out: the run folder.
        facts: more for versions.json.
        settings: further arguments of `training.loop.fit`.
    Raises:
        RunFolderError: the folder holds a run of another config; lists the differences.
    """
    with RunFolder(out, writes=processes.is_primary()) as folder, preemption_ends_this():
        facts = {"devices": [str(device) for device in jax.devices()], **(facts or {})}
        resumed = start_folder(folder, config, MAY_DIFFER, facts)
        run = SFTRun(config, folder, resumed=resumed)
        with Checkpoints(
            folder.checkpoints,
            identity=identity(run),
            keep=config.keep,
            best="min" if config.data.validation else None,
        ) as checkpoints:
            result, stream = run.fit(checkpoints, **settings)
        if config.export:
            params = full_params(result.state.trainable, result.state.frozen)
            dtype = parse_dtype(config.export_dtype, field="export_dtype")
            export(params, run.pretrained, folder.path / "model", dtype=dtype, lora=config.lora)
            export_adapter(params, run.pretrained, folder.path / "adapter", config.lora)
        summary = summarise(run, result, stream)
        folder.write_summary(summary)
        return summary


def summarise(run: SFTRun, result: FitResult, stream: RecordStream) -> dict[str, Any]:
    """The flat dict of summary.json."""
    rows = [row for row in run.folder.read_metrics() if "loss/total" in row]
    summary = {
        "command": "sft",
        "model": run.config.model.path,
        "data": run.config.data.path,
        "steps": result.step,
        "records": len(run.records),
        "responses": len(run.targets),
        "skipped": stream.skipped.total(),
        "tokens": sum(row["loss/tokens"] or 0.0 for row in rows),
        "loss_first": rows[0]["loss/total"] if rows else None,
        "loss_last": rows[-1]["loss/total"] if rows else None,
        "seconds": round(result.seconds, 3),
        "compiles": result.compiles,
        "export": str(run.folder.path / "model") if run.config.export else None,
    }
    held_out = [row for row in run.folder.read_metrics() if "eval/loss" in row]
    if held_out:
        summary["eval_loss_first"] = held_out[0]["eval/loss"]
        summary["eval_loss_last"] = held_out[-1]["eval/loss"]
    return summary
