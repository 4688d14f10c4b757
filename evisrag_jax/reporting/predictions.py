"""The predictions viewer's content: each answer beside the gold one, right or wrong."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evisrag_jax.reporting.display import finite, format_number, text, texts
from evisrag_jax.reporting.images import ImageStore
from evisrag_jax.reporting.response import Block, response_blocks
from evisrag_jax.reporting.viewer import PageView, page_views, spread

REFUSALS = (
    "no relevant information",
    "insufficient to answer",
    "insufficient to answer the question",
)
RIGHT, WRONG, UNJUDGED = "right", "wrong", "unjudged"
_VERDICT_FIELDS = ("correct", "accuracy", "acc")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class PredictionView:
    """One question as shown; `flags` are remarks such as "refused", "degenerate" or why there is no answer."""

    id: str
    record_id: str
    question: str
    answer: str
    golds: tuple[str, ...]
    verdict: str
    flags: tuple[str, ...]
    length: str
    finish: str
    method: str
    pages: tuple[PageView, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Tally:
    """Verdicts over questions of one kind; `refused` counts the wrong ones that refused to answer."""

    kind: str
    right: int
    wrong: int
    refused: int

    @property
    def total(self) -> int:
        """Questions of this kind."""
        return self.right + self.wrong


@dataclass(frozen=True)
class PredictionsViewer:
    """The rows shown, how many of each verdict there are in all, and who judged them."""

    rows: tuple[PredictionView, ...]
    total: int
    counts: dict[str, int]
    shown: dict[str, int]
    tallies: tuple[Tally, ...]
    judge: str


def predictions_viewer(
    rows: Sequence[dict[str, Any]], images: ImageStore, *, limit: int
) -> PredictionsViewer | None:
    """The viewer of at most `limit` predictions, evenly spaced, half of them wrong where there are enough.

    None without rows.
    """
    if not rows:
        return None
    verdicts = [verdict(row) for row in rows]
    places = {
        name: [i for i, v in enumerate(verdicts) if v == name] for name in (RIGHT, WRONG, UNJUDGED)
    }
    room = share_room([len(p) for p in places.values()], limit)
    kept = sorted(
        p[i] for p, n in zip(places.values(), room, strict=True) for i in spread(len(p), n)
    )
    given = sum(any(finite(row.get(f)) is not None for f in _VERDICT_FIELDS) for row in rows)
    judge = "as the run judged them" if given == len(rows) else "judged here"
    if 0 < given < len(rows):
        judge = f"{given} as the run judged them, the others judged here"
    if given and (modes := sorted({text(row["mode"]) for row in rows if row.get("mode")})):
        judge = judge.replace("judged them", f"judged them (mode {', '.join(modes)})")
    return PredictionsViewer(
        rows=tuple(
            _view(f"prediction-{n}", rows[i], verdicts[i], images) for n, i in enumerate(kept)
        ),
        total=len(rows),
        counts=dict(Counter(verdicts)),
        shown=dict(Counter(verdicts[i] for i in kept)),
        tallies=tuple(_tallies(rows, verdicts)),
        judge=judge,
    )


def verdict(row: dict[str, Any]) -> str:
    """One of `RIGHT`, `WRONG` and, without a gold answer, `UNJUDGED`.

    A row's own `correct`, `accuracy` or `acc` decides (from 0.5 on right). Else EVisRAG's released
    accuracy (eval.py, "acc"): all words of some gold answer occur in the answer; where the pages do not
    suffice the gold answers are the three refusals.
    """
    for field in _VERDICT_FIELDS:
        if (value := finite(row.get(field))) is not None:
            return RIGHT if value >= 0.5 else WRONG
    golds = list(REFUSALS) if row.get("is_sufficient") is False else texts(row.get("answers"))
    if not golds:
        return UNJUDGED
    said = words(text(row.get("answer")))
    return RIGHT if any(words(gold) and words(gold) <= said for gold in golds) else WRONG


def words(answer: str) -> set[str]:
    """Words of an answer: lower case, ASCII punctuation deleted, articles left out."""
    return set(_ARTICLES.sub(" ", answer.lower().translate(_DELETE)).split())


def refuses(answer: str) -> bool:
    """Whether the whole answer is one of the three refusals."""
    return words(answer) in [words(phrase) for phrase in REFUSALS]


def share_room(sizes: Sequence[int], limit: int) -> list[int]:
    """Split `limit` places over piles of these sizes as evenly as they allow (each gets at most its size)."""
    room = [0] * len(sizes)
    left = limit
    for place, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        room[i] = min(sizes[i], left // (len(sizes) - place))
        left -= room[i]
    return room


def _tallies(rows: Sequence[dict[str, Any]], verdicts: Sequence[str]) -> list[Tally]:
    tallies = []
    for kind, value in (("pages suffice", True), ("pages do not suffice", False)):
        chosen = [
            (r, v) for r, v in zip(rows, verdicts, strict=True) if r.get("is_sufficient") is value
        ]
        right = sum(v == RIGHT for _, v in chosen)
        wrong = [r for r, v in chosen if v == WRONG]
        refused = sum(refuses(text(r.get("answer"))) for r in wrong)
        if right or wrong:
            tallies.append(Tally(kind, right, len(wrong), refused))
    return tallies


def _view(id: str, row: dict[str, Any], verdict: str, images: ImageStore) -> PredictionView:
    answer = text(row.get("answer"))
    flags = []
    if refuses(answer):
        flags.append("refused")
    if row.get("is_sufficient") is False:
        flags.append("pages do not suffice")
    if row.get("degenerate") is True:
        flags.append("degenerate")
    if text(row.get("finish")) not in ("", "stop"):
        flags.append(": ".join(filter(None, (text(row.get("finish")), text(row.get("error"))))))
    return PredictionView(
        id=id,
        record_id=text(row.get("id")),
        question=text(row.get("question")),
        answer=answer,
        golds=tuple(texts(row.get("answers"))),
        verdict=verdict,
        flags=tuple(flags),
        length=format_number(row.get("length")),
        finish=text(row.get("finish")) or "n/a",
        method=text(row.get("method")),
        pages=page_views(row, images),
        blocks=tuple(response_blocks(text(row.get("prediction")))),
    )
