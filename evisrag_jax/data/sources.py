"""Readers: record files, the official training and test files, and folders of pages with questions.

    layout             recognised by                    one row is
    record             (anything else)                  a record of this project (data/schema)
    official training  prompt, answer, image            a prompt with <image> marks, tagged gold
    official test      qid, query, answer, image        a question with its retrieved pages
    page corpus        a folder with questions.jsonl    a question with candidate page ids
                       and corpus.jsonl

Files may be .jsonl, .json (one list) or .parquet (needs pyarrow). The official layouts are those of
the EVisRAG release.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from evisrag_jax.data import schema
from evisrag_jax.data.corpus import corpus_rows
from evisrag_jax.data.corpus import read_corpus_questions as read_corpus_questions
from evisrag_jax.data.paths import RecordError, resolve_image, shown
from evisrag_jax.data.rows import Row, raw_rows, required
from evisrag_jax.data.schema import NO_INFORMATION, REFUSALS, Record
from evisrag_jax.prompts.sections import TAGS, evidence_records, parse_sections

IMAGE_MARKER = "<image>"
QUESTION_MARK = "Question:"


def read_records(
    path: str | os.PathLike,
    *,
    image_root: str | os.PathLike | None = None,
    extract_to: str | os.PathLike | None = None,
    on_error: Callable[[RecordError], None] | None = None,
) -> list[Record]:
    """All records of a data file or page-corpus folder; images are not opened.

    Args:
        path: the file or folder.
        image_root: folder that relative image paths start at and that none may leave; by default
            the file's own.
        extract_to: where images that a parquet file carries as bytes are written (by content, so a
            second reading writes nothing); without it such rows are refused.
        on_error: called with each refused row, which is then left out. Without it the first one is
            raised.

    Raises:
        RecordError: see ``on_error``. Its text names file, row, id, field and reason.
        FileNotFoundError: when there is no such file.
    """
    records = []
    for row in iter_rows(path, image_root=image_root, extract_to=extract_to):
        if row.record is not None:
            records.append(row.record)
        elif row.error is not None:
            if on_error is None:
                raise row.error
            on_error(row.error)
    return records


def iter_rows(
    path: str | os.PathLike,
    *,
    image_root: str | os.PathLike | None = None,
    extract_to: str | os.PathLike | None = None,
) -> Iterator[Row]:
    """The rows of a data file or page-corpus folder in order, refused ones included.

    A second row with an id that was used before is refused. See ``read_records`` for the arguments.
    """
    path = Path(path)
    seen: dict[str, int] = {}
    if path.is_dir():
        rows = corpus_rows(path)
    else:
        rows = _file_rows(path, Path(image_root or path.parent), extract_to)
    for row in rows:
        if row.record is not None:
            first = seen.setdefault(row.record.id, row.number)
            if first != row.number:
                error = RecordError(f"is already used in row {first}", field="id", kind="duplicate")
                source = str(path / "questions.jsonl" if path.is_dir() else path)
                row = Row(row.number, error=error.at(source, row.number, row.record.id))
        yield row


def _file_rows(path: Path, root: Path, extract_to: str | os.PathLike | None) -> Iterator[Row]:
    layout = None
    for number, value in raw_rows(path):
        if isinstance(value, RecordError):
            yield Row(number, error=value)
            continue
        unknown: tuple[str, ...] = ()
        try:
            found = _layout(value)
            if found and (layout is None or found != "record"):
                layout = found
            if layout == "training":
                record = _from_training(value, number, path.stem, root, extract_to)
            elif layout == "test":
                record = _from_test(value, root, extract_to)
            else:
                record = schema.record_from_row(value, root)
                unknown = tuple(schema.unknown_fields(value))
        except RecordError as error:
            yield Row(number, error=error.at(str(path), number, schema.row_id(value)))
        else:
            yield Row(number, record, unknown=unknown)


def _layout(row: object) -> str | None:
    """Which layout a row's fields belong to; None for what is no object."""
    if not isinstance(row, Mapping):
        return None
    if "image" in row and "prompt" in row:
        return "training"
    if "image" in row and ("query" in row or "qid" in row):
        return "test"
    return "record"


def _from_test(row: Mapping, root: Path, extract_to: str | os.PathLike | None) -> Record:
    """A record from a row of the official test file (qid, image, query, answer, is_sufficient)."""
    sufficient = required(row, "is_sufficient")
    if not isinstance(sufficient, bool) and not (
        isinstance(sufficient, int) and sufficient in (0, 1)
    ):
        reason = f"is {shown(sufficient)}; write true or false"
        raise RecordError(reason, field="is_sufficient", kind="type")
    return Record(
        id=schema.parse_id(required(row, "qid"), "qid"),
        question=schema.parse_text(required(row, "query"), "query"),
        images=_images(required(row, "image"), root, extract_to),
        answers=schema.parse_answers(required(row, "answer"), "answer"),
        is_sufficient=bool(sufficient),
    )


def _from_training(
    row: Mapping, number: int, stem: str, root: Path, extract_to: str | os.PathLike | None
) -> Record:
    """A record from a row of the official training file (prompt, tagged answer, image).

    The question is what follows the last "Question:" of the prompt, or the whole prompt without its
    image markers where it has none. Rows without an id are called by file and row number.
    """
    prompt = schema.parse_text(required(row, "prompt"), "prompt")
    images = _images(required(row, "image"), root, extract_to)
    markers = prompt.count(IMAGE_MARKER)
    if markers != len(images):
        reason = f"has {markers} {IMAGE_MARKER} marker(s) for {len(images)} image(s)"
        raise RecordError(reason, field="prompt", kind="value")
    bare = prompt.replace(IMAGE_MARKER, "").strip()
    question = bare.rpartition(QUESTION_MARK)[2].strip()
    answer, evidence, response = _from_gold(required(row, "answer"), len(images))
    given = next((row[name] for name in ("id", "qid") if row.get(name) is not None), None)
    return Record(
        id=schema.parse_id(f"{stem}-{number:06d}" if given is None else given),
        question=schema.parse_text(question, "prompt"),
        images=images,
        answers=(answer,),
        is_sufficient=not _says(answer, REFUSALS),
        evidence=evidence,
        response=response,
    )


def _from_gold(gold: object, count: int) -> tuple[str, tuple[str | None, ...], str | None]:
    """(answer, evidence lines, full response or None) of a tagged gold for ``count`` images."""

    def refuse(reason: str, kind: str = "value") -> RecordError:
        return RecordError(reason, field="answer", kind=kind)

    if not isinstance(gold, str):
        reason = f"is {shown(gold)}; the training layout takes one tagged string (several answers "
        raise refuse(reason + "need the record layout)", "type")
    sections = parse_sections(gold)
    missing = [tag for tag in ("evidence", "answer") if tag not in sections]
    if missing:
        tags = " and ".join(f"<{tag}>" for tag in missing)
        raise refuse(f"has no {tags} section: {shown(gold)}")
    answer = sections["answer"].text.strip()
    if not answer:
        raise refuse("has an empty <answer> section")
    lines = _gold_lines(sections["evidence"].text)
    if list(lines) != list(range(1, count + 1)):
        found = ", ".join(f"[{index}]" for index in lines) or "none"
        raise refuse(f"needs one evidence record for each of {count} image(s); found {found}")
    empty = [index for index, line in lines.items() if not line]
    if empty:
        raise refuse(f"has an empty evidence record [{empty[0]}]")
    evidence = tuple(None if _says(line, (NO_INFORMATION,)) else line for line in lines.values())
    whole = all(tag in sections and sections[tag].closed for tag in TAGS)
    return answer, evidence, gold if whole else None


def _gold_lines(evidence: str) -> dict[int, str]:
    """Evidence records by index: those that open a line, or every ``[i]:`` of a one-line gold."""
    records = evidence_records(evidence)
    if len(records) == 1 and f"[{records[0].index + 1}]:" in records[0].text:
        pieces = re.split(r"\[(\d+)\]:", evidence)
        return {int(i): line.strip() for i, line in zip(pieces[1::2], pieces[2::2], strict=True)}
    return {record.index: record.text for record in records}


def _says(text: str, phrases: tuple[str, ...]) -> bool:
    """Whether a text is one of the phrases, whatever its case, outer space and final points."""
    return " ".join(text.casefold().split()).rstrip(" .!") in phrases


def _images(value: object, root: Path, extract_to: str | os.PathLike | None) -> tuple[str, ...]:
    """Images as paths, or as bytes or ``{"bytes": ..., "path": ...}`` as parquet sets have."""
    items = [value] if isinstance(value, (str, bytes, Mapping)) else value
    if not isinstance(items, (list, tuple)):
        reason = f"is {shown(value)}; write a list of paths"
        raise RecordError(reason, field="image", kind="type")
    paths = []
    for item in items:
        if isinstance(item, Mapping):
            data = item.get("bytes")
            item = item.get("path") if data is None else data
        if isinstance(item, bytes):
            paths.append(_extract(item, extract_to))
        else:
            paths.append(resolve_image(item, root, "image"))
    return tuple(paths)


def _extract(data: bytes, extract_to: str | os.PathLike | None) -> str:
    if extract_to is None:
        reason = "carries pictures as bytes; name a folder for them (extract_to)"
        raise RecordError(reason, field="image", kind="path")
    folder = Path(extract_to).absolute()
    path = folder / hashlib.sha256(data).hexdigest()[:32]  # the decoder goes by content, not suffix
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
        temporary.write_bytes(data)
        temporary.replace(path)
    return str(path)
