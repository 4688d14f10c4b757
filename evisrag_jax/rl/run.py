"""The RL run: from a config and a folder to trained weights, resumable at every step.

    records ─stream─► Collector(engine, rewards, scopes) ─fit_rl─► metrics, rollouts, checkpoints, RUN/model

Started again with the same config, a run goes on from its latest checkpoint; with another config it
is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from evisrag_jax.data.pipeline import ReadSettings, RecordStream, Rejected
from evisrag_jax.data.schema import Record
from evisrag_jax.data.sources import read_records
from evisrag_jax.models.lora import add_adapters
from evisrag_jax.pages.plan import resolve_budget
from evisrag_jax.prompts.template import load_template
from evisrag_jax.prompts.tokenizer import encode_response
from evisrag_jax.rewards.boxes import record_boxes
from evisrag_jax.rewards.gold import GoldError, gold_text
from evisrag_jax.rl.collect import Collector, gold_of
from evisrag_jax.rl.config import RLConfigError, RLRunConfig
from evisrag_jax.rl.passes import UpdateConfig, hold_reference
from evisrag_jax.rl.trainer import fit_rl
from evisrag_jax.rollout.buckets import Bucket as RolloutBucket
from evisrag_jax.rollout.buckets import BucketTable
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.runtime import processes
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.precision import default_precision, parse_dtype
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.training.batching import Limits, Prepared, check_divides, prepare, put_batch
from evisrag_jax.training.export import export, export_adapter
from evisrag_jax.training.feature_cache import for_run as features_for
from evisrag_jax.training.layout import SamplingLayout
from evisrag_jax.training.loop import FitResult, start_folder
from evisrag_jax.training.optimiser import for_adapters, for_run, make_optimiser
from evisrag_jax.training.page_cache import PageCache
from evisrag_jax.training.pretrained import load_pretrained
from evisrag_jax.training.state import full_params, init_state, place, state_shardings
from evisrag_jax.training.stopping import preemption_ends_this
from evisrag_jax.training.table import announce

__all__ = ["RLRun", "RLRunConfig", "train"]

# What may change when a run goes on: nothing here changes a number.
MAY_DIFFER = (
    *("data.threads", "data.ahead", "data.cache_mb", "data.feature_cache_mb"),
    *("data.feature_cache_dir", "save_every", "log_every", "keep"),
    *("max_skipped", "preempt_seconds"),
    *("tensorboard", "export", "export_dtype", "rollouts_every", "rollout_rows"),
    *("mesh", "rollout_tensor", "slots", "stuck_after"),
)


@contextlib.contextmanager
def _setting(name: str) -> Iterator[None]:
    """Errors of the block become one that names the setting it is about."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise RLConfigError(f"{name}: {error}") from error


class RLRun:
    """Model, engine, records and environment of one run.

    Args:
        config: the run.
        folder: its started run folder; refused records are written there unless `resumed`.
        resumed: the folder holds this run already.
    """

    def __init__(self, config: RLRunConfig, folder: RunFolder, *, resumed: bool = False):
        if not config.model.path or not config.data.path:
            raise RLConfigError("model.path and data.path are needed (--model and --data)")
        self.config, self.folder = config, folder
        with _setting("mesh"):
            self.mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
            check_divides(config.rl.prompts // config.rl.updates, self.mesh, config.rl.micro)
            if config.rl.records % jax.process_count():
                raise ValueError(
                    f"{config.rl.records} records a rollout do not divide over {jax.process_count()} processes"
                )
        with _setting("data.template"):
            self.template = load_template(config.data.template)
        with _setting("data.budget"):
            budget = resolve_budget(config.data.budget) if config.data.budget else None
        with _setting("model.path"):
            self.pretrained = load_pretrained(
                config.model.path, dtype=config.model.param_dtype, budget=budget, mesh=self.mesh
            )
        self.model = self.pretrained.config
        compute = config.model.compute_dtype
        if compute == "auto":
            compute = default_precision().compute
        compute = parse_dtype(compute, field="model.compute_dtype").name
        self.cache = PageCache(config.data.cache_mb * 2**20)
        self.records = self._read(resumed)
        rounds = int(config.epochs * len(self.records)) // config.rl.records
        self.steps = config.steps or max(1, rounds)
        optim = for_run(config.rl.optim, self.steps * config.rl.updates)
        optim = for_adapters(optim, config.lora)
        self.rl = dataclasses.replace(config.rl, optim=optim)
        self.settings = UpdateConfig(
            self.rl, compute, config.remat, config.chunk, config.lora, self.pretrained.layout
        )
        params = self.pretrained.params
        if config.lora.rank:
            params = add_adapters(params, self.model, config.lora, self.mesh, seed=config.seed)
        state = init_state(params, optim, make_optimiser(optim))
        places = state_shardings(self.model, self.mesh, state)
        self.state = place(state, places)
        self.reference = None
        if self.rl.loss.kl_coef:  # before the optimiser or a checkpoint moves anything
            self.reference = hold_reference(self.state, places, self.settings)
        announce(folder, self.model, self.mesh, state, places)
        with _setting("rollout_tensor"):
            self.layout = SamplingLayout(self.model, self.mesh, config.rollout_tensor)
        with _setting("slots"):
            self.engine = self._engine()
        b = config.bucket
        with _setting("data.feature_cache_dir"):
            self.features = features_for(
                self.model,
                self.pretrained.layout,
                [(b.windows, b.tokens)] if b.images else [],
                state.trainable,
                config.data,
                dtype=compute,
                mesh=self.layout.mesh,
            )

    def _read(self, resumed: bool) -> list[Record]:
        """Records with a usable gold; the others go to rejected.jsonl."""
        data = self.config.data
        log = None if resumed else self.folder

        def refuse(id: str, kind: str, reason: str) -> None:
            if log is not None:
                log.reject(id=id, reason=reason, kind=kind, stage="read", path=data.path)

        records = read_records(
            data.path,
            image_root=data.image_root or None,
            on_error=lambda e: refuse(str(e.id or f"row {e.row}"), e.kind, str(e)),
        )
        boxed = self.config.rl.reward.reads_boxes
        usable, first = [], ""
        for record in records:
            try:
                record_boxes(record) if boxed else gold_text(record)
            except GoldError as error:
                refuse(record.id, "no_gold", str(error))
                first = first or str(error)
            else:
                usable.append(record)
        if not usable:
            raise RLConfigError(
                f"{data.path}: none of its {len(records)} readable records has "
                f"{'boxes' if boxed else 'gold answers and evidence'} to reward"
                + (f" ({first})" if first else "")
            )
        return usable

    def _engine(self) -> Engine:
        b, mesh = self.config.bucket, self.layout.mesh
        own, devices = b.prompts // jax.process_count(), mesh.shape["data"]
        shape = RolloutBucket(
            prompts=-(-own // devices) * devices,
            images=b.images,
            windows=b.windows,
            tokens=b.tokens,
            length=b.prompt_length,
            response=b.response_length,
        )
        return Engine(
            self.pretrained.params,
            self.model,
            self.pretrained.tokenizer,
            BucketTable((shape,)),
            stop_ids=self.pretrained.stop_ids,
            layout=self.pretrained.layout,
            mesh=mesh,
            slots=self.config.slots or None,
        )

    def stream(self) -> RecordStream:
        """Endless shuffled lists of this process's prepared records, P over all processes."""
        data, count = self.config.data, jax.process_count()
        own = self.rl.records // count
        return RecordStream(
            self.records,
            partial(
                self._prepare,
                tokenizer=self.pretrained.tokenizer,
                template=self.template,
                layout=self.pretrained.layout,
                budget=self.pretrained.budget,
                limits=Limits.of([self.config.bucket]),
                cache=self.cache,
                features=self.features,
                images_first=data.images_first,
                system=data.system or None,
                exif_transpose=data.exif_transpose,
            ),
            own,
            seed=self.config.seed,
            lanes=self.rl.records,
            process_index=jax.process_index(),
            process_count=count,
            gather=processes.gather,
            read=ReadSettings(data.threads, max(data.ahead, data.threads, own)),
            rejected=Rejected(self.folder.rejected_by(jax.process_index())),
        )

    def _prepare(self, record: Record, **settings: Any) -> Prepared:
        """`prepare`, which also refuses a record whose boxes do not lie on its pages."""
        item = prepare(record, **settings)
        if self.rl.reward.reads_boxes:
            gold_of(item, self.rl.reward, self.pretrained.layout)
        return item

    def counters(self) -> dict[str, float]:
        """What the caches of this process did so far."""
        features = {} if self.features is None else self.features.metrics()
        return self.cache.metrics() | features

    def fit(
        self,
        checkpoints: Checkpoints,
        validate: Callable[[Any, int], Mapping[str, Any]] | None,
        **settings: Any,
    ) -> FitResult:
        """Train to the end; further settings go to `training.loop.fit`."""
        config, stream = self.config, self.stream()
        collect = Collector(
            self.engine,
            stream,
            self.rl,
            [config.bucket],
            partial(encode_response, self.pretrained.tokenizer),
            seed=config.seed,
            features=self.features,
            put=partial(put_batch, mesh=self.mesh),
        )
        try:
            return fit_rl(
                run=self.folder,
                state=self.state,
                model=self.model,
                settings=self.settings,
                collect=collect,
                mesh=self.mesh,
                steps=self.steps,
                checkpoints=checkpoints,
                layout=self.layout,
                data=collect,
                reference=self.reference,
                interference_every=config.interference_every,
                validate=validate,
                counters=self.counters,
                rollouts_every=config.rollouts_every,
                rollout_rows=config.rollout_rows,
                save_every=config.save_every,
                log_every=config.log_every,
                max_skipped=config.max_skipped,
                preempt_seconds=config.preempt_seconds,
                eval_every=config.eval_every,
                best_metric=None if validate is None else "eval/accuracy",
                tensorboard=config.tensorboard,
                stuck_after=config.stuck_after,
                name="rl",
                **settings,
            )
        finally:
            stream.close()
            collect.close()


def train(
    config: RLRunConfig,
    out: str | Path,
    *,
    make_validate: Callable[[RLRun], Callable[[Any, int], Mapping[str, Any]]] | None = None,
    facts: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """One run in the folder `out`, new or gone on with; returns its summary.

    Args:
        make_validate: makes the validation function (nested parameters, k) → metrics of the run.
        facts: more for versions.json.
        settings: further arguments of `training.loop.fit`.
    Raises:
        RunFolderError: the folder holds a run of another config; lists the differences.
    """
    with RunFolder(out, writes=processes.is_primary()) as folder, preemption_ends_this():
        facts = {"devices": [str(device) for device in jax.devices()], **(facts or {})}
        resumed = start_folder(folder, config, MAY_DIFFER, facts)
        run = RLRun(config, folder, resumed=resumed)
        budget = dataclasses.asdict(run.pretrained.budget)
        folder.write_versions(**facts, pixel_budget=budget)
        identity = {
            "kind": "rl",
            "model": run.model,
            "optim": run.rl.optim,
            "lora": config.lora,
            "trains": sorted(run.state.trainable),
        }
        validate = make_validate(run) if make_validate and config.eval_every else None
        best = None if validate is None else "max"
        with Checkpoints(
            folder.checkpoints, identity=identity, keep=config.keep, best=best
        ) as checkpoints:
            result = run.fit(checkpoints, validate, **settings)
        if config.export:
            params = full_params(result.state.trainable, result.state.frozen)
            dtype = parse_dtype(config.export_dtype, field="export_dtype")
            export(params, run.pretrained, folder.path / "model", dtype=dtype, lora=config.lora)
            export_adapter(params, run.pretrained, folder.path / "adapter", config.lora)
        summary = summarise(run, result)
        folder.write_summary(summary)
        return summary


def summarise(run: RLRun, result: FitResult) -> dict[str, Any]:
    """The flat dict of summary.json, of the whole run whatever this process did of it; `compiles` is
    of this process."""
    everything = run.folder.read_metrics()
    rows = [row for row in everything if "reward/overall" in row]
    held_out = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in everything]
    return {
        "command": "rl",
        "model": run.config.model.path,
        "data": run.config.data.path,
        "mode": run.rl.reward.mode,
        "steps": result.step,
        "records": len(run.records),
        "reward_first": rows[0]["reward/overall"] if rows else None,
        "reward_last": rows[-1]["reward/overall"] if rows else None,
        "seconds": everything[-1]["time"] if everything else 0.0,
        "compiles": result.compiles,
        "export": str(run.folder.path / "model") if run.config.export else None,
        **next(filter(None, reversed(held_out)), {}),
    }
