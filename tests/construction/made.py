"""Raw questions over drawn pages, and a teacher that answers by rule, counts and dies on request."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from PIL import Image

from evisrag_jax.construction.contexts import Context
from evisrag_jax.construction.sources import Page, RawQuestion
from evisrag_jax.construction.teacher import Ask
from evisrag_jax.prompts.sections import INSUFFICIENT, NO_EVIDENCE
from evisrag_jax.runtime.remote import Reply


def tagged(evidence, answer, *, observe="seen", think="so"):
    """A response with these evidence lines (None: nothing relevant) and this answer."""
    lines = "".join(f"[{i}]: {line or NO_EVIDENCE}\n" for i, line in enumerate(evidence, 1))
    return (
        f"<observe>{observe}</observe>\n<evidence>\n{lines}</evidence>\n"
        f"<think>{think}</think>\n<answer>{answer}</answer>"
    )


def right_response(context: Context) -> str:
    """What a perfect teacher says."""
    evidence = [f"{context.question.id} line" if r else None for r in context.relevant]
    answer = context.question.answers[0] if context.sufficient else INSUFFICIENT
    return tagged(evidence, answer)


def question(id="q", retrieved="abc", relevant="a", **changes) -> RawQuestion:
    """A question whose pages and documents are named by letters: page "a" is a.png of document "A"."""

    def pages(letters):
        return tuple(Page(f"/x/{letter}.png", letter.upper()) for letter in letters)

    fields = {
        "id": id,
        "question": f"what is {id}?",
        "answers": ("42",),
        "retrieved": pages(retrieved),
        "relevant": pages(relevant),
        "answerable": True,
    }
    return RawQuestion(**(fields | changes))


def draw_pages(folder: Path, names) -> None:
    """A small picture for each name, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", (28, 28), (number % 256, number // 256, 9)).save(folder / f"{name}.png")


class Killed(BaseException):
    """Stands for a kill: nothing in the code catches it."""


class RuleTeacher:
    """Answers by `rule(context, sample)`, a text or a failure (an Exception); `calls` counts by (context,
    sample). Dies after `lives` replies are on disk; None never does."""

    max_tokens = 100

    def __init__(self, rule, *, name="rule", lives=None):
        self.rule, self.lives = rule, lives
        self.identity = {"kind": "rule", "name": name}
        self.calls: Counter = Counter()

    def prepare(self, context):
        return None

    def answer(self, asks: list[Ask], on_reply, on_failure):
        for ask in asks:
            if self.lives == 0:
                raise Killed
            self.calls[ask.context.id, ask.sample] += 1
            said = self.rule(ask.context, ask.sample)
            if isinstance(said, Exception):
                on_failure(ask, str(said))
                continue
            on_reply(ask, Reply(said, 10, len(said.split()), 0.0, False))
            if self.lives is not None:
                self.lives -= 1
