"""``evisrag eval``: answers a set of questions with a method and scores the answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
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

SUMMARY = "answer a set of questions and score the answers; resumes where it stopped"


@dataclass(frozen=True)
class EvalData:
    """path: a data file or page-corpus folder; "" generates `questions` mini-world questions of
    `split` and `seed` into OUT/data.  limit: only the first questions, 0 for all."""

    path: str = ""
    image_root: str = ""
    limit: int = 0
    split: str = "test"
    questions: int = 200
    seed: int = 0


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation; the fields of configs/eval.py.  mode: "strict" or "code" (as released);
    both are scored, this one gives `accuracy`."""

    model: Model
    data: EvalData
    shapes: Shapes
    method: Answering = field(default_factory=Answering)
    mode: str = "strict"
    report: bool = True


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
    if parsed.out is None:
        raise ConfigError("eval needs --out RUN, the folder for predictions and scores")
    config = to_dataclass(parsed.config, EvalConfig)
    summary = evaluate_run(config, parsed.out, parsed.flags.data, facts=parsed.facts())
    from evisrag_jax.evaluation.suite import format_summary

    print(format_summary(summary))
    return 0


def _flags(values: Any) -> None:
    from absl import flags

    flags.DEFINE_string("data", None, "short for --config.data.path", flag_values=values)


def evaluate_run(
    config: EvalConfig, out: Path, data: str | None = None, *, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One evaluation into the run folder `out`; returns its summary."""
    from evisrag_jax.evaluation.suite import evaluate
    from evisrag_jax.runtime.compile_cache import CompileCounter, enable_compile_cache
    from evisrag_jax.runtime.run_folder import RunFolder

    enable_compile_cache()
    compiles = CompileCounter()
    path = data or config.data.path
    with RunFolder(out) as folder:
        if not path:
            path = str(generated(out / "data", config.data))
        records, refused = read_set(path, config.data.image_root)
        for line in refused:
            folder.reject(id="", reason=line, stage="read", path=path)
            print(f"skipped: {line}", file=sys.stderr)
        if not records:
            raise SessionError(f"{path}: holds no usable question")
        pretrained = open_model(config.model)
        budget, layout = pretrained.budget, pretrained.layout
        folder.start(
            {**_plain(config), "data_path": path},
            resume=folder.config.exists(),
            pixel_budget=_plain(budget),
            **(facts or {}),
        )
        _warn_budget(pretrained)
        engine = make_engine(pretrained, config.shapes.table())
        method = make_method(config.method, pretrained, on_error="record")
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
        summary |= {
            "model": config.model.path,
            "data": path,
            "n_refused": len(refused),
            "seconds": round(seconds, 3),
            "questions_per_second": round(asked / seconds, 4),
            "visual_tokens": _visual_tokens(records, config, budget, layout),
            "compiles": compiles.count,
        }
        folder.write_summary(summary)
    if config.report:
        from evisrag_jax.reporting.page import write_report

        write_report(out)
    return summary


def generated(folder: Path, data: EvalData) -> Path:
    """The mini-world set of these settings, written unless it is there."""
    from evisrag_jax.data.miniworld.files import write_dataset

    path = folder / f"{data.split}.jsonl"
    return path if path.is_file() else write_dataset(folder, data.questions, data.split, data.seed)


def _plain(value: Any) -> Any:
    from evisrag_jax.runtime.json_files import plain

    return plain(value)


def _warn_budget(pretrained: Any) -> None:
    """Says so when pages are seen at another size than the checkpoint's own."""
    from evisrag_jax.evaluation.budgets import compare_budgets
    from evisrag_jax.pages.plan import processor_settings

    own, layout = processor_settings(pretrained.folder)
    for line in compare_budgets({"checkpoint": own}, pretrained.budget, layout=layout):
        print(f"warning: {line}", file=sys.stderr)


def _visual_tokens(records: Any, config: EvalConfig, budget: Any, layout: Any) -> int:
    """Merged tokens of all pages shown, from their sizes alone."""
    from PIL import Image

    from evisrag_jax.pages.plan import plan_resize

    sizes: dict[str, int] = {}
    total = 0
    for record in records[: config.data.limit or None]:
        for path in record.images[: config.method.max_pages or None]:
            if path not in sizes:
                try:
                    with Image.open(path) as image:
                        width, height = image.size
                    sizes[path] = plan_resize(height, width, budget, layout).tokens
                except (OSError, ValueError):
                    sizes[path] = 0
            total += sizes[path]
    return total
