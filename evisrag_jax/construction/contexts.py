"""Contexts: the pages that a question is asked with, by retrieval rank, and what they suffice for.

retrieved  a  B  c  D  e        relevant: B, D
top 1      a                    insufficient, nothing relevant is shown
top 2      a  B                 insufficient, evidence on page 2
top 4      a  B  c  D           sufficient, evidence on pages 2 and 4
"""

from __future__ import annotations

from dataclasses import dataclass

from evisrag_jax.construction.sources import Page, RawQuestion
from evisrag_jax.data.schema import Record


@dataclass(frozen=True)
class ContextConfig:
    """Which contexts a question gives.

    ks: numbers of pages (the paper augments with top-1 to top-5).  insufficient: most insufficient
    contexts a question, those with most pages first; -1 keeps all, 0 none.
    """

    ks: tuple[int, ...] = (1, 2, 3, 4, 5)
    insufficient: int = -1

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) < len(self.ks):
            raise ValueError(f"contexts.ks={self.ks}: one or more different numbers of pages")
        if self.insufficient < -1:
            raise ValueError(
                f"contexts.insufficient={self.insufficient}; -1 for all, else a number"
            )


@dataclass(frozen=True)
class Context:
    """A question with the pages of its first `k` ranks.

    id: names the context in every file and random key.  relevant: of each page, whether it holds
    (part of) the answer.  sufficient: the page rule, all relevant pages are shown and the question
    can be answered from them.
    """

    id: str
    question: RawQuestion
    pages: tuple[Page, ...]
    relevant: tuple[bool, ...]
    sufficient: bool

    @property
    def k(self) -> int:
        """Number of pages."""
        return len(self.pages)

    @property
    def content(self) -> tuple[str, ...]:
        """What makes two contexts the same whatever their ids: the question's text and the pages."""
        return (self.question.question, *(page.path for page in self.pages))

    def record(self, **fields) -> Record:
        """The record of this context; `fields` are further ones, or replace these."""
        scores = tuple(page.score for page in self.pages)
        return Record(
            **{
                "id": self.id,
                "question": self.question.question,
                "images": tuple(page.path for page in self.pages),
                "answers": self.question.answers,
                "is_sufficient": self.sufficient,
                "doc_ids": tuple(page.doc_id for page in self.pages),
                "family": self.question.family,
                "scores": None if None in scores else scores,
                **fields,
            }
        )


def make_contexts(question: RawQuestion, config: ContextConfig) -> list[Context]:
    """The contexts of a question, fewest pages first.

    A list of fewer pages than a `k` gives no context of that size. An answerable question without
    relevant pages gives none at all: what its pages suffice for is not known.
    """
    if question.answerable and not question.relevant:
        return []
    wanted = {page.path for page in question.relevant}
    contexts = []
    for k in sorted(config.ks):
        if k > len(question.retrieved):
            break
        pages = question.retrieved[:k]
        contexts.append(
            Context(
                id=f"{question.id}-top{k}",
                question=question,
                pages=pages,
                relevant=tuple(page.path in wanted for page in pages),
                sufficient=question.answerable and wanted <= {page.path for page in pages},
            )
        )
    if config.insufficient < 0:
        return contexts
    lacking = [context for context in contexts if not context.sufficient]
    left_out = {context.id for context in lacking[: len(lacking) - config.insufficient]}
    if len(lacking) <= config.insufficient:
        left_out = set()
    return [context for context in contexts if context.id not in left_out]
