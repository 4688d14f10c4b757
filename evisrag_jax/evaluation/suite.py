"""Runs a method over a set of questions, keeps every prediction, and scores them.

    records --method, engine--> predictions.jsonl --metrics--> scores.jsonl --statistics--> summary.json

The method and its engine are arguments, so the trainer's validation and the command line share this
code. What is written can be scored again in another mode without running the model.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evisrag_jax.data.schema import Record
from evisrag_jax.evaluation.metrics import (
    QuestionScore,
    check_mode,
    metric_values,
    score_question,
    summarise,
)
from evisrag_jax.evaluation.predictions import PredictionWriter, match_predictions
from evisrag_jax.evaluation.statistics import RESAMPLES, bootstrap
from evisrag_jax.runtime.json_files import (
    dump_row,
    filter_jsonl,
    read_jsonl,
    write_json,
    write_jsonl,
)
from evisrag_jax.runtime.processes import gather_json

TIMES = "times.jsonl"  # beside predictions.jsonl, which holds nothing that a clock decides

#: Summary names that get an interval, and the per-question metric each is a mean of.
INTERVALS = {
    "accuracy": "accuracy",
    "em": "strict/em",
    "f1": "strict/f1",
    "evidence_f1": "evidence_f1",
    "format_rate": "format",
}


def evaluate(
    records: Sequence[Record],
    method: Callable[[Sequence[Record], Any], Sequence[Any]],
    engine: Any,
    out: str | os.PathLike | None = None,
    mode: str = "strict",
    limit: int | None = None,
    *,
    name: str | None = None,
    chunk: int = 8,
    answer_block: str = "single",
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: bool = True,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Predict and score.

    Questions are predicted in chunks. A page that cannot be read or a prompt over its limit costs
    its own question alone: the row has finish "error" and counts as wrong. Any other exception ends
    the run; what was predicted stays, and the same call goes on after it.

    Args:
        records: the set, ids unique.
        method: ``(records, engine) -> predictions``, one a record, with ``id``, ``text``,
            ``answer``, ``finish``, ``length`` and ``degenerate``.
        engine: handed to the method.
        out: folder for predictions.jsonl, scores.jsonl and summary.json. Questions that its
            predictions.jsonl holds are not predicted again. None writes nothing.
        mode: "strict" or "code"; whose accuracy is ``accuracy``. Both modes are scored.
        limit: only the first questions of the set.
        name: of the method in the rows; by default its ``name`` or ``__name__``.
        chunk: questions handed to the method at once. Latencies are those of a chunk, a question's share
            each: use 1 (and buckets of one prompt) to compare methods (evaluation spec 4.7).
        answer_block: the strict rule for several answer blocks: "single", "first" or "last".
        resamples, seed: of the bootstrap intervals (95 %) in ``ci``.
        progress: show a progress bar on a terminal.
        share: (index, count) of a process among several that evaluate one set together: each predicts
            every count-th question and all score all of them. Only without `out`.

    Returns:
        The flat summary of ``metrics.summarise`` with method, n_expected, n_predicted, n_missing,
        n_duplicate, n_error, n_resumed, and ``ci``: name to [low, high].

    Raises:
        ValueError: for an empty set, repeated ids, predictions that do not answer the questions
            asked, or an ``out`` that holds predictions of another set or method.
    """
    check_mode(mode)
    index, count = share
    if count > 1 and out is not None:
        raise ValueError(f"{out}: predictions of several processes are not written")
    chosen = list(records if limit is None else records[:limit])
    if not chosen or chunk < 1:
        raise ValueError(f"nothing to evaluate: {len(chosen)} records, chunk={chunk}")
    repeated = [id for id, times in Counter(r.id for r in records).items() if times > 1]
    if repeated:
        raise ValueError(f"the set uses the id {repeated[0]!r} more than once")
    name = name or str(getattr(method, "name", None) or getattr(method, "__name__", "method"))
    rows: dict[str, dict[str, Any]] = {}
    writer = None
    if out is not None:
        writer = PredictionWriter(Path(out) / "predictions.jsonl")
        rows = _resumed(writer, records, name)
    resumed = sum(record.id in rows for record in chosen)
    try:
        waiting = [record for record in chosen if record.id not in rows]
        log = None if out is None else Path(out) / TIMES
        for row, seconds in _predicted(
            waiting[index::count], method, engine, name, chunk, progress
        ):
            rows[row["id"]] = row
            if writer is not None:
                writer.write(row)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(dump_row({"id": row["id"], **seconds}))
        if count > 1:
            for told in gather_json(list(rows.values())):
                rows |= {row["id"]: row for row in told}
    finally:
        if writer is not None:
            writer.close()
    known = [rows[record.id] for record in chosen]
    scores, summary = score_predictions(
        chosen, known, mode=mode, answer_block=answer_block, resamples=resamples, seed=seed
    )
    cost = efficiency(known, [] if out is None else read_times(Path(out) / TIMES))
    summary = {"method": name, **summary, **cost, "n_resumed": resumed}
    if writer is not None and out is not None:
        verdicts = {score.id: score.values["accuracy"] for score in scores}
        for id, accuracy in verdicts.items():
            writer.rows[id] |= {"accuracy": accuracy, "mode": mode}
        writer.finalise([record.id for record in records])
        write_jsonl(Path(out) / "scores.jsonl", map(score_row, scores))
        write_json(Path(out) / "summary.json", summary)
    return summary


def _resumed(
    writer: PredictionWriter, records: Sequence[Record], name: str
) -> dict[str, dict[str, Any]]:
    """Rows that an earlier run left, after a check that they belong here."""
    match_predictions([r.id for r in records], writer.rows.values(), source=str(writer.path))
    for row in writer.rows.values():
        if row.get("method") != name:
            raise ValueError(
                f"{writer.path}: question {row['id']!r} was answered by method "
                f"{row.get('method')!r}, not {name!r}; choose another folder"
            )
    return dict(writer.rows)


def _predicted(
    records: Sequence[Record],
    method: Callable[[Sequence[Record], Any], Sequence[Any]],
    engine: Any,
    name: str,
    chunk: int,
    progress: bool,
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Rows, and each one's share of its chunk's seconds: in all, and in the engine's phases."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not progress or not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as bar:
        task = bar.add_task(f"evaluating {name}", total=len(records))
        for start in range(0, len(records), chunk):
            part = records[start : start + chunk]
            begin, before = time.perf_counter(), dict(getattr(engine, "totals", {}))
            rows = list(_answer(part, method, engine, name))
            spent = {"seconds": time.perf_counter() - begin}
            totals = getattr(engine, "totals", {})
            spent |= {phase: totals[phase] - before[phase] for phase in before}
            for row in rows:
                yield row, {phase: seconds / len(part) for phase, seconds in spent.items()}
                bar.advance(task)


def _answer(
    records: Sequence[Record],
    method: Callable[[Sequence[Record], Any], Sequence[Any]],
    engine: Any,
    name: str,
) -> Iterator[dict[str, Any]]:
    """Rows of one chunk. If it cannot be prepared, its records are tried one by one."""
    from evisrag_jax.pages.decode import PageError
    from evisrag_jax.prompts.chat import PromptTooLong

    try:
        predictions = list(method(records, engine))
    except (PageError, PromptTooLong) as error:
        if len(records) > 1:
            for record in records:
                yield from _answer([record], method, engine, name)
            return
        facts = {"prediction": "", "answer": "", "finish": "error", "length": 0}
        yield prediction_row(records[0], name) | facts | {"error": str(error)}
        return
    asked, answered = [r.id for r in records], [p.id for p in predictions]
    if asked != answered:
        raise ValueError(f"method {name!r} was asked {asked} and answered {answered}")
    for record, prediction in zip(records, predictions, strict=True):
        yield prediction_row(record, name) | {
            "prediction": prediction.text,
            "answer": prediction.answer,
            "finish": prediction.finish,
            "length": prediction.length,
            "degenerate": bool(prediction.degenerate),
            "calls": int(getattr(prediction, "calls", 1)),
            "generated": int(getattr(prediction, "generated", prediction.length)),
            "visual_tokens": int(getattr(prediction, "visual_tokens", 0)),
        }


def efficiency(
    rows: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """cost/… of a question, median and 90th percentile: calls, generated and visual tokens, and latency
    in seconds, in all and in encoding, prefill and decoding. Pages come with the record, so there is no
    retrieval in it. Rows of older files have none of these and are left out."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name in ("calls", "generated", "visual_tokens"):
            if row.get(name) is not None and row.get("finish") != "error":
                columns.setdefault(name, []).append(float(row[name]))
    for row in times:
        for name in ("seconds", "encode", "prefill", "decode"):
            if name in row:
                label = "latency" if name == "seconds" else f"latency_{name}"
                columns.setdefault(label, []).append(float(row[name]))
    return {
        f"cost/{name}_{label}": float(np.percentile(values, q))
        for name, values in columns.items()
        for label, q in (("median", 50), ("p90", 90))
    }


def read_times(path: Path) -> list[dict[str, Any]]:
    """Rows of times.jsonl, the last of each question; none where there is no file. A line that a kill cut
    is left out."""
    if not path.is_file():
        return []
    filter_jsonl(path, lambda row: True)
    return list({row["id"]: row for row in read_jsonl(path)}.values())


def prediction_row(record: Record, method: str) -> dict[str, Any]:
    """The row of a question in predictions.jsonl before there is a response."""
    return {
        "id": record.id,
        "prediction": "",
        "answer": None,
        "finish": "error",
        "length": 0,
        "method": method,
        "images": list(record.images),
        "question": record.question,
        "answers": list(record.answers),
        "is_sufficient": record.is_sufficient,
        "degenerate": False,
    }


def score_predictions(
    records: Sequence[Record],
    rows: Sequence[Mapping[str, Any]],
    *,
    mode: str = "strict",
    answer_block: str = "single",
    resamples: int = RESAMPLES,
    seed: int = 0,
    require_complete: bool = False,
) -> tuple[list[QuestionScore], dict[str, Any]]:
    """Score prediction rows against a set; questions without a row count as wrong.

    Args:
        records: the set.
        rows: rows of a predictions.jsonl; of several with one id the first counts.
        mode, answer_block, resamples, seed: see ``evaluate``.
        require_complete: raise instead of counting missing and repeated rows.

    Returns:
        The scores in the order of the set, and the summary.

    Raises:
        ValueError: for a row of an unknown question; see ``require_complete``.
    """
    chosen, coverage = match_predictions([record.id for record in records], rows)
    if require_complete:
        coverage.require_complete()
    scores = [
        score_question(record, chosen.get(record.id), mode=mode, answer_block=answer_block)
        for record in records
    ]
    summary: dict[str, Any] = {
        **summarise(scores, mode=mode),
        "answer_block": answer_block,
        "n_expected": coverage.n_expected,
        "n_predicted": coverage.n_predicted,
        "n_missing": coverage.n_missing,
        "n_duplicate": coverage.n_duplicate,
        "n_error": sum(row.get("finish") == "error" for row in chosen.values()),
        "ci": {},
    }
    for shown, metric in INTERVALS.items():
        if values := metric_values(scores, metric):
            interval = bootstrap([values], resamples=resamples, seed=seed)
            summary["ci"][shown] = [interval.low, interval.high]
    return scores, summary


def score_row(score: QuestionScore) -> dict[str, Any]:
    """A question's scores as a row of scores.jsonl."""
    head = {"id": score.id, "family": score.family, "is_sufficient": score.is_sufficient}
    return head | {"answer": score.answer, "outcome": score.outcome, **score.values}


def read_scores(path: str | os.PathLike, metric: str = "accuracy") -> dict[str, float]:
    """One metric of a scores.jsonl by question id, for ``statistics``; n/a questions left out.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a metric that no row has.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such scores file")
    rows = read_jsonl(path)
    if rows and not any(metric in row for row in rows):
        raise ValueError(f"{path}: no metric {metric!r}; there are {', '.join(rows[0])}")
    return {row["id"]: float(row[metric]) for row in rows if row.get(metric) is not None}


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary as text for a terminal, one "name value" a line, with "n/a" for None."""
    lines = []
    intervals = summary.get("ci") or {}
    for name, value in summary.items():
        if name == "ci":
            continue
        shown = "n/a" if value is None else f"{value:.4f}" if isinstance(value, float) else value
        if name in intervals:
            low, high = intervals[name]
            shown = f"{shown}  [{low:.4f}, {high:.4f}]"
        lines.append(f"{name:34} {shown}")
    return "\n".join(lines)
