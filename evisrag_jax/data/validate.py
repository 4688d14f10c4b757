"""Checks of a whole data file before a run: every row, every image, every prompt length.

Two passes. The first reads rows and looks up image files without opening them; it takes seconds for
a large set. The second decodes every distinct image once, in threads, which is the only way to find
a picture whose header is fine and whose data is cut.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from evisrag_jax.data.schema import REFUSALS, Record
from evisrag_jax.data.sources import iter_rows
from evisrag_jax.runtime.json_files import JsonlWriter

SEVERITIES = ("error", "warning")


@dataclass(frozen=True)
class Finding:
    """One thing wrong with one row.

    Attributes:
        row: line or row number, from 1.
        id: the row's id where it could be read.
        severity: ``error`` (the row cannot be used) or ``warning`` (it can, but look at it).
        kind: short word: those of ``RecordError`` and ``PageError``, ``too_long``, ``content``,
            ``unknown_field``.
        reason: one sentence.
        path: the image concerned, or "".
    """

    row: int
    id: str | None
    severity: str
    kind: str
    reason: str
    path: str = ""


@dataclass(frozen=True)
class ValidationReport:
    """What a check found.

    Attributes:
        path: the checked file or folder.
        rows: number of rows.
        good: number of rows without an error.
        images: number of distinct image files that good rows name.
        decoded: whether the images were decoded, or only looked up.
        findings: in the order of the rows.
        tokens: prompt length of each record by id, where lengths were asked for.
    """

    path: str
    rows: int
    good: int
    images: int
    decoded: bool
    findings: tuple[Finding, ...]
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make a row unusable."""
        return tuple(found for found in self.findings if found.severity == "error")

    @property
    def ok(self) -> bool:
        """True when there are rows and all of them can be used."""
        return self.rows > 0 and not self.errors

    def counts(self) -> dict[str, int]:
        """Errors by kind."""
        return dict(Counter(found.kind for found in self.errors))

    def write(self, path: str | os.PathLike) -> None:
        """Append the findings to a rejected.jsonl, one a line: ``reason`` is the kind, in a word."""
        with JsonlWriter(path) as writer:
            for found in self.findings:
                row = {"id": found.id, "reason": found.kind, "detail": found.reason}
                row |= {"path": found.path, "row": found.row, "severity": found.severity}
                writer.write(row | {"file": self.path, "stage": "validate"})

    def require_ok(self, shown: int = 5) -> None:
        """Raise ValueError with the first ``shown`` errors unless the report is ``ok``."""
        if self.ok:
            return
        if not self.rows:
            raise ValueError(f"{self.path}: holds no rows")
        lines = [f"{self.path}: {len(self.errors)} error(s) in {self.rows} row(s)"]
        for found in self.errors[:shown]:
            name = "" if found.id is None else f" ({found.id})"
            lines.append(f"  row {found.row}{name}: {found.reason}")
        if len(self.errors) > shown:
            lines.append(f"  and {len(self.errors) - shown} more")
        raise ValueError("\n".join(lines))


def validate_file(
    path: str | os.PathLike,
    *,
    decode: bool = True,
    tokens: Callable[[Record], int] | None = None,
    max_tokens: int | None = None,
    image_root: str | os.PathLike | None = None,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> ValidationReport:
    """Check a data file (any layout of ``data/sources``); nothing is changed.

    Args:
        path: the file, or a page-corpus folder.
        decode: decode every image; False only looks the files up.
        tokens: gives a record's prompt length in tokens. A ``PageError`` or ``PromptTooLong`` that
            it raises is reported for its row. Called only for records whose images are fine.
        max_tokens: longer prompts are errors; needs ``tokens``.
        image_root: see ``read_records``.
        threads: decoding threads.
        progress: called with (images done, images in all) while decoding.

    Returns:
        A report; rows with problems are findings, never exceptions.
    """
    if max_tokens is not None and tokens is None:
        raise ValueError("max_tokens needs a tokens function that measures a record")
    findings: list[Finding] = []
    records: list[tuple[int, Record]] = []
    rows = 0
    for row in iter_rows(path, image_root=image_root):
        rows += 1
        if row.error is not None:
            where = f"field {row.error.field!r}: " if row.error.field else ""
            reason = where + row.error.reason
            findings.append(Finding(row.number, row.error.id, "error", row.error.kind, reason))
        elif row.record is not None:
            records.append((row.number, row.record))
            findings += _content(row.number, row.record)
            if row.unknown:
                reason = f"fields not kept: {', '.join(row.unknown)}"
                found = Finding(row.number, row.record.id, "warning", "unknown_field", reason)
                findings.append(found)
    paths = list(dict.fromkeys(image for _, record in records for image in record.images))
    problems = _decode_all(paths, threads, progress) if decode else _look_up(paths)
    lengths: dict[str, int] = {}
    bad = set()
    for number, record in records:
        wrong = [
            Finding(number, record.id, "error", *problems[image], image)
            for image in dict.fromkeys(record.images)
            if image in problems
        ]
        if tokens is not None and not wrong:
            wrong = _measure(number, record, tokens, max_tokens, lengths)
        findings += wrong
        if wrong:
            bad.add(record.id)
    return ValidationReport(
        path=str(path),
        rows=rows,
        good=len(records) - len(bad),
        images=len(paths),
        decoded=decode,
        findings=tuple(sorted(findings, key=lambda found: found.row)),
        tokens=lengths,
    )


def _content(number: int, record: Record) -> Iterable[Finding]:
    """Warnings about records that can be read but look wrong."""

    def warn(reason: str) -> Finding:
        return Finding(number, record.id, "warning", "content", reason)

    if not record.images:
        yield warn("has no image")
    repeated = [image for image, times in Counter(record.images).items() if times > 1]
    if repeated:
        yield warn(f"names the image {repeated[0]} more than once")
    if record.is_sufficient and record.evidence and not any(record.evidence):
        yield warn("is sufficient, yet none of its pages has evidence")
    refusals = [a for a in record.answers if a.casefold().strip(" .") in REFUSALS]
    if record.is_sufficient and refusals:
        yield warn(f"is sufficient, yet its answer is {refusals[0]!r}")


def _look_up(paths: list[str]) -> dict[str, tuple[str, str]]:
    """(kind, reason) of the images that are missing or empty, by path."""
    problems = {}
    for path in paths:
        try:
            size = Path(path).stat().st_size if Path(path).is_file() else None
        except OSError as error:
            problems[path] = ("missing", f"{path}: {error.strerror or error}")
            continue
        if size is None:
            problems[path] = ("missing", f"{path}: no such file")
        elif size == 0:
            problems[path] = ("empty", f"{path}: the file is empty (0 bytes)")
    return problems


def _decode_all(
    paths: list[str], threads: int, progress: Callable[[int, int], None] | None
) -> dict[str, tuple[str, str]]:
    """(kind, reason) of the images that do not decode in full, by path."""
    from evisrag_jax.pages.decode import PageError, load_page

    def check(path: str) -> tuple[str, str] | None:
        try:
            load_page(path)
        except PageError as error:
            return error.kind, str(error)
        return None

    problems = {}
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for done, (path, problem) in enumerate(zip(paths, pool.map(check, paths), strict=True), 1):
            if problem is not None:
                problems[path] = problem
            if progress is not None:
                progress(done, len(paths))
    return problems


def _measure(
    number: int,
    record: Record,
    tokens: Callable[[Record], int],
    limit: int | None,
    lengths: dict[str, int],
) -> list[Finding]:
    from evisrag_jax.pages.decode import PageError
    from evisrag_jax.prompts.chat import PromptTooLong

    try:
        length = lengths[record.id] = int(tokens(record))
    except PageError as error:
        return [Finding(number, record.id, "error", error.kind, str(error), error.path)]
    except PromptTooLong as error:
        return [Finding(number, record.id, "error", "too_long", str(error))]
    if limit is not None and length > limit:
        reason = f"its prompt takes {length} tokens, the limit is {limit}"
        return [Finding(number, record.id, "error", "too_long", reason)]
    return []
