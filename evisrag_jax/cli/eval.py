"""``evisrag eval``: answers a set of questions with a method and scores the answers."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, parse, to_dataclass
from evisrag_jax.cli.session import (
    Answering,
    Model,
    SessionError,
    Shapes,
    make_engine,
    make_method,
    open_model,
    read_set,
)
from evisrag_jax.data.schema import Record

SUMMARY = "answer a set of questions and score the answers; resumes where it stopped"

# What may change when an evaluation goes on: predictions that are there stay what they are.
MAY_DIFFER = ("data.limit", "shapes", "mode", "report")


@dataclass(frozen=True)
class EvalData:
    """path: a data file or page-corpus folder; "" generates `questions` mini-world questions of
    `split` and `seed` into OUT/data.  image_root: folder that image paths are relative to, "" for the
    file's own.  limit: only the first questions, 0 for all."""

    path: str = ""
    image_root: str = ""
    limit: int = 0
    split: str = "test"
    questions: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.limit < 0 or self.questions < 1:
            raise SessionError(
                f"data.limit={self.limit} must not be negative, data.questions={self.questions} must "
                "be at least 1"
            )


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation; the fields of configs/eval.py.  mode: "strict" or "code" (as released);
    both are scored, this one gives `accuracy`.  report: write report.html too."""

    model: Model
    data: EvalData
    shapes: Shapes
    method: Answering = field(default_factory=Answering)
    mode: str = "strict"
    report: bool = True

    def __post_init__(self) -> None:
        from evisrag_jax.evaluation.metrics import check_mode

        check_mode(self.mode)


def run(argv: Sequence[str]) -> int:
    """Writes predictions.jsonl, scores.jsonl, summary.json and report.html into --out."""
    parsed = parse(
        argv,
        command="eval",
        summary=SUMMARY,
        usage="[--data FILE] --out RUN",
        default_config="eval.py:mini",
        define=_flags,
    )
    if parsed.args:
        raise ConfigError(f"eval takes no positional arguments, got {' '.join(parsed.args)}")
    if parsed.out is None:
        raise ConfigError("eval needs --out RUN, the folder for predictions and scores")
    if parsed.flags.data is not None:
        parsed.config.data.path = parsed.flags.data
    if parsed.flags.method is not None:
        parsed.config.method.name = parsed.flags.method
    config = to_dataclass(parsed.config, EvalConfig)
    summary = evaluate_run(config, parsed.out, facts=parsed.facts())
    from evisrag_jax.evaluation.suite import format_summary

    print(format_summary(summary))
    return 0


def _flags(values: Any) -> None:
    from absl import flags

    from evisrag_jax.methods.registry import describe

    flags.DEFINE_string("data", None, "short for --config.data.path", flag_values=values)
    told = "short for --config.method.name; the methods:\n" + describe()
    flags.DEFINE_string("method", None, told, flag_values=values)


def evaluate_run(
    config: EvalConfig, out: Path, *, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One evaluation into the run folder `out`; returns its summary.

    Questions that the folder holds predictions of are not asked again.

    Raises:
        SessionError: settings that cannot be, or a set without a usable question.
        RunFolderError: the folder holds predictions of another config; lists the differences.
    """
    from evisrag_jax.evaluation.suite import evaluate
    from evisrag_jax.runtime.compile_cache import CompileCounter, enable_compile_cache
    from evisrag_jax.runtime.run_folder import RunFolder

    longest = max(config.shapes.responses)
    if config.method.sampling.max_tokens > longest:
        raise SessionError(
            f"method.sampling.max_tokens={config.method.sampling.max_tokens} is more than "
            f"shapes.responses={config.shapes.responses} hold"
        )
    enable_compile_cache()
    compiles = CompileCounter()
    with RunFolder(out) as folder:
        resumed = any(file.stat().st_size for file in out.glob("predictions.jsonl*"))
        path = config.data.path or str(generated(out / "data", config.data, fresh=not resumed))
        records, refused = read_set(path, config.data.image_root)
        pretrained = open_model(config.model)
        method = make_method(config.method, pretrained, on_error="record")
        engine = make_engine(pretrained, config.shapes.table())
        if not resumed:
            folder.rejected.unlink(missing_ok=True)
        folder.start(
            config,
            resume=resumed,
            may_differ=MAY_DIFFER,
            pixel_budget=dataclasses.asdict(pretrained.budget),
            **(facts or {}),
        )
        if not resumed:
            for line in refused:
                folder.reject(id="", reason=line, stage="read", path=path)
        _warn_budget(pretrained)
        begin = time.perf_counter()
        summary = evaluate(
            records,
            method,
            engine,
            out,
            mode=config.mode,
            limit=config.data.limit or None,
            chunk=max(config.shapes.prompts),
        )
        seconds = time.perf_counter() - begin
        asked = summary["n_expected"] - summary["n_resumed"]
        shown = records[: config.data.limit or None]
        summary |= {
            "command": "eval",
            "model": config.model.path,
            "data": path,
            "n_refused": len(refused),
            "seconds": round(seconds, 3),
            "questions_per_second": round(asked / seconds, 4),
            "visual_tokens": _visual_tokens(shown, config.method.max_pages, pretrained),
            "compiles": compiles.count,
        }
        folder.write_summary(summary)
    if config.report:
        from evisrag_jax.reporting.page import write_report

        write_report(out)
    return summary


def generated(folder: Path, data: EvalData, *, fresh: bool) -> Path:
    """The mini-world set of these settings; equal settings write equal bytes."""
    from evisrag_jax.data.miniworld.files import write_dataset

    path = folder / f"{data.split}.jsonl"
    if fresh or not path.is_file():
        write_dataset(folder, data.questions, data.split, data.seed)
    return path


def _warn_budget(pretrained: Any) -> None:
    """Says so when pages are seen at another size than the checkpoint's own."""
    from evisrag_jax.evaluation.budgets import compare_budgets
    from evisrag_jax.pages.plan import processor_settings

    own, layout = processor_settings(pretrained.folder)
    for line in compare_budgets({"the checkpoint": own}, pretrained.budget, layout=layout):
        print(f"warning: {line}", file=sys.stderr)


def _visual_tokens(records: Iterable[Record], max_pages: int, pretrained: Any) -> int:
    """Merged tokens of all pages shown, from their sizes alone; pages that cannot be opened have 0."""
    from PIL import Image

    from evisrag_jax.pages.plan import plan_resize

    sizes: dict[str, int] = {}
    total = 0
    for record in records:
        for path in record.images[: max_pages or None]:
            if path not in sizes:
                try:
                    with Image.open(path) as image:
                        width, height = image.size
                    plan = plan_resize(height, width, pretrained.budget, pretrained.layout)
                    sizes[path] = plan.tokens
                except (OSError, ValueError, Image.DecompressionBombError):
                    sizes[path] = 0
            total += sizes[path]
    return total
