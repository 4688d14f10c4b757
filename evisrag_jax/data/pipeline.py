"""The training stream: shuffled, repeated, split over processes, prepared in threads, resumable.

    position   0 1 2 3 4 5 | 6 7 8 9 ...        one endless line of draws
    record     4 0 5 1 3 2 | 2 4 1 0 ...        a permutation an epoch, from (seed, epoch)
    lane       0 1 2 3 0 1 | 2 3 0 1 ...        four lanes, one a row of the global batch
    process    0 0 1 1 0 0 | 1 1 0 0 ...        each has neighbouring lanes

A record that cannot be prepared is dropped whole, with all responses it would have had, and the next
draw of its lane takes its place: batches keep their size, and what a lane gives depends neither on the
other lanes, nor on how many processes share them, nor on which file happened to be ready first. The
state of the stream is the next draw of every lane; threads and read-ahead are no part of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from evisrag_jax.data.schema import Record
from evisrag_jax.runtime.host_random import check_seed, philox
from evisrag_jax.runtime.json_files import JsonlWriter, filter_jsonl

STATE_VERSION = 2
_REASONS = 2048  # bytes of the skip counts that a process tells the others
_ENDLESS = 2**40  # positions of an endless stream; more than any run draws

#: Share of refused records above which a warning is given.
WARN_SHARE = 0.01


class DataError(ValueError):
    """Data that no training can start or go on with."""


@dataclass(frozen=True)
class ReadSettings:
    """How records are prepared ahead of the training step.

    Attributes:
        threads: worker threads that run ``prepare``; 0 prepares in the caller's thread.
        ahead: prepared records kept ready; at least one a thread.
    """

    threads: int = 2
    ahead: int = 16

    def __post_init__(self):
        if self.threads < 0 or (self.threads and self.ahead < self.threads):
            raise ValueError(
                f"read settings threads={self.threads}, ahead={self.ahead}: threads must be >= 0 "
                "and ahead at least the number of threads"
            )


class Example(NamedTuple):
    """A prepared record: what ``prepare`` made of it, and where in the stream it stands."""

    record: Record
    item: Any
    position: int
    epoch: int


@dataclass(frozen=True)
class Rejection:
    """A record that was left out: why, in a word and in a sentence, and where in the stream."""

    id: str
    reason: str
    detail: str
    path: str
    position: int
    epoch: int


class Rejected:
    """The stream's rows in a run's rejected.jsonl: one a refused draw, cut back on resume.

    Args:
        path: the file, which may hold rows of others; None keeps nothing on disk. In a run of
            several processes each needs its own.
    """

    STAGE = "stream"

    def __init__(self, path: str | os.PathLike | None = None):
        self.path = None if path is None else Path(path)

    def add(self, rejection: Rejection) -> None:
        """Append one row."""
        if self.path is not None:
            with JsonlWriter(self.path) as writer:
                writer.write({**asdict(rejection), "stage": self.STAGE})

    def cut(self, next_of: Sequence[int]) -> None:
        """Remove this stream's rows that will be drawn again: those at or after their lane's next
        position. Also in the files that further processes have left beside this one.

        The files are replaced, so no other writer may hold them open meanwhile.
        """
        if self.path is None:
            return
        lanes = len(next_of)
        for path in sorted(self.path.parent.glob(f"{self.path.stem}*.jsonl")):
            filter_jsonl(
                path,
                lambda row: (
                    row.get("stage") != self.STAGE
                    or row["position"] < next_of[row["position"] % lanes]
                ),
            )


def epoch_order(count: int, seed: int, epoch: int) -> Int[np.ndarray, " N"]:
    """The order of ``count`` records in one epoch: a permutation set by the arguments alone."""
    return philox(seed, "order", epoch).permutation(count)


def fingerprint(records: Sequence[Record]) -> str:
    """SHA-256 of the records in their order. Images enter by file name, so a folder may move."""
    digest = hashlib.sha256()
    for record in records:
        row = asdict(record)
        row["images"] = [PurePath(path).name for path in record.images]
        digest.update(json.dumps(row, sort_keys=True).encode("utf-8"))
    return digest.hexdigest()


class RecordStream:
    """Batches of prepared records, as lists of ``batch`` examples.

    ``prepare`` runs in worker threads and must be a function of the record alone. Where it raises
    ``PageError`` or ``PromptTooLong`` the record is logged and skipped; any other exception ends
    the run, with the record's id in its notes.

    Args:
        records: the training set; ids must differ.
        prepare: record to item.
        batch: examples a batch (P, or P of this process).
        seed: of the order, in [0, 2**32).
        epochs: passes over the data; None repeats without end. A finite stream ends with a shorter
            batch if the rest does not fill one. Several processes need an endless stream: they skip
            different records, so their finite streams would end at different steps.
        shuffle: False keeps the file's order in every epoch.
        lanes: of all processes together, by default one a process; P where batches shall not depend
            on the number of processes. Each process has neighbouring ones, and a batch takes equally
            many draws of each.
        process_index, process_count: which share of the lanes this process reads.
        read: threads and read-ahead.
        rejected: where refused records are written.
        gather: numpy arrays of all processes, with a leading process axis; see
            ``runtime.processes.gather``. Called by ``get_state`` where there are several.

    Raises:
        DataError: for an empty set or an id used twice; while iterating, when as many draws in a
            row as there are records were refused.
    """

    def __init__(
        self,
        records: Sequence[Record],
        prepare: Callable[[Record], Any],
        batch: int,
        *,
        seed: int,
        epochs: int | None = None,
        shuffle: bool = True,
        lanes: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        read: ReadSettings = ReadSettings(),
        rejected: Rejected | None = None,
        gather: Callable[[Any], Any] | None = None,
    ):
        if not records:
            raise DataError("the training set holds no record")
        repeated = [id for id, times in Counter(r.id for r in records).items() if times > 1]
        if repeated:
            raise DataError(f"{len(repeated)} id(s) are used more than once, e.g. {repeated[0]!r}")
        if batch < 1 or (epochs is not None and epochs < 1):
            raise ValueError(f"batch={batch} and epochs={epochs} must be at least 1")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process {process_index} of {process_count} does not exist")
        if epochs is not None and process_count > 1:
            raise ValueError("several processes need epochs=None and a number of steps instead")
        lanes = process_count if lanes is None else lanes
        if lanes < 1 or lanes % process_count or batch % (lanes // process_count):
            raise ValueError(
                f"lanes={lanes} do not divide over {process_count} processes, or batch={batch} not "
                "over the lanes of one"
            )
        self.records, self.prepare, self.batch = tuple(records), prepare, batch
        self.seed, self.shuffle = check_seed(seed), shuffle
        self.process_index, self.process_count = process_index, process_count
        self.rejected = rejected or Rejected()
        self.seen = 0
        self.skipped: Counter[str] = Counter()
        self.lanes, self._own = lanes, lanes // process_count
        self._first = process_index * self._own
        self._gather = gather
        self._told: tuple[int, Counter[str], list[int]] | None = None
        self._fingerprint = fingerprint(self.records)
        self._length = _ENDLESS if epochs is None else epochs * len(self.records)
        self._in_a_row = 0
        self._warned = False
        self._order = functools.lru_cache(maxsize=2)(self._epoch_order)
        self._begin([self._first + lane for lane in range(self._own)])
        self._draws = self._open(read)

    def _begin(self, next_of: list[int]) -> None:
        """Every own lane goes on at its position of the line."""
        self._next = next_of
        self._restored = tuple(next_of)  # what lies before is passed over
        self._early: list[deque[Example | Rejection]] = [deque() for _ in next_of]

    def _open(self, read: ReadSettings):
        import grain  # here, because it imports jax

        count = self._length
        if self.lanes > 1 and count < _ENDLESS:  # whole rounds; draws beyond the end are none
            count = -(-count // self.lanes) * self.lanes
        line = grain.MapDataset.source(_Positions(count // self.lanes * self._own))
        line = line.map(self._draw)
        ahead = read.ahead if read.threads else 0
        options = grain.ReadOptions(num_threads=read.threads, prefetch_buffer_size=ahead)
        return iter(line.to_iter_dataset(options))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.records))
        return epoch_order(len(self.records), self.seed, epoch)

    def _draw(self, index: int) -> Example | Rejection | None:
        """Runs in a worker thread: the example at a place of this process's line, why there is none, or
        None where it was drawn before a restart or the data has ended."""
        from evisrag_jax.pages.decode import PageError
        from evisrag_jax.prompts.chat import PromptTooLong

        turn, lane = divmod(index, self._own)
        position = turn * self.lanes + self._first + lane
        if position < self._restored[lane] or position >= self._length:
            return None
        record, epoch = self.record(position), position // len(self.records)
        try:
            return Example(record, self.prepare(record), position, epoch)
        except (PageError, PromptTooLong) as error:
            path = str(getattr(error, "path", ""))
            reason = str(getattr(error, "kind", "too_long"))
            return Rejection(record.id, reason, str(error), path, position, epoch)
        except Exception as error:
            error.add_note(f"while preparing record {record.id!r}")
            raise

    def record(self, position: int) -> Record:
        """The record at a position of the line."""
        epoch, offset = divmod(position, len(self.records))
        return self.records[int(self._order(epoch)[offset])]

    def __iter__(self) -> Iterator[list[Example]]:
        return self

    def __next__(self) -> list[Example]:
        examples: list[Example] = []
        for i in range(self.batch):
            example = self._take(i % self._own)
            if example is not None:
                examples.append(example)
        self._warn()
        if not examples:
            raise StopIteration
        return examples

    def _take(self, lane: int) -> Example | None:
        """The next example of an own lane; None at the end of the data."""
        while True:
            if self._early[lane]:
                draw = self._early[lane].popleft()
            else:
                try:
                    draw = next(self._draws)
                except StopIteration:
                    return None
                if draw is None:
                    continue
                of = draw.position % self.lanes - self._first
                if of != lane:  # another lane's turn: a record of this one was refused
                    self._early[of].append(draw)
                    continue
            self._next[lane] = draw.position + self.lanes
            self.seen += 1
            if not isinstance(draw, Rejection):
                self._in_a_row = 0
                return draw
            self._skip(draw)

    def _skip(self, rejection: Rejection) -> None:
        self.skipped[rejection.reason] += 1
        self.rejected.add(rejection)
        self._in_a_row += 1
        if self._in_a_row >= len(self.records):
            raise DataError(
                f"the last {self._in_a_row} records were all refused; the latest, "
                f"{rejection.id!r}: {rejection.detail}"
            )

    def _warn(self) -> None:
        total = self.skipped.total()
        enough = self.seen >= min(len(self.records), 200)
        if not self._warned and enough and total > WARN_SHARE * self.seen:
            self._warned = True
            reasons = ", ".join(f"{name} {count}" for name, count in sorted(self.skipped.items()))
            warnings.warn(
                f"{total} of {self.seen} records were refused and skipped ({reasons}); "
                "validate the data file to see all of them",
                stacklevel=3,
            )

    def metrics(self) -> dict[str, float]:
        """Counters since the start of the run: draws, skips (all and by reason), epochs. Of all
        processes, as they were at the last ``get_state`` where there are several."""
        if self._told is None or self.process_count == 1:
            self._told = self._counts()
        seen, skipped, next_of = self._told
        row = {
            "data/seen": float(seen),
            "data/skipped": float(skipped.total()),
            "data/epoch": min(next_of) / len(self.records),
        }
        return row | {f"data/skipped_{name}": float(n) for name, n in skipped.items()}

    def _counts(self) -> tuple[int, Counter[str], list[int]]:
        """Draws, skips by reason, and the next position of every lane, of all processes."""
        if self.process_count == 1:
            return self.seen, self.skipped, self._next
        text = json.dumps(self.skipped).encode("utf-8").ljust(_REASONS)
        if len(text) > _REASONS:
            raise DataError(f"records are refused for {len(self.skipped)} different reasons")
        turns = [position // self.lanes for position in self._next]
        told = self._gather(
            {
                "turns": np.array(turns, np.int32),
                "seen": np.int32(self.seen),
                "skipped": np.frombuffer(text, np.uint8),
            }
        )
        skipped: Counter[str] = Counter()
        for row in told["skipped"]:
            skipped.update(json.loads(bytes(row)))
        turns = told["turns"].reshape(-1).tolist()
        next_of = [turn * self.lanes + lane for lane, turn in enumerate(turns)]
        return int(told["seen"].sum()), skipped, next_of

    def get_state(self) -> dict[str, Any]:
        """What a resumed stream needs, as plain JSON, the same in all processes. Take it between
        batches, in all of them."""
        seen, skipped, next_of = self._told = self._counts()
        turns = [position // self.lanes for position in next_of]
        first = min(turns)
        return {
            "version": STATE_VERSION,
            "turn": first,
            "ahead": {str(i): turn - first for i, turn in enumerate(turns) if turn > first},
            "lanes": self.lanes,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self._fingerprint,
            "seen": seen,
            "skipped": dict(skipped),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``get_state`` was taken: the next batch is the one that came next there.

        Threads, read-ahead, epochs and the number of processes may differ. Rows of the rejected log
        that lie behind the state are removed; they will be written again. Several processes wait for
        each other (``runtime.processes.barrier``) between this and the next batch.

        Raises:
            DataError: when data, seed, shuffling or lanes are not those of the state; going on would
                repeat some records and skip others.
        """
        mine = {"version": STATE_VERSION, "fingerprint": self._fingerprint, "seed": self.seed}
        mine |= {"shuffle": self.shuffle, "lanes": self.lanes}
        for name, value in mine.items():
            if state.get(name) != value:
                raise DataError(
                    f"cannot resume the data stream: {name} is {value!r} here and "
                    f"{state.get(name)!r} in the checkpoint. Restore the old setting, or start a "
                    "new run from the checkpoint's parameters."
                )
        turn, ahead = int(state["turn"]), state["ahead"]
        next_of = [
            (turn + int(ahead.get(str(lane), 0))) * self.lanes + lane for lane in range(self.lanes)
        ]
        self._begin(next_of[self._first : self._first + self._own])
        self._draws.set_state({"next_index": turn * self._own})
        # The counts of the whole run go on in one place.
        first = self.process_index == 0
        self.seen = int(state["seen"]) if first else 0
        self.skipped = Counter(
            {name: int(n) for name, n in state["skipped"].items()} if first else {}
        )
        self._told = None
        self._in_a_row = 0
        if first:
            self.rejected.cut(next_of)

    def close(self) -> None:
        """Stop the worker threads."""
        self._draws.close()


class _Positions:
    """The line of draws as a Grain source: element i is i."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)
