"""predictions.jsonl: written so that a run can die at any moment, read so that nothing is counted twice.

While a run goes on its rows are in ``predictions.jsonl.partial``, one line a question, each on disk
before the next question starts. ``finalise`` puts the whole file in place at once. A run that is
started again finds the ids that are done, in either file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evisrag_jax.runtime.json_files import (
    JsonFileError,
    dump_row,
    filter_jsonl,
    read_jsonl,
    write_jsonl,
)


class PredictionWriter:
    """Appends prediction rows and puts the finished file in place.

    Args:
        path: the final file, e.g. RUN/predictions.jsonl. Rows of an earlier, unfinished run are
            kept (a line that its end has cut is dropped), and so are those of a finished one.

    Attributes:
        rows: the rows so far by question id, earlier runs' included.

    Raises:
        JsonFileError: for a row without an id or an id that stands in the file twice.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.partial.exists() and self.path.exists():
            write_jsonl(self.partial, read_jsonl(self.path))
        if self.partial.exists():
            filter_jsonl(self.partial, lambda row: True)  # drops a torn last line
        self.rows: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(read_jsonl(self.partial), start=1):
            self._take(row, f"{self.partial}: row {number}")
        self._file = self.partial.open("a", encoding="utf-8")

    @property
    def done_ids(self) -> frozenset[str]:
        """Ids that need no prediction any more."""
        return frozenset(self.rows)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; it is on disk when this returns.

        Raises:
            JsonFileError: for a row without an id, or with one that was written before.
        """
        if self._file.closed:
            raise JsonFileError(f"{self.path}: the writer is closed")
        line = dump_row(row)
        self._take(dict(row), str(self.path))
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _take(self, row: dict[str, Any], where: str) -> None:
        id = row.get("id")
        if not isinstance(id, str) or not id:
            raise JsonFileError(f"{where}: a prediction needs an id, got {id!r}")
        if id in self.rows:
            raise JsonFileError(f"{where}: question {id!r} has a prediction already")
        self.rows[id] = row

    def finalise(self, order: Sequence[str] | None = None) -> None:
        """Put the finished file in place, atomically, and close the writer.

        Args:
            order: ids in the order of the file; rows of other ids follow. None keeps the order in
                which they were written.
        """
        self.close()
        first = [id for id in order or () if id in self.rows]
        ids = [*first, *(id for id in self.rows if id not in set(first))]
        write_jsonl(self.path, (self.rows[id] for id in ids))
        self.partial.unlink()

    def close(self) -> None:
        """Close without finishing; the rows stay for the next run."""
        self._file.close()

    def __enter__(self) -> PredictionWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Coverage:
    """How the rows of a prediction file relate to the questions of a set.

    Attributes:
        n_expected: questions of the set.
        n_predicted: questions with at least one row.
        n_missing: questions without a row; they are scored as wrong.
        n_duplicate: questions with more than one row; their first row counts.
        missing, duplicate: the ids, in the order of the set.
    """

    n_expected: int
    n_predicted: int
    n_missing: int
    n_duplicate: int
    missing: tuple[str, ...] = ()
    duplicate: tuple[str, ...] = ()

    def require_complete(self) -> None:
        """Raise ValueError, naming ids, unless every question has exactly one row."""
        if self.n_missing or self.n_duplicate:
            shown = ", ".join([*self.missing, *self.duplicate][:5])
            raise ValueError(
                f"{self.n_missing} of {self.n_expected} questions have no prediction and "
                f"{self.n_duplicate} have several ({shown}, ...)"
            )


def match_predictions(
    ids: Sequence[str], rows: Iterable[Mapping[str, Any]], *, source: str = "predictions"
) -> tuple[dict[str, Mapping[str, Any]], Coverage]:
    """The row that counts for each question, and the coverage.

    Args:
        ids: the questions of the set.
        rows: prediction rows in the order of their file.
        source: named in errors.

    Raises:
        ValueError: for a row whose id is no question of the set: the file belongs to another set,
            and scoring the rest would hide it.
    """
    expected = dict.fromkeys(ids)
    if len(expected) < len(ids):
        raise ValueError(f"{source}: the set uses an id more than once")
    chosen: dict[str, Mapping[str, Any]] = {}
    repeated: set[str] = set()
    for number, row in enumerate(rows, start=1):
        id = row.get("id")
        if id not in expected:
            raise ValueError(f"{source}: row {number}: question {id!r} is not in the set")
        if id in chosen:
            repeated.add(id)
        else:
            chosen[id] = row
    missing = tuple(id for id in expected if id not in chosen)
    duplicate = tuple(id for id in expected if id in repeated)
    coverage = Coverage(
        n_expected=len(expected),
        n_predicted=len(chosen),
        n_missing=len(missing),
        n_duplicate=len(duplicate),
        missing=missing,
        duplicate=duplicate,
    )
    return chosen, coverage
