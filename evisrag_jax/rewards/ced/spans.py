"""Which tokens of a response are scored and trained: its answer, its evidence, or all of it.

Source: CED spec 1.4, 1.9.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Integer

from evisrag_jax.prompts.sections import NO_EVIDENCE, evidence_records, find_section
from evisrag_jax.prompts.spans import char_span_to_tokens, char_to_token


def scope_tokens(
    text: str, offsets: Integer[np.ndarray, "T 2"], scope: str, *, tags: bool = False
) -> Bool[np.ndarray, " T"]:
    """Tokens of a scope: the text inside <answer> or <evidence> ("answer", "evidence"), or all ("full").

    offsets: characters of each token in `text`.  tags: the section with its tags.  A response without
    the section has no token in it. Tokens that only hold white space at the section's edges are left out,
    and so is one that straddles the tag, unless `tags`.
    """
    if scope == "full":
        return np.ones(len(offsets), bool)
    section = find_section(text, scope)
    if section is None:
        return np.zeros(len(offsets), bool)
    if tags:
        return char_span_to_tokens(offsets, section.start, section.end)
    return _inner(text, offsets, section.inner_start, section.inner_end)


def record_tokens(
    text: str, offsets: Integer[np.ndarray, "T 2"]
) -> dict[int, Bool[np.ndarray, " T"]]:
    """Tokens of the text of each evidence record, by its index; the mark `[i]:` is left out."""
    out = {}
    for record in evidence_records(text):
        start = text.index(":", record.start) + 1
        out[record.index] = _inner(text, offsets, start, record.end)
    return out


def relevant_tokens(
    text: str, offsets: Integer[np.ndarray, "T 2"], pages: Sequence[int]
) -> Bool[np.ndarray, " T"]:
    """Tokens of the records of these pages, counted from 1, that hold evidence: a line that says there is
    none is never audited (CED spec 1.9)."""
    out = np.zeros(len(offsets), bool)
    texts = {record.index: record.text for record in evidence_records(text)}
    for index, own in record_tokens(text, offsets).items():
        if index in pages and texts[index] != NO_EVIDENCE:
            out |= own
    return out


def isolated_answer(
    text: str, offsets: Integer[np.ndarray, "T 2"]
) -> tuple[int, Bool[np.ndarray, " T"]]:
    """(first token of `<answer>`, tokens of the answer's text): what is left of a response whose answer is
    scored right behind the prompt. (T, nothing) without an answer."""
    section = find_section(text, "answer")
    span = scope_tokens(text, offsets, "answer")
    if section is None or not span.any():
        return len(offsets), np.zeros(len(offsets), bool)
    return char_to_token(offsets, section.start), span


def _inner(
    text: str, offsets: Integer[np.ndarray, "T 2"], start: int, end: int
) -> Bool[np.ndarray, " T"]:
    """Tokens of text[start:end] without the white space around it."""
    body = text[start:end]
    low = start + len(body) - len(body.lstrip())
    high = start + len(body.rstrip())
    if low >= high:
        return np.zeros(len(offsets), bool)
    return char_span_to_tokens(offsets, low, high)
