"""A response as the viewer shows it: its sections in order, what stands outside them, evidence by page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

TAGS = ("observe", "evidence", "think", "answer")
NO_EVIDENCE = "no relevant information"
_OPEN = re.compile(rf"<({'|'.join(TAGS)})>")
_RECORD = re.compile(r"^[ \t]*\[(\d{1,3})\]:?[ \t]*", re.MULTILINE)


@dataclass(frozen=True)
class EvidenceRecord:
    """One `[i]:` line of an evidence section; page "" holds text before the first mark."""

    page: str
    text: str
    irrelevant: bool


@dataclass(frozen=True)
class Block:
    """A stretch of the response: a section (`tag`) or text outside any (`tag` is ""). Text is verbatim."""

    tag: str
    text: str
    closed: bool = True
    records: tuple[EvidenceRecord, ...] = ()


def response_blocks(text: str, sections: dict[str, str] | None = None) -> list[Block]:
    """Cut a response at its tags. A section ends at its closing tag, else at the next opening tag or the end.

    Without a text the stored `sections` are shown instead. Nothing of the text is lost but white space
    between sections.
    """
    if not text and sections:
        return [_block(tag, inner, True) for tag, inner in sections.items() if inner]
    blocks: list[Block] = []
    at = 0
    while opening := _OPEN.search(text, at):
        _outside(blocks, text[at : opening.start()])
        tag = opening[1]
        following = _OPEN.search(text, opening.end())
        limit = following.start() if following else len(text)
        closing = text.find(f"</{tag}>", opening.end(), limit)
        end = closing if closing >= 0 else limit
        blocks.append(_block(tag, text[opening.end() : end], closing >= 0))
        at = end + len(f"</{tag}>") if closing >= 0 else limit
    _outside(blocks, text[at:])
    return blocks


def evidence_records(text: str) -> tuple[EvidenceRecord, ...]:
    """The records of an evidence section by the page each line names; () where no line names one."""
    marks = list(_RECORD.finditer(text))
    if not marks:
        return ()
    records = []
    if lead := text[: marks[0].start()].strip():
        records.append(EvidenceRecord("", lead, False))
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        body = text[mark.end() : following.start() if following else len(text)].strip()
        records.append(EvidenceRecord(mark[1], body, is_no_evidence(body)))
    return tuple(records)


def is_no_evidence(text: str) -> bool:
    """Whether a record says that its page has no relevant information (case and final period aside)."""
    return text.strip().rstrip(".").lower() == NO_EVIDENCE


def missing_tags(blocks: Sequence[Block]) -> list[str]:
    """Sections that a response lacks or leaves open."""
    whole = {block.tag for block in blocks if block.closed}
    return [tag for tag in TAGS if tag not in whole]


def _block(tag: str, text: str, closed: bool) -> Block:
    return Block(tag, text.strip("\n"), closed, evidence_records(text) if tag == "evidence" else ())


def _outside(blocks: list[Block], text: str) -> None:
    if text.strip():
        blocks.append(Block("", text.strip("\n")))
