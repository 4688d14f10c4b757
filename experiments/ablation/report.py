"""From kept predictions to results.json, a table and two figures.

    predictions + held-out questions ─ strict scores ─► per arm: mean, 95 % interval, spread over seeds
                                                     └► per pair: paired difference, P(not better)

Resamples draw runs and questions (10,000, hierarchical; `evaluation.statistics`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evisrag_jax.data.schema import Record
from evisrag_jax.evaluation.metrics import metric_values
from evisrag_jax.evaluation.statistics import RESAMPLES, bootstrap, paired_difference
from evisrag_jax.evaluation.suite import prediction_row, score_predictions
from evisrag_jax.prompts.sections import TAGS
from evisrag_jax.rewards.evisrag import format_score
from evisrag_jax.runtime.json_files import write_json
from experiments.ablation.arms import ARMS
from experiments.ablation.run import read_predictions, results

CLAIM = "rs_grpo_paper"
START_SECTIONS = {"start_evidence": TAGS, "start_generic": ("think", "answer")}
METRICS = {
    "accuracy": "accuracy",
    "f1": "strict/f1",
    "evidence_f1": "evidence_f1",
    "format_rate": "format",
}


def recompute(folder: Path, records: Sequence[Record]) -> dict[str, Any]:
    """Scores every kept prediction again and writes results.json, table.md and the figures."""
    kept = results(folder)
    if not kept:
        raise SystemExit(f"{folder}: holds no result to compute from")
    scored: dict[str, list[dict[str, dict[str, float]]]] = {}
    arms: dict[str, Any] = {}
    for one in kept:
        path = folder / f"{one['arm']}-{one['seed']}.jsonl.gz"
        scored.setdefault(one["arm"], []).append(scores_of(path, records, one["arm"]))
    for name, runs in scored.items():
        mine = [one for one in kept if one["arm"] == name]
        arms[name] = _arm(name, runs, mine)
    starts = {
        name: {
            metric: statistics.fmean(values.values()) for metric, values in found.items() if values
        }
        for name in START_SECTIONS
        if (folder / f"{name}.jsonl.gz").is_file()
        for found in [scores_of(folder / f"{name}.jsonl.gz", records, name)]
    }
    differences = {
        f"{CLAIM} - {name}": _difference(scored[CLAIM], scored[name])
        for name in scored
        if name != CLAIM and CLAIM in scored
    }
    out = {
        "claim": f"{CLAIM} above evidence_dapo above generic_dapo",
        "resamples": RESAMPLES,
        "questions": len(records),
        "starts": starts,
        "arms": arms,
        "differences": differences,
    }
    write_json(folder / "results.json", out)
    (folder / "table.md").write_text(table(out), encoding="utf-8")
    figures(folder, out, kept)
    return out


def scores_of(path: Path, records: Sequence[Record], arm: str) -> dict[str, dict[str, float]]:
    """metric → question id → value, of one run."""
    by_id = {record.id: record for record in records}
    rows = [prediction_row(by_id[row["id"]], arm) | row for row in read_predictions(path)]
    scores, summary = score_predictions(records, rows, require_complete=True, resamples=10)
    values = {name: dict(metric_values(scores, metric)) for name, metric in METRICS.items()}
    # The form an arm is asked for; evidence where it has such a section.
    sections = ARMS[arm].reward.get("sections", TAGS) if arm in ARMS else START_SECTIONS[arm]
    values["format_rate"] = {
        row["id"]: format_score(row["prediction"], sections=sections) for row in rows
    }
    if "evidence" not in sections:
        values["evidence_f1"] = {}
    refused = {
        score.id: float(score.outcome == "refused") for score in scores if not score.is_sufficient
    }
    over = {score.id: float(score.outcome == "refused") for score in scores if score.is_sufficient}
    values |= {"refusal": refused, "over_refusal": over}
    for family in sorted({record.family for record in records if record.family}):
        ids = {record.id for record in records if record.family == family}
        values[f"accuracy/{family}"] = {i: v for i, v in values["accuracy"].items() if i in ids}
    return values


def _arm(name: str, runs: Sequence[Mapping], kept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "title": ARMS[name].title,
        "seeds": [one["seed"] for one in kept],
        "config_hashes": [one["config_hash"] for one in kept],
        "seconds": [round(one["seconds"], 1) for one in kept],
    }
    for metric in runs[0]:
        values = [run[metric] for run in runs]
        if not values[0]:
            continue
        interval = bootstrap(values)
        means = [statistics.fmean(run.values()) for run in values]
        out[metric] = {
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "std": interval.std,
            "by_seed": means,
        }
    out["cosine"] = _mean_of(kept, "grad/cosine")
    out["scope_found"] = {
        tag: _mean_of(kept, f"scope/found_{tag}")
        for tag in ("observe", "evidence", "think", "answer")
    }
    out["groups_kept"] = _mean_of(kept, "filter/kept")
    out["length"] = _mean_of(kept, "rollout/length_mean")
    return out


def _mean_of(kept: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [v for one in kept for v in one["curves"].get(name, []) if v is not None]
    return float(np.mean(values)) if values else None


def _difference(mine: Sequence[Mapping], theirs: Sequence[Mapping]) -> dict[str, Any]:
    out = {}
    for metric in ("accuracy", "f1", "evidence_f1"):
        if not theirs[0].get(metric) or not mine[0].get(metric):
            continue
        result = paired_difference([run[metric] for run in mine], [run[metric] for run in theirs])
        out[metric] = {
            "mean": result.difference,
            "low": result.low,
            "high": result.high,
            "p_not_better": result.p_not_better,
        }
    return out


def table(out: Mapping[str, Any]) -> str:
    """Markdown: a row an arm, accuracies in percent; then the differences."""
    head = (
        "arm",
        "accuracy (95 %)",
        "± seeds",
        "F1",
        "evidence F1",
        "refusal",
        "format",
        "cosine",
        "n",
    )
    lines = [_row(head), _row(["---"] * len(head))]
    for name, one in out["starts"].items():
        title = f"before RL: {name.removeprefix('start_')} family"
        shown = (one.get(m) for m in ("f1", "evidence_f1", "refusal"))
        cells = [title, _pc(one["accuracy"]), "", *map(_pc, shown), _pc(one["format_rate"]), "", ""]
        lines.append(_row(cells))
    for arm in out["arms"].values():
        a = arm["accuracy"]
        lines.append(
            _row(
                [
                    arm["title"],
                    f"{_pc(a['mean'])} ({_pc(a['low'])} to {_pc(a['high'])})",
                    "" if a["std"] is None else _pc(a["std"]),
                    *(_pc(arm.get(m, {}).get("mean")) for m in ("f1", "evidence_f1", "refusal")),
                    _pc(arm["format_rate"]["mean"]),
                    "" if arm["cosine"] is None else f"{arm['cosine']:+.3f}",
                    str(len(arm["seeds"])),
                ]
            )
        )
    head = ("RS-GRPO (paper) minus", "accuracy (95 %)", "P(not better)")
    lines += ["", _row(head), _row(["---"] * 3)]
    for name, one in out["differences"].items():
        d, other = one["accuracy"], name.split(" - ")[1]
        span = f"{100 * d['mean']:+.1f} ({100 * d['low']:+.1f} to {100 * d['high']:+.1f})"
        lines.append(_row([ARMS[other].title, span, f"{d['p_not_better']:.3f}"]))
    return "\n".join(lines) + "\n"


def _pc(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figures(folder: Path, out: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> None:
    """accuracy.png: arms with intervals and their seeds.  curves.png: sampled answers and gradient
    cosine over the steps."""
    from matplotlib.figure import Figure

    arms = out["arms"]
    figure = Figure(figsize=(7, 0.42 * len(arms) + 1.2), layout="constrained")
    axes = figure.subplots()
    for y, arm in enumerate(reversed(arms.values())):
        a = arm["accuracy"]
        axes.plot([100 * a["low"], 100 * a["high"]], [y, y], color="#3465a4", lw=2)
        axes.plot([100 * v for v in a["by_seed"]], [y] * len(a["by_seed"]), "o", ms=3, color="#888")
        axes.plot(100 * a["mean"], y, "s", ms=6, color="#3465a4")
    axes.set_yticks(range(len(arms)), [arm["title"] for arm in reversed(arms.values())])
    axes.set_xlabel("held-out accuracy, %")
    axes.set_title("mean, 95 % interval, and seeds (dots)", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(folder / "accuracy.png", dpi=110)

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in arms:
        mine = [one["curves"] for one in kept if one["arm"] == name]
        answer = next(
            n for n in ("reward/derivation", "reward/accuracy", "reward/correct") if n in mine[0]
        )
        scale = 3.0 if answer == "reward/accuracy" else 1.0  # the release's factor
        mean = np.mean([np.array(one[answer]) / scale for one in mine], 0)
        left.plot(np.arange(1, len(mean) + 1), mean, label=ARMS[name].title, lw=1.2)
        cosines = [one["grad/cosine"] for one in mine if "grad/cosine" in one]
        if cosines:
            steps = [k for k, v in enumerate(cosines[0], 1) if v is not None]
            values = np.mean([[v for v in one if v is not None] for one in cosines], 0)
            right.plot(steps, values, "o-", ms=3, lw=1, label=ARMS[name].title)
    left.set(xlabel="step", ylabel="answer reward of sampled responses")
    right.set(xlabel="step", ylabel="cosine, perception and derivation gradient")
    right.axhline(0, color="black", lw=0.6)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, ncols=3, loc="outside lower center")
    figure.savefig(folder / "curves.png", dpi=110)
