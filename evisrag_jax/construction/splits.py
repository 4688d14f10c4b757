"""SFT and GRPO questions, split by document and never by question.

Questions that share a document hang together, also through others (connected components):

    q1: A    q2: A B    q3: B    q4: C          {q1 q2 q3: A B}   {q4: C}

`link` says which documents of a question count. With "shown" all that its contexts may show do; in a
search over a large corpus nearly everything then hangs together. With "gold" only the documents it is
about do, and a ranked list passes over pages of the other side, as if each side were searched alone.
Either way no document has a page on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from evisrag_jax.construction.sources import RawQuestion
from evisrag_jax.runtime.host_random import check_seed, text_hash

SIDES = ("sft", "grpo")


class SplitError(ValueError):
    """Questions that cannot be split as asked for, or a document on both sides."""


@dataclass(frozen=True)
class SplitConfig:
    """How questions are split.

    share: of the questions that go to SFT.  link: "gold" or "shown", see above.  tolerance: by how
    much the share may be missed; beyond it nothing is asked of the teacher.  seed: of the order in
    which equally large components are dealt out.
    """

    share: float = 0.8
    link: str = "gold"
    tolerance: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"split.share={self.share}; a share between 0 and 1")
        if self.link not in ("gold", "shown"):
            raise ValueError(f"split.link={self.link!r}; gold or shown")
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"split.tolerance={self.tolerance} is outside [0, 1]")
        check_seed(self.seed)


class DocumentSplit:
    """Collects the documents of all questions, then tells the side of each.

    Memory grows with the documents, not with the questions.
    """

    def __init__(self, config: SplitConfig, depth: int):
        """depth: how many pages of a ranked list a context may show."""
        self.config, self.depth = config, depth
        self._above: dict[str, str] = {}
        self._questions: Counter[str] = Counter()
        self._sides: dict[str, str] = {}

    def add(self, question: RawQuestion) -> None:
        """Take note of a question's documents."""
        documents = self._documents(question)
        roots = sorted({self._root(document) for document in documents})
        for root in roots[1:]:
            self._above[root] = roots[0]
        self._questions[documents[0]] += 1

    def _documents(self, question: RawQuestion) -> tuple[str, ...]:
        if self.config.link == "gold":
            return question.anchors
        shown = (page.doc_id for page in question.retrieved[: self.depth])
        return (*question.anchors, *shown)

    def _root(self, document: str) -> str:
        """The component's name: the least of its document ids, whatever the order of the questions."""
        path = []
        while (above := self._above.setdefault(document, document)) != document:
            path.append(document)
            document = above
        for below in path:
            self._above[below] = document
        return document

    def settle(self) -> dict[str, Any]:
        """Give each component a side, and report on it.

        The largest comes first; each goes where the share of the questions dealt out so far is then
        nearest to the wanted one.

        Raises:
            SplitError: the share is missed by more than the tolerance.
        """
        sizes: Counter[str] = Counter()
        for document, count in self._questions.items():
            sizes[self._root(document)] += count
        seed, share = self.config.seed, self.config.share
        order = sorted(sizes, key=lambda root: (-sizes[root], text_hash(f"{seed} {root}"), root))
        dealt = sft = 0
        for root in order:
            size = sizes[root]
            dealt += size
            missed = {"sft": abs(sft + size - share * dealt), "grpo": abs(sft - share * dealt)}
            side = min(SIDES, key=missed.__getitem__)
            self._sides[root] = side
            sft += size if side == "sft" else 0
        if dealt and abs(sft / dealt - share) > self.config.tolerance:
            raise SplitError(
                f"{sft} of {dealt} questions would be for SFT, wanted are {share:.0%} within "
                f"{self.config.tolerance:.0%}: of {len(order)} groups of questions that share documents the "
                f"largest has {sizes[order[0]]}, around document {order[0]!r}. Raise split.tolerance, or "
                'with split.link="shown" link by "gold" documents alone'
            )
        return {
            "documents": len(self._above),
            "components": len(order),
            "largest_component": sizes[order[0]] if order else 0,
            "questions": {"sft": sft, "grpo": dealt - sft},
        }

    def side_of(self, document: str) -> str:
        """ "sft" or "grpo". A document that no question is about goes by its name's hash."""
        if document in self._above:
            return self._sides[self._root(document)]
        drawn = text_hash(f"{self.config.seed} {document}") / 2**32
        return "sft" if drawn < self.config.share else "grpo"

    def side(self, question: RawQuestion) -> str:
        """The side of a question that was added."""
        return self.side_of(question.anchors[0])

    def restrict(self, question: RawQuestion) -> RawQuestion:
        """The question with the pages of its own side alone, in the same order."""
        side = self.side(question)
        pages = tuple(page for page in question.retrieved if self.side_of(page.doc_id) == side)
        return replace(question, retrieved=pages)


def check_no_leak(sides: dict[str, Iterable[str]]) -> None:
    """Raise SplitError if a document stands on two sides; `sides` has the documents of each."""
    seen: dict[str, str] = {}
    for side, documents in sides.items():
        for document in sorted(set(documents)):
            if seen.setdefault(document, side) != side:
                raise SplitError(
                    f"document {document!r} has pages in {seen[document]} and in {side}"
                )
