"""``python -m experiments.sweeps``: accuracy and F1 against the number of pages and the evidence density.

    python -m experiments.sweeps --quick --out DIR       five numbers of pages, 60 questions each
    python -m experiments.sweeps --out DIR               k = 1 … 20, 200 questions each
    python -m experiments.sweeps --out DIR --model PATH --method NAME

Generated pages: of k pages one or two hold evidence, so density falls as k grows. d = |B| / |V|: merged tokens
that an evidence box touches over all visual tokens (evaluation spec 4.6); page density = relevant pages / k.
DIR/results.json, table.md and two figures; a k that is there already is not run again. The bundled model
was trained on three pages: what it does with one, or with more, is what the sweep shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evisrag_jax.cli.config import load_config, to_dataclass
from evisrag_jax.cli.eval import EvalConfig, evaluate_run
from evisrag_jax.data.miniworld.draw import CELL, COLS, ROWS
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.data.schema import Record
from evisrag_jax.data.sources import read_records
from evisrag_jax.evaluation.statistics import bootstrap
from evisrag_jax.evaluation.suite import read_scores
from evisrag_jax.runtime.json_files import read_json, write_json

ALL, QUICK = tuple(range(1, 21)), (1, 3, 5, 10, 20)
TEMPLATE = 45  # tokens of a question in its chat layout, at most
LINE = 14  # tokens that a page adds to a response, at most


def main() -> None:
    """Runs what is missing, then writes table and figures."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweeps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("sweeps"), help="folder of the results")
    parser.add_argument("--model", default="mini", help="a bundled model or a folder")
    parser.add_argument("--method", default="evidence_cot", help="of `evisrag eval`")
    parser.add_argument("--quick", action="store_true", help="fewer k and questions")
    args = parser.parse_args()
    rows = []
    for k in QUICK if args.quick else ALL:
        print(f"{k} pages", flush=True)
        rows.append(point(args.out, k, 60 if args.quick else 200, args.model, args.method))
    write_json(
        args.out / "results.json", {"model": args.model, "method": args.method, "points": rows}
    )
    (args.out / "table.md").write_text(table(rows), encoding="utf-8")
    figures(args.out, rows)
    print(table(rows))


def point(out: Path, k: int, questions: int, model: str, method: str) -> dict[str, Any]:
    """One number of pages: answered, scored, and described."""
    folder = out / f"k-{k:02d}"
    if (folder / "summary.json").is_file():
        data = folder / "questions" / "test.jsonl"
    else:
        data = write_dataset(folder / "questions", questions, "test", 0, n_pages=k)
        config, _ = load_config("eval.py:mini")
        with config.unlocked():
            config.model.path, config.method.name = model, method
            config.data.path, config.report = str(data), False
            config.shapes.pages = ((k, 6, 20),)
            config.shapes.prompts = (20,)
            config.shapes.lengths = (-(-(TEMPLATE + 24 * k) // 32) * 32,)
            config.shapes.responses = (-(-(32 + LINE * k) // 16) * 16,)
            config.method.sampling.max_tokens = config.shapes.responses[0]
        evaluate_run(to_dataclass(config, EvalConfig), folder)
    summary = read_json(folder / "summary.json")
    records = read_records(data)
    accuracy = bootstrap([read_scores(folder / "scores.jsonl")])
    tokens, pages = zip(*map(density, records), strict=True)
    return {
        "k": k,
        "questions": len(records),
        "accuracy": accuracy.mean,
        "low": accuracy.low,
        "high": accuracy.high,
        "f1": summary["f1"],
        "evidence_f1": summary["evidence_f1"],
        "format_rate": summary["format_rate"],
        "refusal_rate": summary["accuracy_insufficient"],
        "density": float(np.mean(tokens)),
        "page_density": float(np.mean(pages)),
        **{name: summary[name] for name in summary if name.startswith("cost/")},
    }


def density(record: Record) -> tuple[float, float]:
    """(|B| / |V|, relevant pages / k) of a question over generated pages."""
    touched = 0
    for boxes in record.boxes or ():
        cells = set()
        for x, y, w, h in boxes:
            columns = range(int(x) // CELL, int(x + w - 1) // CELL + 1)
            cells |= {
                (r, c) for r in range(int(y) // CELL, int(y + h - 1) // CELL + 1) for c in columns
            }
        touched += len(cells)
    k = len(record.images)
    return touched / (k * ROWS * COLS), sum(e is not None for e in record.evidence) / k


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a row a number of pages."""
    head = (
        "pages",
        "density",
        "accuracy (95 %)",
        "F1",
        "evidence F1",
        "format",
        "generated",
        "seconds",
    )
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for row in rows:
        cells = [
            str(row["k"]),
            f"{row['density']:.3f}",
            f"{row['accuracy']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
            *(
                "n/a" if row[n] is None else f"{row[n]:.3f}"
                for n in ("f1", "evidence_f1", "format_rate")
            ),
            f"{row['cost/generated_median']:.0f}",
            f"{row['cost/latency_median']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figures(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """pages.png and density.png: accuracy with its interval, and F1."""
    from matplotlib.figure import Figure

    for name, key, label in (
        ("pages", "k", "pages shown"),
        ("density", "density", "evidence tokens / visual tokens"),
    ):
        figure = Figure(figsize=(5, 3.4), layout="constrained")
        axes = figure.subplots()
        x = [row[key] for row in rows]
        axes.fill_between(x, [r["low"] for r in rows], [r["high"] for r in rows], alpha=0.2)
        axes.plot(x, [row["accuracy"] for row in rows], "o-", label="accuracy")
        axes.plot(x, [row["f1"] for row in rows], "s--", label="F1, sufficient")
        axes.set(xlabel=label, ylim=(0, 1))
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(out / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
