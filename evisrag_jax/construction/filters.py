"""Which of a teacher's responses become training data: the reasons for which one is dropped.

Checked in this order; a response has one reason, the first that holds:

    teacher_failed          there is no response
    truncated               not the four sections, and as long as the limit allows
    bad_format              not the four sections, or not one evidence record a page
    refused_sufficient      the pages suffice, and it refuses to answer
    wrong_answer            the pages suffice, and the answer is none of the gold ones
    other_refusal           the pages do not suffice, and it refuses in other words than asked for
    answered_insufficient   the pages do not suffice, and it answers
    missing_evidence        a relevant page has no evidence
    extra_evidence          a page that is not relevant has evidence

Texts are compared by the `strict` rules of `rewards.text`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evisrag_jax.construction.contexts import Context
from evisrag_jax.data.schema import REFUSALS
from evisrag_jax.prompts.sections import (
    INSUFFICIENT,
    NO_EVIDENCE,
    EvidenceRecord,
    evidence_records,
    find_section,
)
from evisrag_jax.rewards.evisrag import format_score
from evisrag_jax.rewards.text import exact

#: Reasons of `check`, in its order.
REASONS = (
    "teacher_failed",
    "truncated",
    "bad_format",
    "refused_sufficient",
    "wrong_answer",
    "other_refusal",
    "answered_insufficient",
    "missing_evidence",
    "extra_evidence",
)


_MARK = re.compile(r"^[^\S\n]*\[([0-9]{1,6})\]:", re.MULTILINE)


@dataclass(frozen=True)
class Trajectory:
    """A teacher's response to a context.

    sample: its number among those of the context, from 0.  tokens: its length.  failure: why there
    is none.
    """

    text: str
    tokens: int = 0
    sample: int = 0
    failure: str | None = None


@dataclass(frozen=True)
class Drop:
    """Why a response is dropped: a reason of `REASONS` and what was found."""

    reason: str
    detail: str = ""


def check(context: Context, trajectory: Trajectory, max_tokens: int) -> Drop | None:
    """Why this response is no training data, or None where it is.

    Args:
        context: what was asked, with which pages.
        trajectory: the response.
        max_tokens: the limit it was generated under.
    """
    if trajectory.failure is not None:
        return Drop("teacher_failed", trajectory.failure)
    text = trajectory.text
    fault = _form(text, context.k)
    if fault:
        return Drop("truncated" if trajectory.tokens >= max_tokens else "bad_format", fault)
    answer = answer_of(text)
    refuses = any(exact(answer, phrase) for phrase in REFUSALS)
    if not answers_right(context, text):
        if context.sufficient:
            return Drop("refused_sufficient" if refuses else "wrong_answer", answer)
        return Drop("other_refusal" if refuses else "answered_insufficient", answer)
    given = [line is not None for line in evidence_lines(text)]
    pairs = list(enumerate(zip(context.relevant, given, strict=True), start=1))
    missing = [str(page) for page, (relevant, found) in pairs if relevant and not found]
    extra = [str(page) for page, (relevant, found) in pairs if found and not relevant]
    if missing:
        return Drop("missing_evidence", f"page {', '.join(missing)}")
    return Drop("extra_evidence", f"page {', '.join(extra)}") if extra else None


def answers_right(context: Context, text: str) -> bool:
    """Whether the answer section holds a gold answer, or, where the pages do not suffice, the refusal."""
    golds = context.question.answers if context.sufficient else (INSUFFICIENT,)
    answer = answer_of(text)  # an empty one equals a gold answer of punctuation alone
    return bool(answer) and any(exact(answer, gold) for gold in golds)


def answer_of(text: str) -> str:
    """The text of the answer section; "" without one, which is no right answer."""
    section = find_section(text, "answer")
    return section.text.strip() if section and section.closed else ""


def evidence_lines(text: str) -> tuple[str | None, ...]:
    """The evidence of each page in order, None where the record says that there is none."""
    return tuple(
        None if exact(record.text, NO_EVIDENCE) else record.text for record in _records(text)
    )


def _records(text: str) -> tuple[EvidenceRecord, ...]:
    return evidence_records(text) if find_section(text, "evidence") else ()


def _form(text: str, pages: int) -> str:
    """What is wrong with the form; "" where nothing is."""
    if not format_score(text, strip=True):
        return "not the four sections"
    records = _records(text)
    section = find_section(text, "evidence")
    found = [int(index) for index in _MARK.findall(section.text)] if section else []
    if found != list(range(1, pages + 1)):
        return f"evidence records {found} for {pages} page(s)"
    return "" if all(record.text for record in records) else "an empty evidence record"
