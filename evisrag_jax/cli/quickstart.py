"""``evisrag quickstart``: the whole loop on generated pages, offline, in minutes on two CPU cores.

    pages and questions (PNG, JSONL) ─► evaluate mini-sft ─► RS-GRPO ─► evaluate again ─► report.html

OUT is the run folder of the RL run; OUT/data, OUT/before and OUT/after stand beside its files. A
quickstart that was stopped goes on with the same command.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, load_config, parse, to_dataclass

SUMMARY = "generate pages, evaluate, train with RS-GRPO, evaluate again, write a report"

SHOWN = ("accuracy", "f1", "format_rate", "evidence_f1")


def run(argv: Sequence[str]) -> int:
    """Runs everything and prints a table; returns 0."""
    parsed = parse(
        argv, command="quickstart", summary=SUMMARY, usage="[--out DIR] [--seed N]", define=_flags
    )
    flags = parsed.flags
    if parsed.args:
        raise ConfigError(f"quickstart takes no positional arguments, got {' '.join(parsed.args)}")
    if flags.questions < 1 or flags.steps < 1:
        raise ConfigError("--questions and --steps must be at least 1")
    out = parsed.out or Path("evisrag-quickstart")
    if _finished(out):
        raise ConfigError(f"{out}: holds a finished quickstart; choose another --out")
    summary = quickstart(
        out, seed=flags.seed, steps=flags.steps, questions=flags.questions, facts=parsed.facts()
    )
    _table(summary)
    report = (out / "report.html").resolve()
    print(f"report   {report}")
    if _has_screen() if flags.open is None else flags.open:
        import webbrowser

        webbrowser.open(report.as_uri())
    return 0


def _flags(values: Any) -> None:
    from absl import flags

    flags.DEFINE_integer("seed", 0, "of the training data and of sampling", flag_values=values)
    flags.DEFINE_integer("steps", 60, "RS-GRPO steps", flag_values=values)
    flags.DEFINE_integer("questions", 200, "held-out questions", flag_values=values)
    flags.DEFINE_bool(
        "open", None, "show the report in a web browser (default: on a desktop)", flag_values=values
    )


def _finished(out: Path) -> bool:
    """Whether the folder holds a whole quickstart (the RL run inside it writes a summary too)."""
    from evisrag_jax.runtime.json_files import read_json

    summary = out / "summary.json"
    return summary.is_file() and read_json(summary).get("command") == "quickstart"


def _has_screen() -> bool:
    """Whether somebody sits in front of a desktop."""
    desktop = sys.platform in ("darwin", "win32") or os.environ.keys() & {
        "DISPLAY",
        "WAYLAND_DISPLAY",
    }
    return bool(desktop) and sys.stdout.isatty()


def quickstart(
    out: Path, *, seed: int, steps: int, questions: int, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The run folder `out`; returns its summary.

    The held-out questions are the same for every seed: pairs, entities and renderings that training
    never shows.
    """
    from evisrag_jax.cli.eval import EvalConfig
    from evisrag_jax.data.miniworld.files import write_dataset
    from evisrag_jax.reporting.page import write_report
    from evisrag_jax.rl.config import RLRunConfig
    from evisrag_jax.rl.run import train
    from evisrag_jax.runtime.compile_cache import CompileCounter, enable_compile_cache
    from evisrag_jax.runtime.run_folder import RunFolder

    begin = time.perf_counter()
    enable_compile_cache()
    compiles = CompileCounter()
    rl, _ = load_config("rl.py:mini")
    held_out, _ = load_config("eval.py:mini")
    print(f"1/4  pages and questions → {out / 'data'}", flush=True)
    training = write_dataset(out / "data", rl.rl.prompts * steps, "train", seed)
    test = write_dataset(out / "data", questions, "test", 0)

    with rl.unlocked():
        rl.data.path, rl.seed, rl.steps = str(training), seed, steps
    held_out.data.path = str(test)
    evaluation = to_dataclass(held_out, EvalConfig)
    print(f"2/4  mini-sft answers {questions} held-out questions", flush=True)
    before = _evaluate(evaluation, rl.model.path, out / "before")
    print(f"     {_line(before)}", flush=True)
    print(f"3/4  RS-GRPO, {steps} steps of {rl.rl.prompts} prompts × {rl.rl.group}", flush=True)
    trained = train(to_dataclass(rl, RLRunConfig), out, facts=facts)
    print("4/4  the trained model answers the same questions", flush=True)
    after = _evaluate(evaluation, trained["export"], out / "after")
    print(f"     {_line(after)}", flush=True)
    shutil.copyfile(out / "after" / "predictions.jsonl", out / "predictions.jsonl")
    summary = {
        **trained,
        "command": "quickstart",
        "questions": questions,
        "seed": seed,
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "format_after": after["format_rate"],
        "evidence_after": after["evidence_f1"],
        "gain": _gain(out),
        "steps": steps,
        "eval_before": before,
        "eval_after": after,
        "seconds": round(time.perf_counter() - begin, 1),
        "compiles": compiles.count,
    }
    with RunFolder(out) as folder:
        folder.write_summary(summary)
    write_report(out)
    return summary


def _evaluate(config: Any, model: str, out: Path) -> dict[str, Any]:
    import dataclasses

    from evisrag_jax.cli.eval import evaluate_run

    model = dataclasses.replace(config.model, path=str(model))
    return evaluate_run(dataclasses.replace(config, model=model, report=False), out)


def _gain(out: Path) -> dict[str, float]:
    """Paired difference of accuracy over the questions, with its 95 % interval."""
    from evisrag_jax.evaluation.statistics import paired_difference
    from evisrag_jax.evaluation.suite import read_scores

    before, after = (read_scores(out / name / "scores.jsonl") for name in ("before", "after"))
    result = paired_difference([after], [before])
    return {"mean": result.difference, "low": result.low, "high": result.high}


def _line(summary: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {summary[name]:.3f}" for name in SHOWN if summary[name] is not None)


def _table(summary: Mapping[str, Any]) -> None:
    """Before and after, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="held-out questions", title_justify="left")
    for heading in ("", "before", "after", "95 % interval"):
        table.add_column(heading, justify="left" if not heading else "right")
    before, after = summary["eval_before"], summary["eval_after"]
    for name in SHOWN:
        values = [f"{s[name]:.3f}" if s[name] is not None else "n/a" for s in (before, after)]
        interval = after["ci"].get(name)
        table.add_row(name, *values, f"{interval[0]:.3f} – {interval[1]:.3f}" if interval else "")
    Console().print(table)
    gain = summary["gain"]
    print(
        f"accuracy gain {gain['mean']:+.3f} (95 % interval {gain['low']:+.3f} to "
        f"{gain['high']:+.3f}), {summary['steps']} steps, {summary['seconds']:.0f} s, "
        f"{summary['compiles']} compiles"
    )
