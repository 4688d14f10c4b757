"""One run of the engine over requests that share a bucket: the schedule drives the device programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from evisrag_jax.models.decode_attention import Seats
from evisrag_jax.pages.patches import stack_pages
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.rollout import generate as device
from evisrag_jax.rollout.buckets import Bucket
from evisrag_jax.rollout.requests import (
    Completion,
    Request,
    completion,
    prompt_arrays,
    stack_features,
)
from evisrag_jax.rollout.sampling import SamplingConfig, stack_controls
from evisrag_jax.rollout.schedule import Schedule, Seat
from evisrag_jax.runtime.prng import sample_keys

PREFILL_TOKENS = 8192  # prompt tokens of one prefill a shard: more is no faster and takes memory
REFILL = 4  # while responses wait, a quarter of the slots done brings new ones in
SHRINK, FEWEST = 4, 8  # with nothing waiting, slots shrink to a quarter, but not below these


@dataclass(frozen=True, eq=False)
class Machine:
    """What every run of an engine has in common.

    program: (model, config, parameters).  prepared: the parameters in decoding layout.
    place: (host arrays, split over shards?) → device arrays.  timed: a phase's stopwatch.
    slots: responses decoded at once on all shards; None for all of a bucket.
    """

    program: tuple[Any, Any, Any]
    prepared: Any
    ends: device.Ends
    tokenizer: PreTrainedTokenizerFast
    layout: VisionLayout
    mesh: Mesh | None
    shards: int
    slots: int | None
    place: Callable[..., Any]
    timed: Callable[[str], AbstractContextManager[None]]


class Run:
    """Requests of one bucket with `group` responses each, `settings` one a request."""

    def __init__(
        self,
        machine: Machine,
        bucket: Bucket,
        requests: Sequence[Request],
        settings: Sequence[SamplingConfig],
        group: int,
    ):
        self.machine, self.bucket = machine, bucket
        self.requests, self.group = requests, group
        shards = machine.shards
        slots = min(machine.slots or bucket.prompts * group, bucket.prompts * group) // shards
        # Twice the prompts that fill the slots: stragglers hold up nobody.
        rows = min(bucket.prompts // shards, 2 * -(-slots // group))
        self.schedule = Schedule(len(requests), group, shards, rows, slots)
        self.width = self.schedule.width
        self.batch = max(1, min(rows, -(-slots // group), PREFILL_TOKENS // bucket.length))
        self.controls = stack_controls(settings)
        self.max_tokens = np.asarray([s.max_tokens for s in settings], np.int32)

    def __call__(
        self, seed: int, step: int, on_group: Callable[[int, list[Completion]], None]
    ) -> list[list[Completion]]:
        """All completions, [request][sample]. `on_group` gets each request's as soon as the host knows
        them all, while the device goes on with the others."""
        schedule, machine = self.schedule, self.machine
        keys = self._keys(seed, step)
        done: list[list[Completion | None]] = [[None] * self.group for _ in self.requests]
        missing = [self.group] * len(self.requests)
        finished: list[int] = []
        pool, slots = self._empty()
        entry = self._blank_entry()
        while schedule.waiting or schedule.running:
            seated: list[Seat] = []
            while True:
                entered = schedule.enter(self.batch)
                if entered:
                    pool = self._prefill(pool, entered)
                new = schedule.seat()
                seated += new
                if not entered:
                    break
            with machine.timed("decode"):
                if seated:
                    slots = self._admit(pool, slots, entry, seated, keys)
                size = self._smaller()
                if size and not schedule.waiting and schedule.most_running() <= size:
                    index = schedule.shrink(size)
                    entry = jax.tree.map(partial(_rows_of, index=index), entry)
                    slots = device.shrink(slots, machine.place(index), machine.mesh)
                slots = self._decode(pool, slots, self._until())
                for i in finished:  # the device is at work
                    on_group(i, done[i])
                finished = []
                out = jax.device_get(device.results(slots))
            for seat in schedule.leave(out.done):
                done[seat.prompt][seat.sample] = completion(
                    machine.tokenizer, out, seat.shard, seat.slot
                )
                missing[seat.prompt] -= 1
                if not missing[seat.prompt]:
                    finished.append(seat.prompt)
        for i in finished:
            on_group(i, done[i])
        return done

    def warm_up(self) -> None:
        """Runs every program of the bucket once, with nobody in it."""
        pool, slots = self._empty()
        pool = self._prefill(pool, [])
        slots = self._admit(pool, slots, self._blank_entry(), [], None)
        while True:
            slots = self._decode(pool, slots, 0)
            device.results(slots)
            size = self._smaller()
            if not size:
                return
            slots = device.shrink(
                slots, self.machine.place(self.schedule.shrink(size)), self.machine.mesh
            )

    def _smaller(self) -> int:
        """The next smaller number of slots a shard; 0 if these are few already."""
        size = self.schedule.slots // SHRINK
        return size if size >= FEWEST else 0

    def _until(self) -> int:
        """Number of slots done, idle ones included, at which the host has something to do."""
        schedule = self.schedule
        total = schedule.shards * schedule.slots
        idle = total - schedule.running
        if schedule.waiting:
            return idle + max(1, min(schedule.running, total // REFILL))
        return max(idle + 1, total - self._smaller() * schedule.shards)

    def _keys(self, seed: int, step: int) -> np.ndarray:
        """Key data of all responses, uint32[requests, G, 2], made in blocks of one size."""
        size = self.bucket.prompts
        ids = [r.id for r in self.requests]
        ids += [""] * (-len(ids) % size)
        blocks = [
            jax.random.key_data(sample_keys(seed, step, ids[i : i + size], self.group))
            for i in range(0, len(ids), size)
        ]
        return np.concatenate(jax.device_get(blocks))

    def _empty(self) -> tuple[device.Pool, device.Slots]:
        machine, bucket, schedule = self.machine, self.bucket, self.schedule
        model, config, params = machine.program
        pool = device.empty_pool(
            model,
            config,
            shards=schedule.shards,
            rows=schedule.rows,
            length=bucket.length,
            vocab=len(machine.ends.banned),
            dtype=model.compute_dtype(params),
            mesh=machine.mesh,
        )
        slots = device.empty_slots(
            model,
            config,
            pool,
            slots=schedule.slots,
            response=bucket.response,
            mesh=machine.mesh,
        )
        return pool, slots

    def _prefill(self, pool: device.Pool, entered: Sequence[tuple[int, int, int]]) -> device.Pool:
        """Prompts (shard, row, request) into the pool."""
        machine, bucket, shards = self.machine, self.bucket, self.schedule.shards
        rows = np.full((shards, self.batch), self.schedule.rows, np.int32)
        batch: list[Request | None] = [None] * (shards * self.batch)
        taken = [0] * shards
        for shard, row, prompt in entered:
            rows[shard, taken[shard]] = row
            batch[shard * self.batch + taken[shard]] = self.requests[prompt]
            taken[shard] += 1
        features = self._features(batch)
        with machine.timed("prefill"):
            arrays, rows = machine.place((prompt_arrays(batch, bucket), rows))
            pool = device.prefill(*machine.program, arrays, features, pool, rows, machine.mesh)
            return jax.block_until_ready(pool)

    def _features(self, batch: Sequence[Request | None]) -> Any:
        """Features of the batch's pages on the device; None for a bucket without images."""
        machine, bucket = self.machine, self.bucket
        if not bucket.images:
            return None
        model, config, params = machine.program
        vision = getattr(config, "vision", None)
        width = 0 if vision is None else vision.out_width
        given = stack_features(batch, bucket, width, model.compute_dtype(params))
        if given is not None:
            return machine.place(given)
        pages = stack_pages(
            [r.pages if r is not None else () for r in batch],
            images=bucket.images,
            windows=bucket.windows,
            tokens=bucket.tokens,
            layout=machine.layout,
        )
        with machine.timed("encode"):
            features = device.encode(*machine.program, machine.place(pages), machine.mesh)
            return jax.block_until_ready(features)

    def _blank_entry(self) -> device.Entry:
        """Host arrays of what the slots hold, changed as responses enter."""
        grid = (self.schedule.shards, self.schedule.slots)
        blank = stack_controls([SamplingConfig()])
        return device.Entry(
            row=np.zeros(grid, np.int32),
            key=np.zeros((*grid, 2), np.uint32),
            controls=type(blank)(*(np.full(grid, c[0], c.dtype) for c in blank)),
            max_tokens=np.ones(grid, np.int32),
        )

    def _admit(
        self,
        pool: device.Pool,
        slots: device.Slots,
        entry: device.Entry,
        seated: Sequence[Seat],
        keys: np.ndarray | None,
    ) -> device.Slots:
        fresh = np.zeros(entry.row.shape, bool)
        for seat in seated:
            at = seat.shard, seat.slot
            fresh[at] = True
            entry.row[at] = seat.row
            entry.key[at] = keys[seat.prompt, seat.sample]
            entry.max_tokens[at] = self.max_tokens[seat.prompt]
            for whole, values in zip(entry.controls, self.controls, strict=True):
                whole[at] = values[seat.prompt]
        placed = self.machine.place((fresh, entry))
        return device.admit(pool, slots, *placed, self.machine.ends.pad, self.machine.mesh)

    def _decode(self, pool: device.Pool, slots: device.Slots, until: int) -> device.Slots:
        machine = self.machine
        model, config, _ = machine.program
        seats = machine.place(Seats(*self.schedule.plan(self.width)))
        limit = machine.place(np.int32(until), split=False)
        return device.decode(
            model, config, machine.prepared, pool, seats, machine.ends, slots, limit
        )


def _rows_of(a: np.ndarray, *, index: np.ndarray) -> np.ndarray:
    """a[z, index[z]] for every shard z."""
    return a[np.arange(len(a))[:, None], index]
