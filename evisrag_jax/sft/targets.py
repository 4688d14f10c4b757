"""What a record is trained to say, and which records share a prompt.

records   (q1, pages, response a)  (q2, …, c)  (q1, pages, response b)
groups    (q1, pages) → [a, b]     (q2, …) → [c]          a prompt is encoded once for its group
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evisrag_jax.data.schema import Record
from evisrag_jax.prompts.sections import INSUFFICIENT


class Targets:
    """Responses to train on, by record id; call it with a record (`batching.prepare`'s targets)."""

    def __init__(self, by_id: Mapping[str, tuple[str, ...]]):
        self.by_id = dict(by_id)

    def __call__(self, record: Record) -> tuple[str, ...]:
        """The record's responses, () for an unknown record."""
        return self.by_id.get(record.id, ())

    def __len__(self) -> int:
        return sum(map(len, self.by_id.values()))


def own_targets(record: Record, target: str) -> tuple[str, ...]:
    """Responses of one record: its tagged response, or every gold answer ("answers").

    Insufficient pages have one right answer, "insufficient to answer". Blank ones are left out.
    """
    if target == "response":
        texts: Sequence[str | None] = (record.response,)
    else:
        texts = record.answers if record.is_sufficient else (INSUFFICIENT,)
    return tuple(dict.fromkeys(text for text in texts if text and text.strip()))


def group_records(
    records: Iterable[Record], target: str, group: int
) -> tuple[list[Record], Targets, list[Record]]:
    """Records that ask the same question about the same pages become one group.

    Args:
        records: in file order.
        target: "response" or "answers".
        group: G, responses a group at most; more make a further group under the id of the record
            that brought the first of them.
    Returns:
        One record a group, the responses of each, and the records that have nothing to train on.
    """
    heads: list[Record] = []
    by_id: dict[str, tuple[str, ...]] = {}
    empty: list[Record] = []
    open_groups: dict[tuple[str, tuple[str, ...]], str] = {}
    for record in records:
        texts = own_targets(record, target)
        if not texts:
            empty.append(record)
            continue
        key = (record.question, record.images)
        head = open_groups.get(key)
        if head is not None and len(merged := _join(by_id[head], texts)) <= group:
            by_id[head] = merged
            continue
        heads.append(record)
        by_id[record.id] = texts
        open_groups[key] = record.id
    return heads, Targets(by_id), empty


def _join(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*old, *new)))
