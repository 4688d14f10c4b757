"""The record: one question with its retrieved pages, as files keep it and every stage gets it.

A file holds one JSON object a line, UTF-8, image paths relative to the file's folder (or to a data
root that the caller names). Types are checked, never guessed, and every refusal names the file, the
line, the field and the reason.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from evisrag_jax.data.paths import RecordError, resolve_image, shown
from evisrag_jax.prompts.sections import INSUFFICIENT, NO_EVIDENCE
from evisrag_jax.runtime.json_files import write_text

#: Version written into every row; a row without one is read as this version.
SCHEMA_VERSION = 1

#: What an answer says when the pages do not hold it (EVisRAG, released evaluation). The first is
#: also the text of a page's evidence line when the page has nothing to offer.
NO_INFORMATION = NO_EVIDENCE
REFUSALS = (NO_INFORMATION, INSUFFICIENT, f"{INSUFFICIENT} the question")

#: x, y, width, height in pixels of the image as stored, origin at the top left.
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Record:
    """One question.

    Attributes:
        id: unique in its file; names the question in every log, prediction and random key.
        question: the question's text.
        images: absolute paths of the pages, in prompt order.
        answers: gold answers, any of which is right: those of the question itself, also where the
            pages do not hold them (``is_sufficient`` false).
        is_sufficient: whether the pages suffice to answer.
        evidence: gold evidence lines, one an image, None for a page without relevant information;
            empty when the record carries no evidence annotation.
        response: a tagged target response, or None.
        boxes: evidence boxes of each image (an empty tuple for an image without one), or None.
        doc_ids: the document or page id of each image, or None. Splits are made by these.
        family: kind of question, for scores by kind and rewards that depend on it, or None.
        scores: retrieval score of each image, or None.
        source: the set or generator that the question comes from, or None.
    """

    id: str
    question: str
    images: tuple[str, ...]
    answers: tuple[str, ...]
    is_sufficient: bool
    evidence: tuple[str | None, ...] = ()
    response: str | None = None
    boxes: tuple[tuple[Box, ...], ...] | None = None
    doc_ids: tuple[str, ...] | None = None
    family: str | None = None
    scores: tuple[float, ...] | None = None
    source: str | None = None


_FIELDS = tuple(field.name for field in fields(Record))
REQUIRED_FIELDS = ("id", "question", "images", "answers", "is_sufficient")


def record_from_row(row: object, root: str | os.PathLike) -> Record:
    """A record from a parsed JSON object of this project's format.

    Two conveniences, and no others: ``answers`` and ``images`` may be a single string, read as a
    list of one. A null optional field counts as absent. Unknown fields are left alone unless they
    look like a misspelt known one.

    Args:
        row: the parsed object.
        root: folder that relative image paths start at and that none may leave.

    Raises:
        RecordError: naming the field and the reason; file and line are added by ``RecordError.at``.
    """
    if not isinstance(row, Mapping):
        raise RecordError(f"the row is {shown(row)}, not an object of fields", kind="type")
    version = row.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        reason = f"is {shown(version)}; this release reads version {SCHEMA_VERSION}"
        raise RecordError(reason, field="schema_version", kind="value")
    _check_names(row)
    images = parse_images(row["images"], root)
    sufficient = row["is_sufficient"]
    if not isinstance(sufficient, bool):
        reason = f"is {shown(sufficient)}; write true or false"
        raise RecordError(reason, field="is_sufficient", kind="type")
    return Record(
        id=parse_id(row["id"]),
        question=parse_text(row["question"], "question"),
        images=images,
        answers=parse_answers(row["answers"]),
        is_sufficient=sufficient,
        evidence=_evidence(row.get("evidence"), len(images)),
        response=_optional(row, "response", lambda value: parse_text(value, "response")),
        boxes=_optional(row, "boxes", lambda value: _boxes(value, len(images))),
        doc_ids=_optional(row, "doc_ids", lambda value: _doc_ids(value, len(images))),
        family=_optional(row, "family", lambda value: parse_text(value, "family")),
        scores=_optional(row, "scores", lambda value: _scores(value, len(images))),
        source=_optional(row, "source", lambda value: parse_text(value, "source")),
    )


def _check_names(row: Mapping) -> None:
    missing = [name for name in REQUIRED_FIELDS if name not in row]
    unknown = [str(name) for name in row if name not in _FIELDS and name != "schema_version"]
    absent = [name for name in _FIELDS if name not in row]
    for name in unknown:
        close = difflib.get_close_matches(name, absent, n=1, cutoff=0.8)
        if close:
            reason = f"is no field of a record; did you mean {close[0]!r}?"
            raise RecordError(reason, field=name, kind="field")
    if missing:
        found = ", ".join(map(str, row)) or "none"
        reason = f"is missing (fields found: {found})"
        raise RecordError(reason, field=missing[0], kind="field")


def unknown_fields(row: Mapping) -> list[str]:
    """Names in ``row`` that a record does not have; they are not kept."""
    return [str(name) for name in row if name not in _FIELDS and name != "schema_version"]


def parse_id(value: object, field: str = "id") -> str:
    """An id as text. Whole numbers, which some sets use, become their decimal text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        reason = f"is {shown(value)}; an id is a non-empty string or a whole number"
        raise RecordError(reason, field=field, kind="type")
    return value


def parse_text(value: object, field: str) -> str:
    """A non-blank string, unchanged."""
    if not isinstance(value, str):
        raise RecordError(f"is {shown(value)}, not a string", field=field, kind="type")
    if not value.strip():
        raise RecordError("is empty", field=field, kind="value")
    return value


def parse_answers(value: object, field: str = "answers") -> tuple[str, ...]:
    """Gold answers as a tuple: a list means "any of"; a bare string is one answer, not characters.

    Raises:
        RecordError: for numbers, booleans and null, in the list or instead of it (``5``, ``5.0``
            and ``5%`` are different texts, so the writer has to choose), for an empty list and for
            a blank answer.
    """
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        reason = f"is {shown(value)}; write a list of strings"
        raise RecordError(reason, field=field, kind="type")
    if not items:
        raise RecordError("is an empty list; write at least one answer", field=field)
    for item in items:
        if not isinstance(item, str):
            reason = f"holds {shown(item)}; write answers as strings"
            raise RecordError(reason, field=field, kind="type")
        if not item.strip():
            raise RecordError("holds an empty answer", field=field, kind="value")
    return tuple(items)


def parse_images(value: object, root: str | os.PathLike, field: str = "images") -> tuple[str, ...]:
    """Absolute image paths of a list of paths; a bare string is one path, never its characters."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise RecordError(f"is {shown(value)}; write a list of paths", field=field, kind="type")
    return tuple(resolve_image(item, root, field) for item in items)


def _optional(row: Mapping, field: str, parse):
    value = row.get(field)
    return None if value is None else parse(value)


def _list(value: object, field: str, count: int, of: str) -> list:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        reason = f"is {shown(value)}; write a list of {of}, one an image"
        raise RecordError(reason, field=field, kind="type")
    if len(value) != count:
        reason = f"has {len(value)} entries for {count} image(s); write one an image"
        raise RecordError(reason, field=field, kind="value")
    return list(value)


def _evidence(value: object, count: int) -> tuple[str | None, ...]:
    if value is None or value == [] or value == ():
        return ()
    for item in (items := _list(value, "evidence", count, "strings or null")):
        if item is not None and not isinstance(item, str):
            reason = f"holds {shown(item)}; write a string, or null for no relevant information"
            raise RecordError(reason, field="evidence", kind="type")
        if item is not None and not item.strip():
            reason = "holds an empty line; write null for no relevant information"
            raise RecordError(reason, field="evidence", kind="value")
    return tuple(items)


def _doc_ids(value: object, count: int) -> tuple[str, ...]:
    return tuple(parse_id(item, "doc_ids") for item in _list(value, "doc_ids", count, "ids"))


def _scores(value: object, count: int) -> tuple[float, ...]:
    items = _list(value, "scores", count, "numbers")
    return tuple(_number(item, "scores") for item in items)


def _number(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RecordError(f"holds {shown(value)}, not a number", field=field, kind="type")
    return float(value)


def _boxes(value: object, count: int) -> tuple[tuple[Box, ...], ...]:
    """Boxes an image: null, one ``[x, y, w, h]`` or a list of such."""
    per_image = []
    for item in _list(value, "boxes", count, "boxes [x, y, w, h]"):
        if item is None:
            item = []
        if not isinstance(item, (list, tuple)):
            reason = f"holds {shown(item)}; write [x, y, w, h] or a list of such"
            raise RecordError(reason, field="boxes", kind="type")
        one = bool(item) and not isinstance(item[0], (list, tuple))
        per_image.append(tuple(_box(box) for box in ([item] if one else item)))
    return tuple(per_image)


def _box(value: object) -> Box:
    if not isinstance(value, (list, tuple)) or len(value) != 4:
        reason = f"holds {shown(value)}; a box is [x, y, width, height] in pixels"
        raise RecordError(reason, field="boxes", kind="type")
    x, y, width, height = (_number(number, "boxes") for number in value)
    if x < 0 or y < 0 or width <= 0 or height <= 0:
        reason = f"holds {list(value)}; a box needs x, y >= 0 and width, height > 0"
        raise RecordError(reason, field="boxes", kind="value")
    return (x, y, width, height)


def record_to_row(record: Record, root: str | os.PathLike) -> dict:
    """The JSON object of a record: image paths relative to ``root``, absent fields left out.

    Raises:
        RecordError: for an image outside ``root``, which no reader of the file would accept.
    """
    base = Path(os.path.normpath(Path(root).absolute()))
    paths = [Path(resolve_image(str(Path(image).absolute()), base)) for image in record.images]
    row: dict = {
        "schema_version": SCHEMA_VERSION,
        "id": record.id,
        "question": record.question,
        "images": [path.relative_to(base).as_posix() for path in paths],
        "answers": list(record.answers),
        "is_sufficient": record.is_sufficient,
    }
    if record.evidence:
        row["evidence"] = list(record.evidence)
    if record.boxes is not None:
        row["boxes"] = [[list(box) for box in boxes] for boxes in record.boxes]
    for field in ("doc_ids", "scores"):
        if getattr(record, field) is not None:
            row[field] = list(getattr(record, field))
    for field in ("response", "family", "source"):
        if getattr(record, field) is not None:
            row[field] = getattr(record, field)
    return row


def format_line(record: Record, root: str | os.PathLike) -> str:
    """One line of a record file with its newline; text is written as UTF-8, not escaped."""
    return json.dumps(record_to_row(record, root), ensure_ascii=False, allow_nan=False) + "\n"


def parse_line(line: str, source: str, number: int, root: str | os.PathLike) -> Record:
    """The record of one line.

    Args:
        line: the line's text.
        source: the file, for errors.
        number: the line's number from 1, for errors.
        root: see ``record_from_row``.

    Raises:
        RecordError: naming file, line, field and reason.
    """
    row = parse_json(line, source, number)
    try:
        return record_from_row(row, root)
    except RecordError as error:
        raise error.at(source, number, row_id(row)) from None


def parse_json(line: str, source: str, number: int) -> object:
    """The JSON value of one line, or a ``RecordError`` that says where and why it is none.

    A lone surrogate (``\\ud800`` escaped by a careless writer) is refused: it has no UTF-8 form, so
    the text could neither be tokenised nor written again.
    """
    try:
        value = json.loads(line)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reason = f"not JSON: {error}"
        raise RecordError(reason, kind="json", source=source, row=number) from None
    return value


def row_id(row: object) -> str | None:
    """Whatever a row offers as its id (``id`` or ``qid``) as text, for error messages."""
    if isinstance(row, Mapping):
        for name in ("id", "qid"):
            if isinstance(row.get(name), (str, int)):
                return str(row[name])
    return None


def write_records(
    path: str | os.PathLike,
    records: Iterable[Record],
    *,
    image_root: str | os.PathLike | None = None,
) -> int:
    """Write a record file, whole or not at all.

    Args:
        path: the JSONL file.
        records: the records; ids must differ.
        image_root: folder that holds the images, by default the file's own. A reader of the file
            must then be given the same one.

    Returns:
        The number of records written.

    Raises:
        RecordError: for an image outside the root or an id used twice.
    """
    path = Path(path)
    root = path.parent if image_root is None else Path(image_root)
    lines: list[str] = []
    seen: set[str] = set()
    for number, record in enumerate(records, start=1):
        try:
            if record.id in seen:
                raise RecordError("is used by an earlier record", field="id", kind="duplicate")
            lines.append(format_line(record, root))
        except RecordError as error:
            raise error.at(str(path), number, record.id) from None
        seen.add(record.id)
    write_text(path, "".join(lines))
    return len(lines)
