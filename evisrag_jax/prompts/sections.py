"""The tagged sections of a response and the records in its evidence, by character offsets.

A response has the four sections observe, evidence, think and answer. Models leave tags out, forget
to close them or repeat them, so the reader never fails; it follows one rule (EVisRAG section 1.3):
a section begins at the first ``<tag>`` and its text ends at the next ``<tag>`` or at the first
``</tag>`` after the opening, whichever comes first, else at the end of the response. Case matters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TAGS = ("observe", "evidence", "think", "answer")

NO_EVIDENCE = "no relevant information"
"""What a record says of an image that does not help."""

INSUFFICIENT = "insufficient to answer"
"""The answer when no image suffices."""

_RECORD = re.compile(r"^[^\S\n]*(?P<mark>\[(?P<index>[0-9]{1,6})\]:)", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """One section: characters [start, end) with its tags, [inner_start, inner_end) without.

    `end` lies after ``</tag>`` if the section is closed, else it equals `inner_end`.
    """

    start: int
    end: int
    inner_start: int
    inner_end: int
    text: str
    closed: bool = True


@dataclass(frozen=True)
class EvidenceRecord:
    """One ``[index]: text`` record: characters [start, end) from its bracket to the next record.

    `text` is stripped of outer white space.
    """

    index: int
    start: int
    end: int
    text: str


def find_section(text: str, tag: str) -> Section | None:
    """The section of one tag, or None where ``<tag>`` does not occur."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    if start < 0:
        return None
    inner = start + len(opening)
    again, close = text.find(opening, inner), text.find(closing, inner)
    if close >= 0 and (again < 0 or close < again):
        return Section(start, close + len(closing), inner, close, text[inner:close])
    stop = again if again >= 0 else len(text)
    return Section(start, stop, inner, stop, text[inner:stop], closed=False)


def parse_sections(text: str) -> dict[str, Section]:
    """The sections that occur in a response, keyed and ordered by tag; absent ones are left out.

    Each tag is read on its own, so sections out of order or inside one another may overlap.
    """
    found = {tag: find_section(text, tag) for tag in TAGS}
    return {tag: section for tag, section in found.items() if section is not None}


def evidence_records(text: str) -> tuple[EvidenceRecord, ...]:
    """Records of a response's evidence section, ordered by index; offsets count in `text`.

    A record begins where a line starts with ``[i]:`` (white space before it is allowed) and goes to
    the next such line: the ``strict`` reading of EVisRAG section 3.2, so a ``[2]`` inside a
    sentence does not cut the record. Of a repeated index the first counts. Text without
    ``<evidence>`` is taken as the body of the section.
    """
    section = find_section(text, "evidence")
    base, body = (section.inner_start, section.text) if section else (0, text)
    marks = list(_RECORD.finditer(body))
    records: dict[int, EvidenceRecord] = {}
    ends = [mark.start("mark") for mark in marks[1:]] + [len(body)]
    for mark, stop in zip(marks, ends, strict=False):
        index, start = int(mark["index"]), mark.start("mark")
        record = EvidenceRecord(index, base + start, base + stop, body[mark.end() : stop].strip())
        records.setdefault(index, record)
    return tuple(records[index] for index in sorted(records))
