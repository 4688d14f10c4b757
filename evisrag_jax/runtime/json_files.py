"""JSON and JSONL files that survive a crash: whole files replace atomically, rows are flushed.

Files are strict JSON (a browser can read them): NaN and infinity become null. A row that was cut
by a crash is dropped when the file is opened again, and skipped by the reader.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np


class JsonFileError(ValueError):
    """A file that is not what this project writes; names the file and the line."""


def plain(value: Any) -> Any:
    """``value`` as dicts, lists, strings, numbers and None.

    Understands mappings, sequences, sets, dataclasses, paths, numpy and jax arrays and scalars, and
    objects with ``to_dict``. Floats that are NaN or infinite become None.
    Raises TypeError for anything else.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return [plain(part) for part in sorted(value)]
    if isinstance(value, np.generic):
        return plain(value.item())
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return plain(np.asarray(value).tolist())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file atomically: a reader sees the old text or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write one value, indented, atomically."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read one value. JsonFileError names the file when it is not JSON."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise JsonFileError(f"{path}: not JSON ({error})") from error


def dump_row(row: Mapping[str, Any]) -> str:
    """One row as a line, newline included."""
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows, atomically."""
    write_text(path, "".join(dump_row(row) for row in rows))


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rows; [] when the file is absent. A last line without its newline (a crash) is skipped.

    Raises:
        JsonFileError: a complete line that is not a JSON object, with its number.
    """
    path = Path(path)
    if not path.exists():
        return []
    # Split at line feeds alone: U+2028 and its like may stand inside a string.
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise JsonFileError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise JsonFileError(f"{path}: line {number} is not an object")
        rows.append(row)
    return rows


def filter_jsonl(
    path: str | os.PathLike[str], keep: Callable[[dict[str, Any]], bool]
) -> tuple[int, int]:
    """Rewrite the file with the rows that ``keep`` accepts; returns (kept, dropped)."""
    rows = read_jsonl(path)
    kept = [row for row in rows if keep(row)]
    if len(kept) < len(rows) or _ends_torn(Path(path)):
        write_jsonl(path, kept)
    return len(kept), len(rows) - len(kept)


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class JsonlWriter:
    """Appends rows to a JSONL file; every row is flushed before ``write`` returns.

    Opening an existing file first drops a last line that a crash has cut.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if _ends_torn(self.path):
            filter_jsonl(self.path, lambda row: True)
        # Unbuffered, so that a row which the disk refuses is not tried again when the file is closed.
        self._file: IO[bytes] | None = self.path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. OSError names the file."""
        if self._file is None:
            raise JsonFileError(f"{self.path}: the writer is closed")
        left = dump_row(row).encode("utf-8")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
