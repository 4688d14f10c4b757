"""Metrics of one question and of a set, in two modes that every score names.

    mode "code" (EVisRAG, released eval.py)          mode "strict"
    answer   first <answer> block, else all text     the one <answer> block, else what the method gave
    accuracy words of a gold all in the answer       sufficient: equal to a gold answer
             (insufficient: of a refusal phrase)     insufficient: equal to a refusal phrase
    text     "3.5" is "35", "-5" is "5"              signs, points, Unicode forms kept apart or joined
    empty    a mean over no question is 0.0          a mean over no question is None, shown as n/a

"Refusal phrase" is one of ``REFUSALS``. A missing prediction counts as wrong everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evisrag_jax.data.schema import NO_INFORMATION, REFUSALS, Record
from evisrag_jax.prompts.sections import evidence_records
from evisrag_jax.rewards import text as matching
from evisrag_jax.rewards.evisrag import format_score

MODES = ("code", "strict")
OUTCOMES = ("right", "wrong", "refused", "missing")
ANSWER_BLOCKS = ("first", "last", "single")
_RELEASED_EPSILON = 1e-7


def check_mode(mode: str) -> str:
    """Return ``mode``, or raise ValueError when it is not one of ``MODES``."""
    if mode not in MODES:
        raise ValueError(f"unknown scoring mode {mode!r}; one of {', '.join(MODES)}")
    return mode


def answer_text(text: str, *, block: str = "first", given: str | None = None) -> str:
    """The answer inside a response.

    Args:
        text: the response.
        block: which of several ``<answer>`` blocks counts. "first" and "last" end at the closing
            tag, the next opening tag or the end of the text. "single" wants exactly one opening and
            one closing tag, else the answer is "".
        given: what a text without ``<answer>`` answers, by the method that wrote it; None takes the
            whole text.
    """
    if block not in ANSWER_BLOCKS:
        raise ValueError(f"answer block {block!r}; one of {', '.join(ANSWER_BLOCKS)}")
    if "<answer>" not in text:
        return text if given is None else given
    if block != "single":
        return matching.extract_tag("answer", text, block) or ""
    opening, closing = text.find("<answer>"), text.find("</answer>")
    if text.count("<answer>") != 1 or text.count("</answer>") != 1 or closing < opening:
        return ""
    return text[opening + len("<answer>") : closing].strip()


def released_scores(answer: str, golds: Sequence[str]) -> dict[str, float]:
    """em, acc, f1 and hallucination of one answer as the released eval.py computes them.

    Each is the best over the gold answers; a gold that shares no word with the answer scores 0 in
    all of them (so does an empty gold, whatever the answer). F1 is over bags of words and stays just
    under 1 by its epsilon. "hallucination" is the release's name for a word overlap with a gold,
    unless exactly one of the two is "no relevant information"; it is in no aggregate.

    Raises:
        TypeError: for a bare string as ``golds``: its characters are no answers.
    """
    if isinstance(golds, str):
        raise TypeError(f"golds is the string {golds!r}; pass a list of gold answers")
    best = dict.fromkeys(("em", "acc", "f1", "hallucination"), 0.0)
    said = matching.normalize(answer, "code")
    for gold in golds:
        wanted = matching.normalize(gold, "code")
        shared = set(said.split()) & set(wanted.split())
        if not shared:
            continue
        scores = {
            "em": float(said == wanted),
            "acc": float(shared == set(wanted.split())),
            "f1": matching.f1_multiset(answer, gold, "code", epsilon=_RELEASED_EPSILON),
            "hallucination": float((said == NO_INFORMATION) == (wanted == NO_INFORMATION)),
        }
        best = {name: max(value, scores[name]) for name, value in best.items()}
    return best


def strict_scores(answer: str, golds: Sequence[str]) -> dict[str, float]:
    """em, contains, f1 and relaxed of one answer, each the best over the gold answers.

    em: equal normalised texts. contains: the gold's words as a run of whole words. f1: over bags of
    words. relaxed: em, or a number within 5 % of a numeric gold (years and zero exactly). An answer
    of which nothing is left by normalisation scores 0.

    Raises:
        TypeError: for a bare string as ``golds``.
    """
    if isinstance(golds, str):
        raise TypeError(f"golds is the string {golds!r}; pass a list of gold answers")
    best = dict.fromkeys(("em", "contains", "f1", "relaxed"), 0.0)
    if not matching.normalize(answer, "strict"):
        return best
    for gold in golds:
        scores = {
            "em": matching.exact(answer, gold, "strict"),
            "contains": matching.contains_tokens(answer, gold, "strict"),
            "f1": matching.f1_multiset(answer, gold, "strict"),
            "relaxed": float(matching.relaxed_match(answer, gold)),
        }
        best = {name: max(value, scores[name]) for name, value in best.items()}
    return best


def is_refusal(answer: str) -> bool:
    """Whether an answer is one of the three refusal phrases, by the strict normaliser."""
    said = matching.normalize(answer, "strict")
    return any(said == matching.normalize(phrase, "strict") for phrase in REFUSALS)


def evidence_scores(text: str, gold: Sequence[str | None]) -> dict[str, float | None]:
    """How well the evidence section of a response fits the gold lines, one an image.

    evidence_f1: mean over relevant pages of the written line's bag-of-words F1 (strict) with the
    gold line. no_information: share of the other pages whose line says "no relevant information".
    page_relevance: share of all pages whose line calls them relevant or not as the gold does. A line
    that was not written scores 0. None where there is no such page, or no gold at all.
    """
    lines = {}
    if "<evidence>" in text:
        lines = {record.index: record.text for record in evidence_records(text)}
    relevant, irrelevant, agreed = [], [], []
    for index, wanted in enumerate(gold, start=1):
        line = lines.get(index, "")
        nothing = bool(matching.exact(line, NO_INFORMATION, "strict"))
        if wanted is None:
            irrelevant.append(float(nothing))
            agreed.append(float(nothing))
        else:
            relevant.append(matching.f1_multiset(line, wanted, "strict"))
            agreed.append(float(bool(line) and not nothing))
    return {
        "evidence_f1": mean(relevant),
        "no_information": mean(irrelevant),
        "page_relevance": mean(agreed),
    }


@dataclass(frozen=True)
class QuestionScore:
    """The scores of one question.

    Attributes:
        id, family, is_sufficient: the record's.
        answer: the answer as read by the strict rule.
        outcome: "right" (equal to a gold answer, whether or not the pages suffice), "refused",
            "wrong" or "missing", by the strict rules.
        values: metric name to value; None where the metric says nothing about this question.
    """

    id: str
    family: str | None
    is_sufficient: bool
    answer: str
    outcome: str
    values: Mapping[str, float | None]


def score_question(
    record: Record,
    prediction: Mapping[str, object] | None,
    *,
    mode: str = "strict",
    answer_block: str = "single",
) -> QuestionScore:
    """Score one prediction in both modes.

    Args:
        record: the question.
        prediction: a row of predictions.jsonl (``prediction`` is the response; ``answer``, ``length``,
            ``finish`` and ``degenerate`` are optional), or None where there is none.
        mode: which mode's accuracy is "accuracy".
        answer_block: the strict mode's rule for several answer blocks (see ``answer_text``).

    Returns:
        ``values`` holds: accuracy; code/em, code/acc, code/f1 (insufficient questions against the
        refusal phrases); strict/accuracy; strict/em, strict/contains, strict/f1, strict/relaxed
        (None on insufficient questions); refused; format; evidence_f1, no_information,
        page_relevance; length, truncated, degenerate (None for a missing prediction).
    """
    check_mode(mode)
    text = "" if prediction is None else str(prediction.get("prediction") or "")
    given = None if prediction is None else prediction.get("answer")
    answer = answer_text(text, block=answer_block, given=None if given is None else str(given))
    golds = record.answers if record.is_sufficient else REFUSALS
    values: dict[str, float | None] = {}
    released = released_scores(answer_text(text), golds)
    values |= {f"code/{name}": released[name] for name in ("em", "acc", "f1")}
    refused = is_refusal(answer)
    matched = strict_scores(answer, record.answers)
    values |= {
        f"strict/{name}": value if record.is_sufficient else None for name, value in matched.items()
    }
    values["strict/accuracy"] = matched["em"] if record.is_sufficient else float(refused)
    values["accuracy"] = values["code/acc" if mode == "code" else "strict/accuracy"]
    values["refused"] = float(refused)
    values["format"] = format_score(text, strip=True)
    values |= evidence_scores(text, record.evidence)
    values |= dict.fromkeys(("length", "truncated", "degenerate"))
    if prediction is None:
        outcome = "missing"
    else:
        outcome = "refused" if refused else "right" if matched["em"] else "wrong"
        if prediction.get("length") is not None:
            values["length"] = float(prediction["length"])  # type: ignore[arg-type]
        values["truncated"] = float(prediction.get("finish") == "length")
        if prediction.get("degenerate") is not None:
            values["degenerate"] = float(bool(prediction["degenerate"]))
    return QuestionScore(record.id, record.family, record.is_sufficient, answer, outcome, values)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None (n/a) where none is."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def metric_values(scores: Iterable[QuestionScore], name: str) -> dict[str, float]:
    """One metric by question id, questions it says nothing about left out (for intervals)."""
    found = {score.id: score.values.get(name) for score in scores}
    return {id: value for id, value in found.items() if value is not None}


def released_aggregates(scores: Iterable[QuestionScore]) -> dict[str, float]:
    """The eleven numbers of the released eval.py under their names; 0.0 over no question."""
    scores = list(scores)
    groups = {
        "global": scores,
        "issuff": [score for score in scores if score.is_sufficient],
        "unsuff": [score for score in scores if not score.is_sufficient],
    }
    row = {}
    for group, members in groups.items():
        for name in ("em",) if group == "unsuff" else ("em", "acc", "f1"):
            row[f"{group}_{name}"] = mean(m.values[f"code/{name}"] for m in members) or 0.0
    return row | {f"cnt_{group}": float(len(members)) for group, members in groups.items()}


def summarise(scores: Sequence[QuestionScore], *, mode: str) -> dict[str, object]:
    """A flat summary of a set; means over no question are None.

    accuracy is the mean of ``mode``'s accuracy over all questions; em, f1 and the rates are strict.
    Names with a prefix: code/ (the released aggregates), strict/, outcome/ (2 x 4 table of counts),
    family/<name>/ (accuracy and count by kind of question). always_insufficient is the accuracy of
    refusing every question: what any method must beat.
    """
    check_mode(mode)
    sufficient = [score for score in scores if score.is_sufficient]
    insufficient = [score for score in scores if not score.is_sufficient]

    def average(members: Sequence[QuestionScore], name: str) -> float | None:
        return mean(score.values[name] for score in members)

    def wrong(members: Sequence[QuestionScore]) -> float | None:
        return mean(float(score.outcome == "wrong") for score in members)

    row: dict[str, object] = {
        "mode": mode,
        "accuracy": average(scores, "accuracy"),
        "accuracy_sufficient": average(sufficient, "accuracy"),
        "accuracy_insufficient": average(insufficient, "accuracy"),
        "em": average(sufficient, "strict/em"),
        "f1": average(sufficient, "strict/f1"),
        "format_rate": average(scores, "format"),
        "evidence_f1": average(scores, "evidence_f1"),
        "no_information_accuracy": average(scores, "no_information"),
        "page_relevance": average(scores, "page_relevance"),
        "refusal_rate": average(scores, "refused"),
        "refusal_rate_sufficient": average(sufficient, "refused"),
        "hallucination_rate": wrong(scores),
        "hallucination_rate_sufficient": wrong(sufficient),
        "hallucination_rate_insufficient": wrong(insufficient),
        "always_insufficient": mean(float(not score.is_sufficient) for score in scores),
        "count": len(scores),
        "count_sufficient": len(sufficient),
        "count_insufficient": len(insufficient),
        "length_mean": average(scores, "length"),
        "truncated_rate": average(scores, "truncated"),
        "degenerate_rate": average(scores, "degenerate"),
    }
    released = released_aggregates(scores)
    for name, value in released.items():
        empty = not released["cnt_" + name.split("_")[0]] if not name.startswith("cnt_") else False
        row[f"code/{name}"] = None if empty else value
    for name in ("em", "contains", "f1", "relaxed"):
        row[f"strict/{name}"] = average(sufficient, f"strict/{name}")
    row["strict/accuracy"] = average(scores, "strict/accuracy")
    for label, members in (("sufficient", sufficient), ("insufficient", insufficient)):
        for outcome in OUTCOMES:
            row[f"outcome/{label}/{outcome}"] = sum(m.outcome == outcome for m in members)
    for family in sorted({score.family for score in scores if score.family is not None}):
        members = [score for score in scores if score.family == family]
        row[f"family/{family}/accuracy"] = average(members, "accuracy")
        row[f"family/{family}/count"] = len(members)
    return row
