"""Is the context enough to answer? The page rule, a rater, and how far they agree (evaluation spec 4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evisrag_jax.rewards.judge import Chat, JudgeError, fill_in, json_objects, rubric_text
from evisrag_jax.runtime.remote import image_part


def page_rule(gold_pages: Sequence[str], retrieved: Sequence[str]) -> bool:
    """All gold pages are among the retrieved ones; a question without gold pages has none to be found."""
    return bool(gold_pages) and set(gold_pages) <= set(retrieved)


def rate_sufficiency(
    chat: Chat,
    questions: Sequence[str],
    contexts: Sequence[str | Sequence[str | Path]],
) -> list[tuple[bool | None, str]]:
    """For each question whether its context is enough, or None with the reason of the failure.

    Args:
      contexts: page texts as one string, or page image files (for a chat that takes pictures).
    """
    text = rubric_text("sufficiency")
    prompts: list[Any] = []
    for question, context in zip(questions, contexts, strict=True):
        words = context if isinstance(context, str) else f"the {len(context)} pages shown"
        prompt: Any = fill_in(text, {"question": question, "context": words})
        if not isinstance(context, str):
            prompt = [*map(image_part, context), {"type": "text", "text": prompt}]
        prompts.append(prompt)
    out: list[tuple[bool | None, str]] = [(None, "no reply")] * len(prompts)

    def take(index: int, reply: str | Exception) -> None:
        try:
            if isinstance(reply, Exception):
                raise JudgeError(str(reply))
            out[index] = (parse_sufficiency(reply), "")
        except JudgeError as error:
            out[index] = (None, str(error))

    chat(prompts, take)
    return out


def parse_sufficiency(reply: str) -> bool:
    """The rater's last verdict; JudgeError without one."""
    found = [one["sufficient"] for one in json_objects(reply) if "sufficient" in one]
    if not found or found[-1] not in (0, 1, "0", "1"):
        raise JudgeError(f"no verdict of 0 or 1 in the reply {reply[:120]!r}")
    return bool(int(found[-1]))


def agreement(
    first: Sequence[bool | None], second: Sequence[bool | None]
) -> Mapping[str, float | None]:
    """rate and Cohen's kappa over the pairs that both rated, and their number n.

    kappa = (rate - chance) / (1 - chance), chance from both margins; None where one class is all.
    """
    pairs = [
        (bool(a), bool(b))
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None
    ]
    if not pairs:
        return {"n": 0.0, "rate": None, "kappa": None}
    n = len(pairs)
    rate = sum(a == b for a, b in pairs) / n
    p, q = sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n
    chance = p * q + (1 - p) * (1 - q)
    kappa = (rate - chance) / (1 - chance) if chance < 1 else None
    return {"n": float(n), "rate": rate, "kappa": kappa}
