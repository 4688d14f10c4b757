"""One call over all pages: EvidenceCoT and every other way to ask that differs by its template alone.

The prompt is one user turn: an instruction template with the question, then the pages (EVisRAG section 9).
The template may come from a file, so a published prompt can go with published weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evisrag_jax.data.schema import Record
from evisrag_jax.methods.base import MethodError, Prediction, failed, predict
from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.patches import PagePatches
from evisrag_jax.pages.plan import PixelBudget
from evisrag_jax.prompts.chat import PromptTooLong, build_prompt
from evisrag_jax.prompts.template import Template, load_template
from evisrag_jax.rollout.buckets import RequestTooLarge
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Request, measure
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.training.feature_cache import FeatureCache
from evisrag_jax.training.page_cache import PageCache


@dataclass(frozen=True)
class OneCall:
    """Settings of the method; calling it answers records.

    template: a name, a file or a Template.  budget: pixel limits of the pages.  sampling: of the one response a
    question (default: greedy, penalty 1.05, up to 2,048 tokens, the released inference settings).
    max_pages: only the first so many images of a record are shown; None shows all.  images_first: pages before
    the text.  system: replaces the chat template's system line.  exif_transpose: see `pages.decode.load_page`.
    seed: of sampling above temperature 0.  on_error: "raise" a MethodError, or "record" a prediction with
    finish "error" for a record whose pages cannot be read or that no bucket holds.  chunk: records whose
    pages are held in memory at a time; None is twice the rows of the largest batch.  pages, features: caches
    shared with a training run, so that repeated validation prepares and encodes no page again.  whole: a
    response without tags is the answer as it stands.
    """

    template: str | Template
    budget: PixelBudget
    sampling: SamplingConfig = SamplingConfig(
        temperature=0.0, repetition_penalty=1.05, max_tokens=2048
    )
    max_pages: int | None = None
    images_first: bool = False
    system: str | None = None
    exif_transpose: bool = True
    seed: int = 0
    on_error: str = "raise"
    chunk: int | None = None
    pages: PageCache | None = None
    features: FeatureCache | None = None
    whole: bool = False
    name: str = "evidence_cot"

    def __post_init__(self):
        if not isinstance(self.template, Template):
            object.__setattr__(self, "template", load_template(self.template))
        if self.on_error not in ("raise", "record"):
            raise ValueError(f"on_error={self.on_error!r}: expected 'raise' or 'record'")
        for field in ("max_pages", "chunk"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}={value} is below 1")

    def __call__(self, records: Sequence[Record], engine: Engine) -> list[Prediction]:
        """One prediction a record, in order. MethodError names the record, the file or limit, and the reason."""
        chunk = self.chunk or 2 * max(bucket.prompts for bucket in engine.buckets.buckets)
        predictions: list[Prediction] = []
        for first in range(0, len(records), chunk):
            predictions += self._answer(records[first : first + chunk], engine)
        return predictions

    def request(
        self,
        record: Record,
        engine: Engine,
        pages: PageCache | None = None,
        *,
        text: str | None = None,
        images: Sequence[str] | None = None,
        step: str = "",
    ) -> Request:
        """The prompt and pages of one call; MethodError as above.

        text: of the user's turn; None for the template's. images: pages shown, those of the record for
        None. step: tells apart the calls of one record.
        """
        pages = pages or self.pages or PageCache()
        images = record.images[: self.max_pages] if images is None else images
        try:
            shown = self.shown(images, engine, pages)
            prompt = build_prompt(
                engine.tokenizer,
                self.template.render(record.question) if text is None else text,
                [page.grid for page in shown],
                images_first=self.images_first,
                system=self.system,
                max_length=engine.buckets.max_length,
                name=record.id,
                merge=engine.layout.merge,
            )
            request = Request(f"{record.id}#{step}" if step else record.id, prompt, shown)
            engine.buckets.classes([measure(request, self.sampling)])  # refuses what fits none
            if self.features is not None:
                return replace(request, features=self.features.get(shown))
            for page in shown:  # held by the request until it is answered
                _ = page.patches
            return request
        except (PageError, PromptTooLong, RequestTooLarge) as error:
            raise MethodError(record.id, str(error)) from error

    def shown(
        self, images: Sequence[str], engine: Engine, pages: PageCache
    ) -> tuple[PagePatches, ...]:
        """What of these files goes into the prompt: each as a page of its own."""
        return tuple(
            pages.get(path, engine.layout, self.budget, self.exif_transpose) for path in images
        )

    def refuse(self, error: MethodError) -> Prediction:
        """The prediction that stands for a record without an answer, unless `on_error` raises."""
        if self.on_error == "raise":
            raise error
        return failed(error)

    def _answer(self, records: Sequence[Record], engine: Engine) -> list[Prediction]:
        pages = self.pages or PageCache()
        requests: list[Request] = []
        results: list[Prediction | None] = []
        for record in records:
            try:
                requests.append(self.request(record, engine, pages))
                results.append(None)
            except MethodError as error:
                results.append(self.refuse(error))
        answered = zip(
            requests, engine.generate(requests, self.sampling, seed=self.seed), strict=True
        )
        out = []
        for record, result in zip(records, results, strict=True):
            if result is None:
                request, (done,) = next(answered)
                tokens = visual_tokens(request)
                result = predict(record, done, whole=self.whole, visual_tokens=tokens)
            out.append(result)
        return out


def visual_tokens(request: Request) -> int:
    """Merged tokens of a request's pages."""
    return sum(len(page.merged_index) for page in request.pages)
