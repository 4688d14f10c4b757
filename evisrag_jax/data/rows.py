"""The rows of a data file before anything is known of their fields: JSONL, JSON or parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from evisrag_jax.data import schema
from evisrag_jax.data.paths import RecordError, shown
from evisrag_jax.data.schema import Record


@dataclass(frozen=True)
class Row:
    """One row of a data file, read or refused.

    Attributes:
        number: line or row, from 1.
        record: the record, or None where ``error`` says why there is none.
        error: placed with file, row and id.
        unknown: names of fields that this project's layout does not have and does not keep.
    """

    number: int
    record: Record | None = None
    error: RecordError | None = None
    unknown: tuple[str, ...] = ()


def raw_rows(path: Path) -> Iterator[tuple[int, object]]:
    """(number, JSON value or placed error) of each row; blank lines are passed over."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path), start=1)
    elif path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RecordError(f"not JSON: {error}", kind="json", source=str(path)) from None
        if not isinstance(rows, list):
            reason = f"holds {shown(rows)}, not a list of rows"
            raise RecordError(reason, kind="json", source=str(path))
        yield from enumerate(rows, start=1)
    else:
        yield from jsonl_rows(path)


def jsonl_rows(path: Path) -> Iterator[tuple[int, object]]:
    """``raw_rows`` of a JSONL file, read line by line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                yield number, schema.parse_json(raw.decode("utf-8-sig"), str(path), number)
            except UnicodeDecodeError as error:
                reason = f"not UTF-8: {error}"
                yield number, RecordError(reason, kind="json", source=str(path), row=number)
            except RecordError as error:
                yield number, error


def _parquet_rows(path: Path) -> Iterator[Mapping]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(
            f"{path}: reading parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def required(row: object, name: str) -> object:
    """The value of a field, or a ``RecordError`` that lists the fields there are."""
    if not isinstance(row, Mapping):
        raise RecordError(f"the row is {shown(row)}, not an object of fields", kind="type")
    if name not in row:
        found = ", ".join(map(str, row)) or "none"
        raise RecordError(f"is missing (fields found: {found})", field=name, kind="field")
    return row[name]
