"""``evisrag ask PAGES… "question"``: one answer, with the evidence it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, parse, to_dataclass
from evisrag_jax.cli.eval import EvalConfig
from evisrag_jax.cli.session import make_engine, make_method, open_model, snug_buckets
from evisrag_jax.data.schema import Record
from evisrag_jax.methods.base import Prediction

SUMMARY = "answer one question from page images, showing the evidence of every page"


def run(argv: Sequence[str]) -> int:
    """Prints the four sections; with --out also writes a run folder with its report.

    Model and method are those of an evaluation config, whose data and shapes do not matter here.
    """
    parsed = parse(
        argv,
        command="ask",
        summary=SUMMARY,
        usage='PAGE [PAGE ...] "question"',
        default_config="eval.py:mini",
    )
    if len(parsed.args) < 2:
        raise ConfigError('ask needs pages and a question: evisrag ask page1.png page2.png "…?"')
    config = to_dataclass(parsed.config, EvalConfig)
    *pages, question = parsed.args
    for page in pages:
        if not Path(page).is_file():
            raise ConfigError(f"{page}: no such page image (the question comes last)")
    if parsed.out is not None and not _is_ours(parsed.out):
        raise ConfigError(f"{parsed.out}: holds another run; choose another --out")
    from evisrag_jax.runtime.compile_cache import enable_compile_cache

    enable_compile_cache()
    record = Record(
        id="ask",
        question=question,
        images=tuple(str(Path(page).resolve()) for page in pages),
        answers=(),
        is_sufficient=True,
    )
    pretrained = open_model(config.model)
    engine = make_engine(pretrained, snug_buckets(record, config.method, pretrained))
    prediction = make_method(config.method, pretrained)([record], engine)[0]
    _show(prediction.text, prediction.finish)
    if parsed.out is not None:
        _write(parsed.out, config, record, prediction, parsed.facts())
    return 0


def _show(text: str, finish: str) -> None:
    """The sections by name, in colour on a terminal; the raw text where there are none."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from evisrag_jax.prompts.sections import TAGS, parse_sections

    console, sections = Console(), parse_sections(text)
    colours = {"observe": "cyan", "evidence": "green", "think": "yellow", "answer": "bold magenta"}
    for tag in TAGS:
        if tag in sections:
            body = Text(sections[tag].text.strip())
            console.print(Panel(body, title=tag, title_align="left", border_style=colours[tag]))
    if not sections:
        console.print(Text(text if text.strip() else "(the response is empty)"))
    if finish != "stop":
        console.print(f"[red]the response did not end by itself ({finish})[/red]")


def _is_ours(out: Path) -> bool:
    """Whether the folder is free, or holds an earlier answer."""
    from evisrag_jax.runtime.json_files import read_json

    if not any((out / name).exists() for name in ("config.json", "predictions.jsonl")):
        return True
    summary = out / "summary.json"
    return summary.is_file() and read_json(summary).get("command") == "ask"


def _write(
    out: Path, config: EvalConfig, record: Record, prediction: Prediction, facts: dict[str, Any]
) -> None:
    """The answer as a run folder of one question, and its report; an earlier answer is replaced."""
    from evisrag_jax.evaluation.suite import prediction_row
    from evisrag_jax.reporting.page import write_report
    from evisrag_jax.runtime.json_files import write_jsonl
    from evisrag_jax.runtime.run_folder import RunFolder

    row = prediction_row(record, config.method.name) | {
        "prediction": prediction.text,
        "answer": prediction.answer,
        "finish": prediction.finish,
        "length": prediction.length,
        "degenerate": prediction.degenerate,
    }
    with RunFolder(out) as folder:
        folder.start(config, **facts)
        write_jsonl(folder.predictions, [row])
        folder.write_summary(
            {
                "command": "ask",
                "model": config.model.path,
                "question": record.question,
                "answer": prediction.answer,
                "finish": prediction.finish,
                "length": prediction.length,
            }
        )
    print(write_report(out))
