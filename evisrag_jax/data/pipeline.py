"""The training stream: shuffled, repeated, split over processes, prepared in threads, resumable.

    position   0 1 2 3 4 5 | 6 7 8 9 ...        one endless line of draws
    record     4 0 5 1 3 2 | 2 4 1 0 ...        a permutation an epoch, from (seed, epoch)
    process    0 1 0 1 0 1 | 0 1 0 1 ...        each takes every process_count-th

The state of the stream is one number, the next position of its process; threads, read-ahead and
batch size are no part of it. A record that cannot be prepared is dropped whole, with all responses
it would have had, in its place of the line, so batches keep their size and the order never depends
on which file happened to be ready first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from evisrag_jax.data.schema import Record
from evisrag_jax.runtime.host_random import check_seed, philox
from evisrag_jax.runtime.json_files import JsonlWriter, filter_jsonl

STATE_VERSION = 1
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

    def cut(self, position: int) -> None:
        """Remove this stream's rows at ``position`` or later; they will be drawn again.

        The file is replaced, so no other writer may hold it open meanwhile.
        """
        if self.path is not None and self.path.exists():
            filter_jsonl(
                self.path,
                lambda row: row.get("stage") != self.STAGE or row["position"] < position,
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
        process_index, process_count: which share of the stream this process reads.
        read: threads and read-ahead.
        rejected: where refused records are written.

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
        process_index: int = 0,
        process_count: int = 1,
        read: ReadSettings = ReadSettings(),
        rejected: Rejected | None = None,
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
        self.records, self.prepare, self.batch = tuple(records), prepare, batch
        self.seed, self.shuffle = check_seed(seed), shuffle
        self.process_index, self.process_count = process_index, process_count
        self.rejected = rejected or Rejected()
        self.seen = 0
        self.skipped: Counter[str] = Counter()
        self._fingerprint = fingerprint(self.records)
        self._length = _ENDLESS if epochs is None else epochs * len(self.records)
        self._in_a_row = 0
        self._warned = False
        self._order = functools.lru_cache(maxsize=2)(self._epoch_order)
        self._draws = self._open(read)

    def _open(self, read: ReadSettings):
        import grain  # here, because it imports jax

        line = grain.MapDataset.source(_Positions(self._length))
        line = line[self.process_index :: self.process_count].map(self._draw)
        ahead = read.ahead if read.threads else 0
        options = grain.ReadOptions(num_threads=read.threads, prefetch_buffer_size=ahead)
        return iter(line.to_iter_dataset(options))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.records))
        return epoch_order(len(self.records), self.seed, epoch)

    def _draw(self, position: int) -> Example | Rejection:
        """Runs in a worker thread: the example at a position of the line, or why there is none."""
        from evisrag_jax.pages.decode import PageError
        from evisrag_jax.prompts.chat import PromptTooLong

        epoch, offset = divmod(position, len(self.records))
        record = self.records[int(self._order(epoch)[offset])]
        try:
            return Example(record, self.prepare(record), position, epoch)
        except (PageError, PromptTooLong) as error:
            path = str(getattr(error, "path", ""))
            reason = str(getattr(error, "kind", "too_long"))
            return Rejection(record.id, reason, str(error), path, position, epoch)
        except Exception as error:
            error.add_note(f"while preparing record {record.id!r}")
            raise

    def __iter__(self) -> Iterator[list[Example]]:
        return self

    def __next__(self) -> list[Example]:
        examples: list[Example] = []
        while len(examples) < self.batch:
            try:
                draw = next(self._draws)
            except StopIteration:
                break
            self.seen += 1
            if isinstance(draw, Rejection):
                self._skip(draw)
            else:
                self._in_a_row = 0
                examples.append(draw)
        self._warn()
        if not examples:
            raise StopIteration
        return examples

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
        """Counters since the start of the run: draws, skips (all and by reason), epochs."""
        position = self._draws.get_state()["next_index"] * self.process_count
        row = {
            "data/seen": float(self.seen),
            "data/skipped": float(self.skipped.total()),
            "data/epoch": position / len(self.records),
        }
        return row | {f"data/skipped_{name}": float(n) for name, n in self.skipped.items()}

    def get_state(self) -> dict[str, Any]:
        """What a resumed stream needs, as plain JSON. Take it between batches."""
        return {
            "version": STATE_VERSION,
            "next_index": int(self._draws.get_state()["next_index"]),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "process_index": self.process_index,
            "process_count": self.process_count,
            "fingerprint": self._fingerprint,
            "seen": self.seen,
            "skipped": dict(self.skipped),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``get_state`` was taken: the next batch is the one that came next there.

        Threads, read-ahead, batch size and epochs may differ. Rows of the rejected log that lie
        behind the state are removed; they will be written again.

        Raises:
            DataError: when data, seed, shuffling or processes are not those of the state; going on
                would repeat some records and skip others.
        """
        mine = self.get_state()
        for name in ("version", "fingerprint", "seed", "shuffle", "process_index", "process_count"):
            if state.get(name) != mine[name]:
                raise DataError(
                    f"cannot resume the data stream: {name} is {mine[name]!r} here and "
                    f"{state.get(name)!r} in the checkpoint. Restore the old setting, or start a "
                    "new run from the checkpoint's parameters."
                )
        self._draws.set_state({"next_index": int(state["next_index"])})
        self.seen = int(state["seen"])
        self.skipped = Counter({name: int(n) for name, n in state["skipped"].items()})
        self._in_a_row = 0
        self.rejected.cut(int(state["next_index"]) * self.process_count + self.process_index)

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
