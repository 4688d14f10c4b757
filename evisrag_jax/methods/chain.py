"""Several calls a question, each seeing what the ones before wrote: CCoT and DDCoT as first published.

    ccot_two_call   pages ─► scene graphs ─► pages + graphs ─► answer
    ddcot_multi     question ─► sub-questions, some Uncertain ─► pages ─► their answers ─► (no pages) answer

All questions of a chunk take each call together. The notes of a call are the responses of those before it,
in order, cut at nothing: a prompt that grows over every bucket is an error of its own question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evisrag_jax.data.schema import Record
from evisrag_jax.methods.base import MethodError, Prediction, predict
from evisrag_jax.methods.one_call import OneCall, visual_tokens
from evisrag_jax.prompts.template import Template, load_template
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.training.page_cache import PageCache


@dataclass(frozen=True)
class Stage:
    """template: a name, a file or a Template.  sees: whether the pages are shown."""

    template: str | Template
    sees: bool = True

    @property
    def text(self) -> Template:
        """The template, loaded."""
        own = self.template
        return own if isinstance(own, Template) else load_template(own)


@dataclass
class _Thread:
    """A question on its way through the calls."""

    record: Record
    notes: list[str] = field(default_factory=list)
    generated: int = 0
    visual: int = 0
    last: Completion | None = None
    failed: MethodError | None = None


@dataclass(frozen=True)
class Chain:
    """stages: the calls; the last one's response is the prediction's text.  base: everything else, as for
    one call."""

    stages: tuple[Stage, ...]
    base: OneCall
    name: str = "chain"

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a chain needs at least one stage")

    def __call__(self, records: Sequence[Record], engine: Engine) -> list[Prediction]:
        """One prediction a record, in order; errors as of `OneCall`."""
        chunk = self.base.chunk or 2 * max(bucket.prompts for bucket in engine.buckets.buckets)
        out: list[Prediction] = []
        for first in range(0, len(records), chunk):
            out += self._answer(records[first : first + chunk], engine)
        return out

    def _answer(self, records: Sequence[Record], engine: Engine) -> list[Prediction]:
        pages = self.base.pages or PageCache()
        threads = [_Thread(record) for record in records]
        for number, stage in enumerate(self.stages):
            self._call(stage, "" if number + 1 == len(self.stages) else f"call-{number + 1}",
                       threads, engine, pages)  # fmt: skip
        return [
            self.base.refuse(one.failed)
            if one.failed is not None
            else predict(
                one.record,
                one.last,
                whole=self.base.whole,
                calls=len(self.stages),
                generated=one.generated,
                visual_tokens=one.visual,
            )
            for one in threads
        ]

    def _call(
        self, stage: Stage, step: str, threads: Sequence[_Thread], engine: Engine, pages: PageCache
    ) -> None:
        requests, waiting = [], []
        for one in threads:
            if one.failed is not None:
                continue
            text = stage.text.render(one.record.question, "\n\n".join(one.notes))
            images = None if stage.sees else ()
            try:
                request = self.base.request(
                    one.record, engine, pages, text=text, images=images, step=step
                )
            except MethodError as error:
                one.failed = error
                continue
            requests.append(request)
            waiting.append(one)
        done = engine.generate(requests, self.base.sampling, seed=self.base.seed)
        for one, request, (completion,) in zip(waiting, requests, done, strict=True):
            one.visual += visual_tokens(request)
            one.generated += completion.length
            one.notes.append(completion.text.strip())
            one.last = completion
