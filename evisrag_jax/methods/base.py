"""What every method is: a callable from records and an engine to predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from evisrag_jax.data.schema import Record
from evisrag_jax.prompts.sections import find_section
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion


@dataclass(frozen=True)
class Prediction:
    """One answered question.

    id: the record's.  text: the whole response.  answer: the text of its <answer> section, of its \\boxed{}
    where there is none, or what the method says; stripped (scores read `text`, by the rules of their mode).
    finish: "stop", "length" or "error".  length: tokens of that response.  degenerate: 20 or more equal
    tokens in a row.  error: why there is no response.  calls: of the model.  generated: tokens of all of
    them.  visual_tokens: merged tokens of the pages of all prompts.
    """

    id: str
    text: str
    answer: str
    finish: str
    length: int
    degenerate: bool = False
    error: str | None = None
    calls: int = 1
    generated: int = 0
    visual_tokens: int = 0


@runtime_checkable
class Method(Protocol):
    """(records, engine) → predictions, one a record and in the records' order. `name` goes into result files."""

    name: str

    def __call__(self, records: Sequence[Record], engine: Engine) -> list[Prediction]: ...


class MethodError(ValueError):
    """A record that a method cannot answer. Has .record (its id) and .reason."""

    def __init__(self, record: str, reason: str):
        self.record, self.reason = record, reason
        super().__init__(f"record {record!r}: {reason}")

    def __reduce__(self):
        return type(self), (self.record, self.reason)


def predict(
    record: Record,
    completion: Completion,
    *,
    whole: bool = False,
    calls: int = 1,
    generated: int | None = None,
    visual_tokens: int = 0,
) -> Prediction:
    """The prediction of a completion. whole: text without a tag or a box is the answer as it stands."""
    return Prediction(
        id=record.id,
        text=completion.text,
        answer=read_answer(completion.text, whole=whole),
        finish=completion.finish,
        length=completion.length,
        degenerate=completion.degenerate,
        error=completion.error,
        calls=calls,
        generated=completion.length if generated is None else generated,
        visual_tokens=visual_tokens,
    )


def read_answer(text: str, *, whole: bool = False) -> str:
    """The answer of a response: its <answer> section, else its last \\boxed{}, else "" or all of it."""
    section = find_section(text, "answer")
    if section is not None:
        return section.text.strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return text.strip() if whole else ""


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{}, braces inside included; None without a closed one."""
    opening = "\\boxed{"
    at = text.rfind(opening)
    while at >= 0:
        depth = 1
        for end in range(at + len(opening), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[at + len(opening) : end].strip()
        at = text.rfind(opening, 0, at)
    return None


def failed(error: MethodError) -> Prediction:
    """The empty prediction of a record that could not be answered; it counts as wrong."""
    return Prediction(error.record, "", "", "error", 0, error=error.reason, calls=0)
