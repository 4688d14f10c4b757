"""Checkpoints that resume exactly, on any number of devices, over Orbax.

    checkpoints/<step>/params   the parameters, readable alone
    checkpoints/<step>/rest     everything else of the state (optimiser, step, keys, ...)
    checkpoints/<step>/extra    JSON: what the run is (identity), its metric, data position, ...

A step is written beside its place, lists the sizes of its files (`_SIZES.json`) and is renamed when
complete; older steps are deleted only after that. A step whose files are not those of its list (a
crash, a bad copy, a delete that was cut short) is never read: the one before it is, and the next save
sets it aside. To go on from an older step, remove the folders of the later ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from evisrag_jax.runtime.checkpoint_files import Listed, damage
from evisrag_jax.runtime.json_files import plain
from evisrag_jax.runtime.run_folder import difference

_ITEMS = ("params", "rest", "extra")
_SHOWN = 20
_ASIDE = re.compile(r"(?:incomplete|unreadable)-(\d+)-\d+")

log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that is absent or could not be written or read; names the folder."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model or config; lists the differences."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held.

    step: the step it was saved at.
    state: the saved tree, every leaf bitwise as saved and sharded as the template asks.
    extra: the JSON facts given to ``save``.
    """

    step: int
    state: Any
    extra: dict[str, Any]


def _leaves(tree: Any) -> dict[str, Any]:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _facts(leaf: Any) -> str:
    """Dtype and shape as stored: typed keys are stored as their integers."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes(leaf: Any) -> int:
    """Bytes of an array as stored, before compression."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _reader(tree: Any) -> ocp.StandardCheckpointHandler:
    """Reads a tree with little beside it: an array that is being read takes its bytes twice, so only
    one of the largest, or a sixteenth of the whole, is at a time."""
    sizes = [_bytes(leaf) for leaf in _leaves(tree).values()]
    # Orbax wants more than the largest. It takes gigabytes, but fractions of one too.
    most = max(1.01 * max(sizes, default=0) + 2**10, sum(sizes) / 16)
    return ocp.StandardCheckpointHandler(restore_concurrent_gb=most / 1e9)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: usually ``RunFolder.checkpoints``. Reading changes nothing in it.
        identity: facts that a checkpoint must share to be restored (model config, ...), JSON-like.
            Every key given here is compared with what was saved; other saved keys are not.
        keep: how many of the latest steps stay.
        best: also keep the step whose ``metric`` is the largest ("max") or smallest ("min").
        background: write while training goes on; an error there is raised by the next call.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        identity: Mapping[str, Any],
        keep: int = 2,
        best: Literal["max", "min"] | None = None,
        background: bool = True,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"{directory}: keep is {keep}, at least one step must stay")
        self.directory = Path(directory).absolute()
        self.identity = plain(identity)
        self.keep = keep
        self.best = best
        self.background = background
        self._manager: ocp.CheckpointManager | None = None

    # What is there.

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        found = (path for path in self.directory.iterdir() if path.name.isdecimal())
        return sorted(int(path.name) for path in found if damage(path) is None)

    def damaged(self) -> dict[int, str]:
        """Steps with a folder that cannot be used, later than every complete one, and why."""
        if not self.directory.is_dir():
            return {}
        latest = self.latest_step()
        found = [path for path in self.directory.iterdir() if path.name.isdecimal()]
        later = [path for path in found if latest is None or int(path.name) > latest]
        reasons = {int(path.name): damage(path) for path in later}
        return {step: reasons[step] for step in sorted(reasons) if reasons[step]}

    def latest_step(self) -> int | None:
        """The last complete step; None when there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the best metric (the later one of equals); None when none has a metric."""
        sign = -1.0 if self.best == "min" else 1.0
        metrics = {step: self.metric(step) for step in self.steps()}
        rated = [(sign * value, step) for step, value in metrics.items() if value is not None]
        return max(rated)[1] if rated else None

    def metric(self, step: int) -> float | None:
        """The metric that was saved with a step."""
        return self._read_extra(step)["metric"]

    # Writing.

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
        *,
        metric: float | None = None,
    ) -> None:
        """Write one step. The arrays may be donated as soon as this returns.

        Args:
            state: a mapping with "params" and whatever else the run needs to go on; all leaves are
                arrays (plain numbers belong into ``extra``).
            extra: JSON facts: data position, counters of early stopping, ...
            metric: for ``best``. NaN counts as no metric.
        Raises:
            CheckpointError: the step is there already, a leaf is no array, the disk has less room
                than the arrays, or this or an earlier write failed.
        """
        if "params" not in state:
            raise CheckpointError(f"{self.directory}: the state has no 'params'")
        for path, leaf in _leaves(state).items():
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise CheckpointError(f"state leaf {path} is a {type(leaf).__name__}, not an array")
        if step in self.steps():
            raise CheckpointError(
                f"{self.directory}: step {step} is there already; a run that goes on from an "
                "earlier step discards the later ones first"
            )
        self.check_room(state)
        metric = None if metric is None or math.isnan(metric) else float(metric)
        facts = {"identity": self.identity, "metric": metric, "extra": plain(extra or {})}
        items: dict[str, Any] = {
            "params": ocp.args.StandardSave(state["params"]),
            "extra": ocp.args.JsonSave(facts),
        }
        rest = {name: part for name, part in state.items() if name != "params"}
        if _leaves(rest):
            items["rest"] = ocp.args.StandardSave(rest)
        metrics = None if metric is None or self.best is None else {"best": metric}
        try:
            manager = self._open()
            manager.wait_until_finished()
            saved = manager.save(
                step, args=ocp.args.Composite(**items), metrics=metrics, force=True
            )
        except Exception as error:
            raise CheckpointError(f"{self.directory}: step {step} not saved ({error})") from error
        if not saved:
            raise CheckpointError(f"{self.directory}: Orbax refused to save step {step}")

    def check_room(self, state: Mapping[str, Any]) -> None:
        """Refuse a save that the disk has no room for, before anything is written.

        Steps that the new one replaces are deleted after it, so their room does not count.
        """
        needed = sum(map(_bytes, _leaves(state).values()))
        folder = self.directory
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise CheckpointError(
                f"{self.directory}: a checkpoint needs {needed / 1e9:.3g} GB and the disk has "
                f"{free / 1e9:.3g} GB; make room there, the steps saved so far are whole"
            )

    def check(self) -> None:
        """Raise the error of a write that has failed in the background. Does not wait for others."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def discard_after(self, step: int) -> list[int]:
        """Delete complete checkpoints later than ``step``; returns their steps."""
        late = [found for found in self.steps() if found > step]
        if late:
            manager = self._open()
            for found in late:
                manager.delete(found)
        return late

    def wait(self) -> None:
        """Block until everything is written. CheckpointError when a write has failed."""
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                raise CheckpointError(f"{self.directory}: a save failed ({error})") from error

    def close(self) -> None:
        """Wait for what is being written, then release the writer."""
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:
                raise CheckpointError(f"{self.directory}: a save failed ({error})") from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._set_aside()
            keep: list[Any] = [policies.LatestN(self.keep)]
            options: dict[str, Any] = {}
            if self.best is not None:
                options = {"best_fn": _metric_of, "best_mode": self.best}
                keep.append(
                    policies.BestN(
                        get_metric_fn=_metric_of,
                        reverse=self.best == "min",
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    )
                )
            self._manager = ocp.CheckpointManager(
                self.directory,
                item_names=_ITEMS,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policies.AnyPreservationPolicy(keep),
                    cleanup_tmp_directories=True,
                    enable_async_checkpointing=self.background,
                    temporary_path_class=Listed,
                    **options,
                ),
            )
        return self._manager

    def _set_aside(self) -> None:
        """Rename step folders that are not complete, so that they block nothing, and delete those that
        a later complete step has made useless."""
        if not self.directory.is_dir() or jax.process_index() != 0:
            return
        latest = max(self.steps(), default=-1)
        for path in sorted(self.directory.iterdir()):
            aside = _ASIDE.fullmatch(path.name)
            if aside is None and not (path.name.isdecimal() and damage(path)):
                continue
            if int(aside[1] if aside else path.name) < latest:
                shutil.rmtree(path, ignore_errors=True)
            elif aside is None:
                self._move_aside(path, "incomplete")

    def _move_aside(self, path: Path, word: str) -> None:
        number = 0
        while (aside := path.with_name(f"{word}-{path.name}-{number}")).exists():
            number += 1
        log.warning("%s is %s; set aside as %s", path, word, aside.name)
        path.rename(aside)

    # Reading.

    def restore(self, template: Mapping[str, Any], step: int | None = None) -> Restored:
        """Read a whole state.

        Args:
            template: the tree as it was saved, with arrays or ShapeDtypeStructs as leaves; their
                shardings say where the arrays go (one without: the first device). The number of
                devices need not be the one that saved.
            step: which; the latest when None.
        Raises:
            CheckpointError: no such step. CheckpointMismatch: another identity, or other leaves.
        """
        step, folder, facts = self._find(step)
        rest = {name: part for name, part in template.items() if name != "params"}
        trees = {"params": template["params"]} | ({"rest": rest} if _leaves(rest) else {})
        out = self._read(folder, trees)
        params, others = out["params"], out.get("rest", rest)
        state = {name: params if name == "params" else others[name] for name in template}
        return Restored(step, state, facts["extra"])

    def restore_latest(self, template: Mapping[str, Any]) -> Restored:
        """Read the newest state that can be read, as `restore` does.

        A step whose files are there but cannot be read is set aside with a warning, and the one
        before it is read; the error is raised where there is none, and in a run of several
        processes, which would not agree.
        """
        while True:
            steps = self.steps()
            try:
                return self.restore(template)
            except CheckpointMismatch:
                raise
            except CheckpointError as error:
                if len(steps) < 2 or jax.process_count() > 1:
                    raise
                log.warning("%s; going on from step %d", error, steps[-2])
                self._move_aside(self.directory / str(steps[-1]), "unreadable")

    def restore_params(self, template: Any, step: int | None = None) -> Restored:
        """Read the parameters alone (no memory is spent on the rest); ``state`` is their tree."""
        step, folder, facts = self._find(step)
        return Restored(step, self._read(folder, {"params": template})["params"], facts["extra"])

    def _find(self, step: int | None) -> tuple[int, Path, dict[str, Any]]:
        self.wait()
        found = self.steps()
        if not found:
            broken = "".join(f"; step {k}: {why}" for k, why in self.damaged().items())
            raise CheckpointError(f"{self.directory}: holds no complete checkpoint{broken}")
        step = found[-1] if step is None else step
        if step not in found:
            raise CheckpointError(f"{self.directory}: no complete step {step}; there are {found}")
        facts = self._read_extra(step)
        saved = {name: facts["identity"].get(name) for name in self.identity}
        self._refuse(step, "another model or config", difference(saved, self.identity))
        return step, self.directory / str(step), facts

    def _read_extra(self, step: int) -> dict[str, Any]:
        path = self.directory / str(step) / "extra" / "metadata"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            return {name: facts[name] for name in ("identity", "metric", "extra")}
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error

    def _read(self, folder: Path, trees: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for item, tree in trees.items():
            try:
                with contextlib.closing(_reader(tree)) as handler:
                    saved = _leaves(handler.metadata(folder / item).tree)
                    self._refuse(
                        int(folder.name),
                        f"other arrays in {item}",
                        difference(
                            {path: _facts(leaf) for path, leaf in saved.items()},
                            {path: _facts(leaf) for path, leaf in _leaves(tree).items()},
                            "params" if item == "params" else "",
                        ),
                    )
                    wanted = ocp.args.StandardRestore(jax.tree.map(_abstract, tree))
                    out[item] = handler.restore(folder / item, args=wanted)
            except CheckpointMismatch:
                raise
            except Exception as error:
                raise CheckpointError(f"{folder / item}: cannot be read ({error})") from error
        return out

    def _refuse(self, step: int, what: str, lines: list[str]) -> None:
        if lines:
            shown = "\n  ".join(lines[:_SHOWN])
            more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise CheckpointMismatch(
                f"{self.directory}: step {step} is of {what} (saved -> given):\n  {shown}{more}"
            )


def _metric_of(metrics: Mapping[str, float]) -> float:
    return metrics["best"]
