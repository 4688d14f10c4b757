"""``evisrag ask PAGES… "question"``: one answer, with the evidence it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evisrag_jax.cli.config import ConfigError, parse, to_dataclass
from evisrag_jax.cli.session import (
    Answering,
    Model,
    Shapes,
    make_engine,
    make_method,
    open_model,
    snug_buckets,
)

SUMMARY = "answer one question from page images, showing the evidence of every page"


@dataclass(frozen=True)
class AskConfig:
    """Model and method of an evaluation config; its data and shapes do not matter here."""

    model: Model
    data: dict
    shapes: Shapes
    method: Answering = field(default_factory=Answering)
    mode: str = "strict"
    report: bool = True


def run(argv: Sequence[str]) -> int:
    """Prints the four sections; with --out also writes predictions.jsonl and report.html."""
    parsed = parse(
        argv,
        command="ask",
        summary=SUMMARY,
        usage='PAGE [PAGE ...] "question"',
        default_config="eval.py:mini",
    )
    if len(parsed.args) < 2:
        raise ConfigError('ask needs pages and a question: evisrag ask page1.png page2.png "…?"')
    config = to_dataclass(parsed.config, AskConfig)
    *pages, question = parsed.args
    for page in pages:
        if not Path(page).is_file():
            raise ConfigError(f"{page}: no such page image (the question comes last)")
    from evisrag_jax.data.schema import Record

    record = Record(
        id="ask",
        question=question,
        images=tuple(str(Path(page).resolve()) for page in pages),
        answers=(),
        is_sufficient=True,
        evidence=(None,) * len(pages),
    )
    pretrained = open_model(config.model)
    engine = make_engine(pretrained, snug_buckets(record, config.method, pretrained))
    prediction = make_method(config.method, pretrained)([record], engine)[0]
    _show(prediction.text, prediction.finish)
    if parsed.out is not None:
        _write(parsed.out, record, prediction)
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
        console.print(Text(text))
    if finish != "stop":
        console.print(f"[red]the response did not end by itself ({finish})[/red]")


def _write(out: Path, record, prediction) -> None:
    from evisrag_jax.evaluation.suite import prediction_row
    from evisrag_jax.reporting.page import write_report
    from evisrag_jax.runtime.run_folder import RunFolder

    with RunFolder(out) as folder:
        row = prediction_row(record, "evidence_cot") | {
            "prediction": prediction.text,
            "answer": prediction.answer,
            "finish": prediction.finish,
            "length": prediction.length,
            "degenerate": prediction.degenerate,
        }
        folder.predict(row)
    print(write_report(out))
