"""A page corpus: a folder with corpus.jsonl, and questions.jsonl whose rows name pages by id."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from evisrag_jax.data import schema
from evisrag_jax.data.paths import RecordError, resolve_image, shown
from evisrag_jax.data.rows import Row, jsonl_rows, required
from evisrag_jax.data.schema import Record


@dataclass(frozen=True)
class CorpusPage:
    """One page of a page corpus: its id, absolute image path, document id (or its own) and text."""

    page_id: str
    path: str
    doc_id: str
    text: str = ""


def read_corpus_pages(folder: str | os.PathLike) -> dict[str, CorpusPage]:
    """The pages of ``folder/corpus.jsonl`` (page_id, file; optional doc_id, text) by page id.

    Raises:
        RecordError: for the first row that cannot be read, an unsafe path or a repeated page id.
    """
    path = Path(folder) / "corpus.jsonl"
    pages: dict[str, CorpusPage] = {}
    for number, row in jsonl_rows(path):
        if isinstance(row, RecordError):
            raise row
        try:
            page_id = schema.parse_id(required(row, "page_id"), "page_id")
            if page_id in pages:
                raise RecordError("is used twice", field="page_id", kind="duplicate")
            pages[page_id] = CorpusPage(
                page_id=page_id,
                path=resolve_image(required(row, "file"), path.parent, "file"),
                doc_id=str(row.get("doc_id") or page_id),
                text=str(row.get("text") or ""),
            )
        except RecordError as error:
            raise error.at(str(path), number, None) from None
    return pages


def read_corpus_questions(
    folder: str | os.PathLike,
    *,
    split: str | None = None,
    scope: str | None = None,
    on_error: Callable[[RecordError], None] | None = None,
) -> list[Record]:
    """Questions of a page corpus as records over their candidate pages.

    A question is sufficient when it is answerable and all its relevant pages are candidates (the
    page rule; a question that names no relevant page goes by ``answerable`` alone). The corpus says
    which pages matter but not what to write about them, so records carry no evidence lines.
    ``doc_ids`` are the documents of the candidates, ``family`` is the data set's name.

    Args:
        folder: holds questions.jsonl (id, question, answers, answerable, relevant_page_ids,
            candidate_page_ids; optional dataset, split, scope) and corpus.jsonl.
        split, scope: keep only questions with this value of the field.
        on_error: as in ``read_records``.

    Raises:
        RecordError: naming file, line, field and reason.
        ValueError: when no question has the wanted split and scope.
    """
    records, others = [], 0
    for row in corpus_rows(Path(folder), {"split": split, "scope": scope}):
        if row.record is not None:
            records.append(row.record)
        elif row.error is None:
            others += 1
        elif on_error is None:
            raise row.error
        else:
            on_error(row.error)
    if not records and others:
        raise ValueError(f"{folder}: none of {others} questions has split={split}, scope={scope}")
    return records


def corpus_rows(folder: Path, wanted: Mapping[str, str | None] | None = None) -> Iterator[Row]:
    """Rows of questions.jsonl; one that ``wanted`` leaves out has neither record nor error."""
    path = folder / "questions.jsonl"
    pages = read_corpus_pages(folder)
    wanted = {name: value for name, value in (wanted or {}).items() if value is not None}
    for number, row in jsonl_rows(path):
        if isinstance(row, RecordError):
            yield Row(number, error=row)
            continue
        try:
            required(row, "id")
            if any(row.get(name) != value for name, value in wanted.items()):
                yield Row(number)
            else:
                yield Row(number, _from_corpus(row, pages))
        except RecordError as error:
            yield Row(number, error=error.at(str(path), number, schema.row_id(row)))


def _from_corpus(row: Mapping, pages: Mapping[str, CorpusPage]) -> Record:
    candidates = page_ids(row, "candidate_page_ids")
    relevant = page_ids(row, "relevant_page_ids")
    unknown = [page for page in candidates if page not in pages]
    if unknown:
        reason = f"names page {unknown[0]!r}, which corpus.jsonl does not hold"
        raise RecordError(reason, field="candidate_page_ids", kind="value")
    answerable = required(row, "answerable")
    if not isinstance(answerable, bool):
        reason = f"is {shown(answerable)}; write true or false"
        raise RecordError(reason, field="answerable", kind="type")
    family = row.get("dataset")
    return Record(
        id=schema.parse_id(required(row, "id")),
        question=schema.parse_text(required(row, "question"), "question"),
        images=tuple(pages[page].path for page in candidates),
        answers=schema.parse_answers(required(row, "answers")),
        is_sufficient=answerable and set(relevant) <= set(candidates),
        doc_ids=tuple(pages[page].doc_id for page in candidates),
        family=None if family is None else schema.parse_text(family, "dataset"),
    )


def page_ids(row: Mapping, field: str) -> list[str]:
    """The page ids that a question's row lists under `field`; RecordError for anything else."""
    value = required(row, field)
    if not isinstance(value, list):
        raise RecordError(f"is {shown(value)}; write a list of ids", field=field, kind="type")
    return [schema.parse_id(item, field) for item in value]
