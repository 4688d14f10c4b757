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

    id: the record's.  text: the whole response.  answer: the text of its <answer> section, stripped; empty
    without one (scores read `text`, by the rules of their mode).  finish: "stop", "length" or "error".
    length: response tokens.  degenerate: 20 or more equal tokens in a row.  error: why there is no response.
    """

    id: str
    text: str
    answer: str
    finish: str
    length: int
    degenerate: bool = False
    error: str | None = None


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


def predict(record: Record, completion: Completion) -> Prediction:
    """The prediction of one completion with tagged sections."""
    section = find_section(completion.text, "answer")
    return Prediction(
        id=record.id,
        text=completion.text,
        answer=section.text.strip() if section else "",
        finish=completion.finish,
        length=completion.length,
        degenerate=completion.degenerate,
        error=completion.error,
    )


def failed(error: MethodError) -> Prediction:
    """The empty prediction of a record that could not be answered; it counts as wrong."""
    return Prediction(error.record, "", "", "error", 0, error=error.reason)
