"""The sets as files: written row by row, put in place whole, picked over for inspection."""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evisrag_jax.data.schema import Record, format_line
from evisrag_jax.runtime.host_random import text_hash
from evisrag_jax.runtime.json_files import dump_row


class StreamedFile:
    """A JSONL file written row by row beside its place; `commit` puts it there, whole.

    Until then a reader sees the file of the run before, or none.
    """

    def __init__(self, path: Path):
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._file = self._partial.open("w+b")
        self.rows = 0

    def write(self, line: str) -> int:
        """Append a line, which ends in its newline; returns its offset."""
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(line.encode("utf-8"))
        self.rows += 1
        return offset

    def write_row(self, row: Mapping[str, Any]) -> int:
        """Append a row; returns its offset."""
        return self.write(dump_row(row))

    def write_record(self, record: Record) -> int:
        """Append a record, its images relative to the file's folder; returns its offset."""
        return self.write(format_line(record, self.path.parent))

    def line(self, offset: int) -> str:
        """The line at an offset."""
        self._file.seek(offset)
        return self._file.readline().decode("utf-8")

    def commit(self) -> None:
        """Put the file in place."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)

    def discard(self) -> None:
        """Remove what was written; does nothing after `commit`."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


class InspectionPick:
    """Rows for a manual inspection: a fixed draw by name from each kind, whatever order they come in.

    Args:
        sizes: rows wanted of the sufficient and of the insufficient kind.
        seed: of the draw.
    """

    def __init__(self, sizes: tuple[int, int], seed: int):
        self.sizes, self.seed = sizes, seed
        self._heaps: tuple[list, list] = ([], [])

    def offer(self, row: Mapping[str, Any]) -> None:
        """Keep the row, which has `id` and `is_sufficient`, if it is among the first of its kind."""
        kind = 0 if row["is_sufficient"] else 1
        heap, size = self._heaps[kind], self.sizes[kind]
        entry = (-text_hash(f"{self.seed} {row['id']}"), row["id"], row)
        if len(heap) < size:
            heapq.heappush(heap, entry)
        elif heap and entry[:2] > heap[0][:2]:
            heapq.heapreplace(heap, entry)

    def rows(self) -> list[Mapping[str, Any]]:
        """The rows, sufficient ones first, each kind in the order of the draw."""
        return [row for heap in self._heaps for *_, row in sorted(heap, reverse=True)]


def inspection_row(
    record: Record, *, set: str, relevant: Sequence[bool], root: Path
) -> dict[str, Any]:
    """A row of inspection.jsonl: a record with its response, its set and the relevant pages."""
    return {
        "id": record.id,
        "set": set,
        "question": record.question,
        "images": [Path(image).relative_to(root).as_posix() for image in record.images],
        "relevant": list(relevant),
        "answers": list(record.answers),
        "is_sufficient": record.is_sufficient,
        "response": record.response,
        "family": record.family,
    }
