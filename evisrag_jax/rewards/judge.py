"""Judges of answers and refusals: one interface over a rule, a local model and a server.

    items ─ known verdict? ─► cache
          └ rule │ chat (local model, server): rubric ─► reply ─ parse ─► Verdict
                                                              └ nothing usable: a failure

A failure has no score: it is counted, left out of every mean, and judged again on the next run, since
only verdicts are cached. A judge that was a reward must not be the only one that evaluates.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol, runtime_checkable

from evisrag_jax.data.schema import REFUSALS
from evisrag_jax.rewards import text as matching
from evisrag_jax.runtime.remote import ChatClient, RemoteError
from evisrag_jax.runtime.request_cache import RequestCache, request_key

RUBRICS = ("binary", "scale")
PASS = 4  # of the 1-to-5 scale (ViDoRAG)
_BARE = re.compile(r"\W*(true|false|[0-9]+(?:\.[0-9]+)?)\W*", re.IGNORECASE)


class JudgeError(ValueError):
    """A reply without a usable verdict; says what is missing or wrong."""


@dataclass(frozen=True)
class JudgeItem:
    """What is judged.  golds: right answers.  is_sufficient: whether the pages hold one of them."""

    id: str
    question: str
    golds: tuple[str, ...]
    prediction: str
    is_sufficient: bool


@dataclass(frozen=True)
class Verdict:
    """score: 1 right (of an insufficient context: refused), 0 not, None for a failure.  verdict: "right",
    "wrong", "refused" or None.  reason: the judge's, or of the failure."""

    id: str
    score: float | None
    verdict: str | None
    reason: str = ""
    cached: bool = False


@runtime_checkable
class Judge(Protocol):
    """name: backend, model and rubric; part of a cached verdict's key."""

    name: str

    def __call__(
        self, items: Sequence[JudgeItem], on_verdict: Callable[[int, Verdict], None]
    ) -> list[Verdict]: ...


def settle(item: JudgeItem, *, correct: bool, refused: bool, reason: str = "") -> Verdict:
    """The verdict that follows: a refusal is right for an insufficient context, and only there."""
    outcome = "refused" if refused else "right" if correct else "wrong"
    score = float(refused) if not item.is_sufficient else float(correct and not refused)
    return Verdict(item.id, score, outcome, reason)


@dataclass(frozen=True)
class RuleJudge:
    """Equality of normalised texts (strict), or token F1 of at least `f1` where that is not 0; refusals by
    the three phrases."""

    f1: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.f1 <= 1:
            raise ValueError(f"judge.f1={self.f1}; between 0 (equality) and 1")

    @property
    def name(self) -> str:
        """See `Judge`."""
        return f"rule f1={self.f1:g}"

    def __call__(
        self,
        items: Sequence[JudgeItem],
        on_verdict: Callable[[int, Verdict], None] = lambda index, verdict: None,
    ) -> list[Verdict]:
        """One verdict an item; a rule has no failures."""
        out = []
        for index, item in enumerate(items):
            said = item.prediction
            refused = any(matching.exact(said, phrase) for phrase in REFUSALS)
            if self.f1:
                correct = any(matching.f1_multiset(said, gold) >= self.f1 for gold in item.golds)
            else:
                correct = any(matching.exact(said, gold) for gold in item.golds)
            out.append(settle(item, correct=correct, refused=refused))
            on_verdict(index, out[-1])
        return out


@runtime_checkable
class Chat(Protocol):
    """Answers prompts: a text, or the error that stands in its place, each told as soon as it is there."""

    name: str

    def __call__(
        self, prompts: Sequence[Any], on_reply: Callable[[int, str | Exception], None]
    ) -> None: ...


@dataclass(frozen=True)
class ChatJudge:
    """A model that grades by a rubric.  chat: the model.  rubric: "binary" (further information allowed)
    or "scale" (1 to 5, pass from 4)."""

    chat: Chat
    rubric: str = "binary"

    def __post_init__(self) -> None:
        if self.rubric not in RUBRICS:
            raise ValueError(f"judge.rubric={self.rubric!r}; one of {', '.join(RUBRICS)}")

    @property
    def name(self) -> str:
        """See `Judge`; a rubric of other words is another judge."""
        words = hashlib.sha256(rubric_text(self.rubric).encode("utf-8")).hexdigest()[:12]
        return f"{self.chat.name} {self.rubric} {words}"

    def __call__(
        self,
        items: Sequence[JudgeItem],
        on_verdict: Callable[[int, Verdict], None] = lambda index, verdict: None,
    ) -> list[Verdict]:
        """One verdict an item, failures included."""
        out: list[Verdict | None] = [None] * len(items)

        def take(index: int, reply: str | Exception) -> None:
            item = items[index]
            try:
                if isinstance(reply, Exception):
                    raise JudgeError(str(reply))
                correct, refused, reason = parse_verdict(reply, self.rubric)
                verdict = settle(item, correct=correct, refused=refused, reason=reason)
            except JudgeError as error:
                verdict = Verdict(item.id, None, None, str(error))
            out[index] = verdict
            on_verdict(index, verdict)

        self.chat([fill(self.rubric, item) for item in items], take)
        return out


@dataclass(frozen=True)
class ServerChat:
    """A model behind a server; prompts are texts or lists of message parts."""

    client: ChatClient
    max_tokens: int = 512

    @property
    def name(self) -> str:
        """See `Judge`."""
        return f"server {self.client.server.base_url} {self.client.server.model}"

    def __call__(
        self, prompts: Sequence[Any], on_reply: Callable[[int, str | Exception], None]
    ) -> None:
        """See `Chat`; temperature 0."""
        requests = [
            {"messages": [{"role": "user", "content": prompt}], "max_tokens": self.max_tokens}
            for prompt in prompts
        ]

        def told(index: int, reply: Any) -> None:
            on_reply(index, reply if isinstance(reply, RemoteError) else reply.text)

        self.client.ask_many(requests, told)


def rubric_text(name: str) -> str:
    """The words of a rubric that ships with the package."""
    source = resources.files("evisrag_jax.rewards") / "rubrics" / f"{name}.txt"
    return source.read_text(encoding="utf-8")


def fill(rubric: str, item: JudgeItem) -> str:
    """The prompt of one item. Braces inside its question and answers stay as they are."""
    golds = " | ".join(item.golds) if item.is_sufficient else " | ".join(REFUSALS)
    values = {"question": item.question, "golds": golds, "prediction": item.prediction}
    return fill_in(rubric_text(rubric), values)


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """{name} replaced by its value in one pass; other braces stay."""
    names = "|".join(map(re.escape, values))
    return re.sub(r"\{(" + names + r")\}", lambda found: values[found[1]], text)


def parse_verdict(reply: str, rubric: str) -> tuple[bool, bool, str]:
    """(correct, refused, reason) of a judge's reply.

    Read are a JSON object, also inside a fence or prose (the last one that has the key), and a bare
    number or true/false. JudgeError for a reply without a score and for one outside the rubric.
    """
    key = "correct" if rubric == "binary" else "score"
    found = [one for one in json_objects(reply) if key in one]
    if found:
        value, told = found[-1][key], found[-1]
    else:
        bare = _BARE.fullmatch(reply.strip().strip("`"))
        if bare is None:
            raise JudgeError(f"no {key} in the reply {reply[:120]!r}")
        value, told = json.loads(bare[1].lower()), {}
    refused = told.get("refused", False)
    if isinstance(refused, str):
        refused = refused.strip().lower() == "true"
    if isinstance(value, str):
        text = value.strip().lower()
        if not _BARE.fullmatch(text or "-"):
            raise JudgeError(f"bad {key} {value!r}")
        value = json.loads(_BARE.fullmatch(text)[1])
    reason = str(told.get("reason", ""))
    if rubric == "binary":
        if value not in (True, False):  # 0 and 1 are equal to them
            raise JudgeError(f"bad {key} {value!r}; true or false")
        return bool(value), bool(refused), reason
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 5:
        raise JudgeError(f"bad {key} {value!r}; 1 to 5")
    return value >= PASS, bool(refused), reason


def json_objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that stand in a text, outermost ones, in order."""
    decoder, out, at = json.JSONDecoder(), [], text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            out.append(value)
        except json.JSONDecodeError:
            end = at + 1
        at = text.find("{", end)
    return [one for one in out if isinstance(one, dict)]


def verdict_key(judge: str, item: JudgeItem) -> str:
    """What a cached verdict is found by."""
    facts = {"judge": judge, "question": item.question, "golds": list(item.golds)}
    return request_key(facts | {"prediction": item.prediction, "sufficient": item.is_sufficient})


def judge_all(
    judge: Judge,
    items: Sequence[JudgeItem],
    cache: RequestCache | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Verdicts of all items: cached ones, and new ones, which are on disk before the next is waited for.
    Failures are not cached, so the next call judges them again."""
    out: list[Verdict | None] = [None] * len(items)
    waiting = []
    for index, item in enumerate(items):
        known = None if cache is None else cache.get(verdict_key(judge.name, item))
        if known is None:
            waiting.append(index)
        else:
            out[index] = Verdict(item.id, known["score"], known["verdict"], known["reason"], True)
            on_verdict(out[index])

    def take(place: int, verdict: Verdict) -> None:
        index = waiting[place]
        out[index] = verdict
        if verdict.score is not None and cache is not None:
            kept = {"score": verdict.score, "verdict": verdict.verdict, "reason": verdict.reason}
            cache.put(verdict_key(judge.name, items[index]), kept)
        on_verdict(verdict)

    if waiting:
        judge([items[index] for index in waiting], take)
    return out
