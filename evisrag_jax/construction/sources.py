"""Raw questions: what is asked, which pages a search ranked for it, and which pages hold the answer.

    layout         recognised by                   ranked pages                  relevant pages
    page corpus    a folder (questions.jsonl,      `retrieved` page ids, else    `relevant_page_ids`
                   corpus.jsonl)                   `candidate_page_ids`
    ranked         rows with `retrieved`           `retrieved`: image paths      `relevant`: image paths
    records        anything `data.sources` reads   `images`                      those with an evidence line

A page of the ranked layout is a path or {"image": path, "doc_id": id, "score": number}. A page without
a document is a document of its own. Files are read row by row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from evisrag_jax.data import schema
from evisrag_jax.data.corpus import CorpusPage, page_ids, read_corpus_pages
from evisrag_jax.data.paths import RecordError, resolve_image, shown
from evisrag_jax.data.rows import jsonl_rows, raw_rows, required
from evisrag_jax.data.schema import Record
from evisrag_jax.data.sources import iter_rows


@dataclass(frozen=True)
class Page:
    """A page image: its absolute path, its document, and its retrieval score where one is known."""

    path: str
    doc_id: str
    score: float | None = None


@dataclass(frozen=True)
class RawQuestion:
    """A question before anything was written about it.

    retrieved: pages, best first.  relevant: pages that hold the answer, or parts of it, retrieved or
    not.  answerable: whether the relevant pages together suffice.  documents: documents that the
    question is about, where its file names them.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    retrieved: tuple[Page, ...]
    relevant: tuple[Page, ...]
    answerable: bool
    documents: tuple[str, ...] = ()
    family: str | None = None

    @property
    def anchors(self) -> tuple[str, ...]:
        """The documents that it belongs to: those of its relevant pages; without any, those that its
        file names; without these, that of its first page."""
        found = [page.doc_id for page in self.relevant] or list(self.documents)
        found = found or [page.doc_id for page in self.retrieved[:1]]
        return tuple(dict.fromkeys(found))


def iter_questions(
    path: str | os.PathLike, *, image_root: str | os.PathLike | None = None
) -> Iterator[RawQuestion | RecordError]:
    """The questions of a file or folder in order; a row that is none comes as its placed error.

    Args:
        path: the file or folder.
        image_root: where relative image paths of a file start; by default its own folder.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: corpus.jsonl is broken, which concerns every question.
    """
    path = Path(path)
    if path.is_dir():
        source = path / "questions.jsonl"
        pages = read_corpus_pages(path)
        rows = _parsed(source, jsonl_rows(source), lambda row: _from_corpus(row, pages))
    else:
        source, root = path, Path(image_root or path.parent)
        if _is_ranked(path):
            rows = _parsed(source, raw_rows(path), lambda row: _from_ranked(row, root))
        else:
            rows = _from_records(path, root)
    seen: dict[str, int] = {}
    for number, found in rows:
        if isinstance(found, RawQuestion) and seen.setdefault(found.id, number) != number:
            error = RecordError(
                f"is already used in row {seen[found.id]}", field="id", kind="duplicate"
            )
            found = error.at(str(source), number, found.id)
        yield found


def _is_ranked(path: Path) -> bool:
    for _, row in raw_rows(path):
        if isinstance(row, Mapping):
            return "retrieved" in row
    return False


def _parsed(source: Path, rows, parse) -> Iterator[tuple[int, RawQuestion | RecordError]]:
    for number, row in rows:
        if isinstance(row, RecordError):
            yield number, row
            continue
        try:
            yield number, parse(row)
        except RecordError as error:
            yield number, error.at(str(source), number, schema.row_id(row))


def _from_corpus(row: Mapping, pages: Mapping[str, CorpusPage]) -> RawQuestion:
    ranked = "retrieved" if "retrieved" in row else "candidate_page_ids"
    retrieved = _known(page_ids(row, ranked), pages, ranked)
    relevant = _known(page_ids(row, "relevant_page_ids"), pages, "relevant_page_ids")
    scores = row.get("retrieved_scores")
    if scores is None:
        scores = [None] * len(retrieved)
    elif not isinstance(scores, list) or len(scores) != len(retrieved):
        reason = f"is {shown(scores)}; write a list of numbers, one a retrieved page"
        raise RecordError(reason, field="retrieved_scores", kind="type")
    documents = row.get("doc_ids") or ([row["doc_id"]] if row.get("doc_id") else [])
    return _question(
        row,
        retrieved=[
            Page(page.path, page.doc_id, _score(score))
            for page, score in zip(retrieved, scores, strict=True)
        ],
        relevant=[Page(page.path, page.doc_id) for page in relevant],
        answerable=required(row, "answerable"),
        documents=tuple(schema.parse_id(document, "doc_ids") for document in documents),
        family=row.get("dataset"),
        field=ranked,
    )


def _known(ids: list[str], pages: Mapping[str, CorpusPage], field: str) -> list[CorpusPage]:
    for id in ids:
        if id not in pages:
            raise RecordError(f"names page {id!r}, which corpus.jsonl does not hold", field=field)
    return [pages[id] for id in ids]


def _from_ranked(row: object, root: Path) -> RawQuestion:
    return _question(
        row,
        retrieved=_ranked_pages(row, "retrieved", root),
        relevant=_ranked_pages(row, "relevant", root),
        answerable=row.get("answerable", True),
        documents=(),
        family=row.get("family"),
        field="retrieved",
    )


def _ranked_pages(row: object, field: str, root: Path) -> list[Page]:
    value = required(row, field)
    if not isinstance(value, list):
        raise RecordError(f"is {shown(value)}; write a list of pages", field=field, kind="type")
    pages = []
    for item in value:
        item = item if isinstance(item, Mapping) else {"image": item}
        path = resolve_image(item.get("image"), root, field)
        document = schema.parse_id(item.get("doc_id", path), field)
        pages.append(Page(path, document, _score(item.get("score"))))
    return pages


def _score(value: object) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise RecordError(f"holds the score {shown(value)}, not a number", kind="type")
    return None if value is None else float(value)


def _question(row, *, retrieved, relevant, answerable, documents, family, field) -> RawQuestion:
    if not isinstance(answerable, bool):
        reason = f"is {shown(answerable)}; write true or false"
        raise RecordError(reason, field="answerable", kind="type")
    if not retrieved:
        raise RecordError("is an empty list; a context needs pages", field=field)
    paths = [page.path for page in retrieved]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise RecordError(f"names {twice} twice", field=field, kind="duplicate")
    return RawQuestion(
        id=schema.parse_id(required(row, "id")),
        question=schema.parse_text(required(row, "question"), "question"),
        answers=schema.parse_answers(required(row, "answers")),
        retrieved=tuple(retrieved),
        relevant=tuple({page.path: page for page in relevant}.values()),
        answerable=answerable,
        documents=documents,
        family=None if family is None else schema.parse_text(family, "family"),
    )


def _from_records(path: Path, root: Path) -> Iterator[tuple[int, RawQuestion | RecordError]]:
    for row in iter_rows(path, image_root=root):
        if row.error is not None:
            yield row.number, row.error
        elif row.record is not None:
            yield row.number, _from_record(row.record, str(path), row.number)


def _from_record(record: Record, source: str, number: int) -> RawQuestion | RecordError:
    documents = record.doc_ids or record.images
    scores = record.scores or [None] * len(record.images)
    pages = [Page(*page) for page in zip(record.images, documents, scores, strict=True)]
    evidence = record.evidence or [None] * len(pages)
    try:
        return _question(
            {"id": record.id, "question": record.question, "answers": record.answers},
            retrieved=pages,
            relevant=[page for page, line in zip(pages, evidence, strict=True) if line],
            answerable=record.is_sufficient,
            documents=(),
            family=record.family,
            field="images",
        )
    except RecordError as error:
        return error.at(source, number, record.id)
