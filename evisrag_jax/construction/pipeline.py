"""From raw questions to training sets, in one pass over the questions after a first one over their documents.

    questions ─► documents' sides ─► contexts ─► teacher ─► filters ─┬─► sft.jsonl
        └──────── every drop, with its reason: dropped.jsonl         └─► candidates ─► difficulty ─► grpo.jsonl

Nothing but the replies is kept between runs (`requests.sqlite`): a run that was killed does every stage again,
finds its replies on disk, and so ends with the same files. Files are put in place when they are whole.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evisrag_jax.construction.config import ConstructionConfig
from evisrag_jax.construction.contexts import Context, make_contexts
from evisrag_jax.construction.difficulty import Selection, select
from evisrag_jax.construction.filters import (
    Drop,
    Trajectory,
    answers_right,
    check,
    evidence_lines,
)
from evisrag_jax.construction.page_files import PageFiles
from evisrag_jax.construction.sets import InspectionPick, StreamedFile, inspection_row
from evisrag_jax.construction.sources import Page, RawQuestion, iter_questions
from evisrag_jax.construction.splits import DocumentSplit, check_no_leak
from evisrag_jax.construction.teacher import SPENT, Sampler, Teacher
from evisrag_jax.data.paths import RecordError
from evisrag_jax.data.schema import Record, parse_line
from evisrag_jax.runtime.json_files import write_json
from evisrag_jax.runtime.request_cache import RequestCache

REPLIES = "requests.sqlite"

#: Called with a stage's name, what of it is done, and how much there is (None: not known).
Progress = Callable[[str, int, int | None], None]


class ConstructionError(ValueError):
    """Questions of which nothing can be made; the message says why."""


@dataclass(frozen=True)
class Source:
    """Where the raw questions are: a file or a page-corpus folder, and the root of its image paths."""

    path: str
    image_root: str = ""

    def questions(self, limit: int) -> Iterator[RawQuestion | RecordError]:
        """The first `limit` rows; 0 for all."""
        rows = iter_questions(self.path, image_root=self.image_root or None)
        return itertools.islice(rows, limit or None)


def construct(
    source: Source,
    out: Path,
    config: ConstructionConfig,
    *,
    make_teacher: Callable[[RequestCache], Teacher],
    make_solver: Callable[[], Teacher] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Writes sft.jsonl, grpo.jsonl, dropped.jsonl, difficulty.jsonl, inspection.jsonl and report.json.

    Args:
        source: the raw questions.
        out: the run's folder.
        make_teacher: opens the teacher over the replies on disk.
        make_solver: opens the SFT model, whose share of right completions is a prompt's difficulty, after
            the teacher is closed; None leaves the stage out.
        progress: told of every chunk.

    Returns:
        What this run did: the report, and responses asked for and found on disk.

    Raises:
        ConstructionError: there is no question.
        SplitError: see `DocumentSplit.settle`.
        BudgetExceeded: the teacher's cost limit is reached. The next run goes on from there.
    """
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(source, out, config, progress)
    return run(make_teacher, make_solver)


class _Run:
    """The state of one run."""

    def __init__(self, source: Source, out: Path, config: ConstructionConfig, progress: Progress):
        self.source, self.config, self.progress = source, config, progress
        self.out = Path(out).absolute()
        self.pages = PageFiles(self.out)
        self.split = DocumentSplit(config.split, max(config.contexts.ks))
        inspection = config.inspection
        self.pick = InspectionPick(
            (inspection.sufficient, inspection.insufficient), inspection.seed
        )
        self.counts: dict[str, Counter[str]] = {
            stage: Counter() for stage in ("read", "contexts", "teacher", "kept")
        }
        self.reasons: dict[str, Counter[str]] = {}
        self.documents: dict[str, set[str]] = {"sft": set(), "grpo": set()}
        self.offsets: dict[str, int] = {}
        self.calls: dict[str, float] = {}

    def __call__(self, make_teacher, make_solver) -> dict[str, Any]:
        with ExitStack() as stack:
            names = ("sft", "grpo", "candidates", "dropped", "difficulty", "inspection")
            self.files = {name: StreamedFile(self.out / f"{name}.jsonl") for name in names}
            for file in self.files.values():
                stack.callback(file.discard)
            cache = RequestCache(self.out / REPLIES)
            stack.callback(cache.close)
            splits = self._settle()
            self._ask_teacher(make_teacher, cache)
            selection = self._grade(make_solver, cache)
            check_no_leak(self.documents)
            for row in self.pick.rows():
                self.files["inspection"].write_row(row)
            report = self._report(splits, selection)
            self.files.pop("candidates")
            for file in self.files.values():
                file.commit()
            write_json(self.out / "report.json", report)
            spent = cache.get(SPENT)
        if spent is not None:
            self.calls["cost"] = spent["cost"]
        return {**report, "responses": self.calls}

    # Drops.

    def drop(
        self, stage: str, drop: Drop, id: str, context: str = "", sample: int | None = None
    ) -> None:
        """Note what is dropped, and why."""
        self.reasons.setdefault(stage, Counter())[drop.reason] += 1
        row = {"stage": stage, "id": id, "context": context, "sample": sample}
        self.files["dropped"].write_row({**row, "reason": drop.reason, "detail": drop.detail})

    # The two passes.

    def _settle(self) -> dict[str, Any]:
        count = self.counts["read"]
        for number, row in enumerate(self.source.questions(self.config.limit), start=1):
            self.progress("documents", number, None)
            if isinstance(row, RecordError):
                self.drop("read", Drop("unreadable_row", str(row)), row.id or "")
                continue
            count["questions"] += 1
            count["answerable"] += row.answerable
            self.split.add(row)
        if not count["questions"]:
            refused = self.reasons.get("read", Counter()).total()
            raise ConstructionError(
                f"{self.source.path}: no usable question ({refused} rows are refused)"
            )
        return self.split.settle()

    def _contexts(self) -> Iterator[Context]:
        seen: set[bytes] = set()
        questions = self.source.questions(self.config.limit)
        total = self.counts["read"]["questions"]
        asked = (row for row in questions if isinstance(row, RawQuestion))
        for number, question in enumerate(asked, start=1):
            self.progress("teacher", number, total)
            contexts = make_contexts(self.split.restrict(question), self.config.contexts)
            if question.answerable and not question.relevant:
                self.drop("contexts", Drop("no_gold_pages"), question.id)
            elif not contexts:
                self.drop("contexts", Drop("too_few_pages"), question.id)
            for context in contexts:
                twin = _short_hash("\n".join(context.content))
                if twin in seen:
                    self.drop("contexts", Drop("duplicate"), question.id, context.id)
                    continue
                seen.add(twin)
                kind = "sufficient" if context.sufficient else "insufficient"
                self.counts["contexts"][f"{kind}/top{context.k}"] += 1
                yield context

    def _ask_teacher(self, make_teacher, cache: RequestCache) -> None:
        filters = self.config.filters
        sampler = Sampler(make_teacher(cache), filters.samples, cache, self.pages)
        for chunk in _chunks(self._contexts(), self.config.chunk):
            for context, result in zip(chunk, sampler(chunk), strict=True):
                if isinstance(result, Drop):
                    self.drop("teacher", result, context.question.id, context.id)
                else:
                    self._filter(context, result, sampler.teacher.max_tokens)
        self.calls["teacher/asked"] = sampler.asked
        self.calls["teacher/on_disk"] = sampler.reused

    def _filter(self, context: Context, trajectories: Sequence[Trajectory], limit: int) -> None:
        side = self.split.side(context.question)
        keep = self.config.filters.keep if side == "sft" else 1
        texts: list[str] = []
        for trajectory in trajectories:
            self.counts["teacher"]["responses"] += 1
            self.counts["teacher"]["tokens"] += trajectory.tokens
            text = trajectory.text.strip()
            found = check(context, trajectory, limit)
            if found is None and text in texts:
                found = Drop("duplicate")
            elif found is None and len(texts) == keep:
                found = Drop("surplus")
            if found is not None:
                place = context.question.id, context.id, trajectory.sample
                self.drop("filters", found, *place)
                continue
            texts.append(text)
            self._keep(context, side, trajectory.sample, text)

    def _keep(self, context: Context, side: str, sample: int, text: str) -> None:
        record = context.record(
            id=f"{context.id}-s{sample}",
            images=tuple(self.pages.place(page.path) for page in context.pages),
            evidence=evidence_lines(text),
            response=text,
        )
        self.documents[side].update(record.doc_ids or ())
        kind = "sufficient" if context.sufficient else "insufficient"
        self.counts["kept"][f"{side}/{kind}"] += 1
        self.counts["kept"][f"{side}/top{context.k}"] += 1
        self.pick.offer(inspection_row(record, set=side, relevant=context.relevant, root=self.out))
        if side == "sft":
            self.files["sft"].write_record(record)
        else:
            candidate = replace(record, id=context.id, response=None)
            self.offsets[context.id] = self.files["candidates"].write_record(candidate)

    # Difficulty.

    def _grade(self, make_solver, cache: RequestCache) -> Selection | None:
        config = self.config.difficulty
        if make_solver is None or not config.samples:
            for offset in self.offsets.values():
                self.files["grpo"].write(self.files["candidates"].line(offset))
            return None
        right: dict[str, int] = {}
        if self.offsets:
            sampler = Sampler(make_solver(), config.samples, cache, self.pages)
            done = 0
            for chunk in _chunks(self._candidates(), self.config.chunk):
                for context, result in zip(chunk, sampler(chunk), strict=True):
                    self._count_right(context, result, right)
                done += len(chunk)
                self.progress("difficulty", done, len(self.offsets))
            self.calls["difficulty/asked"] = sampler.asked
            self.calls["difficulty/on_disk"] = sampler.reused
        selection = select(right, config)
        for id, reason in sorted(selection.dropped.items()):
            detail = f"{right[id]} of {config.samples} right"
            self.drop("difficulty", Drop(reason, detail), _question_id(id), id)
        for id in selection.ids:
            self.files["grpo"].write(self.files["candidates"].line(self.offsets[id]))
            share = right[id] / config.samples
            self.files["difficulty"].write_row({"id": id, "right": right[id], "share": share})
        return selection

    def _count_right(
        self, context: Context, result: list[Trajectory] | Drop, right: dict[str, int]
    ) -> None:
        """A prompt that the SFT model cannot be asked, or fails on, has no difficulty."""
        failed = None
        if not isinstance(result, Drop):
            failed = next((t.failure for t in result if t.failure is not None), None)
        if isinstance(result, Drop) or failed is not None:
            found = result if isinstance(result, Drop) else Drop("teacher_failed", failed or "")
            self.drop("difficulty", found, context.question.id, context.id)
        else:
            right[context.id] = sum(answers_right(context, t.text) for t in result)

    def _candidates(self) -> Iterator[Context]:
        file = self.files["candidates"]
        for number, offset in enumerate(self.offsets.values(), start=1):
            record = parse_line(file.line(offset), str(file.path), number, self.out)
            yield _context(record)

    # The report.

    def _report(self, splits: dict[str, Any], selection: Selection | None) -> dict[str, Any]:
        counts = self.counts
        report: dict[str, Any] = {
            "read": dict(counts["read"]),
            "split": splits,
            "contexts": dict(sorted(counts["contexts"].items())),
            "teacher": dict(counts["teacher"]),
            "kept": dict(sorted(counts["kept"].items())),
            "dropped": {
                stage: dict(sorted(reasons.items())) for stage, reasons in self.reasons.items()
            },
            "sets": {
                name: self.files[name].rows for name in ("sft", "grpo", "dropped", "inspection")
            },
        }
        if selection is not None:
            n = self.config.difficulty.samples
            report["difficulty"] = {
                "prompts_by_right": {f"{k}/{n}": v for k, v in selection.counts.items()},
                "kept_by_right": {f"{k}/{n}": v for k, v in selection.drawn.items()},
            }
        return report


def _context(record: Record) -> Context:
    """The context of a candidate as it was written."""
    documents = record.doc_ids or record.images
    scores = record.scores or [None] * len(record.images)
    pages = tuple(Page(*page) for page in zip(record.images, documents, scores, strict=True))
    relevant = tuple(line is not None for line in record.evidence)
    question = RawQuestion(
        id=_question_id(record.id),
        question=record.question,
        answers=record.answers,
        retrieved=pages,
        relevant=tuple(page for page, is_gold in zip(pages, relevant, strict=True) if is_gold),
        answerable=record.is_sufficient,
        family=record.family,
    )
    return Context(record.id, question, pages, relevant, record.is_sufficient)


def _question_id(context_id: str) -> str:
    return context_id.rpartition("-top")[0]


def _short_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()[:16]


def _chunks(contexts: Iterator[Context], size: int) -> Iterator[list[Context]]:
    while chunk := list(itertools.islice(contexts, size)):
        yield chunk
