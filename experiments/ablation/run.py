"""One arm under one seed: train, answer the held-out questions, keep what the statistics need.

OUT/runs/ARM-SEED/        the RL run's folder and, in eval/, its evaluation (may be deleted)
OUT/results/ARM-SEED.json command, config and its hash, curves
OUT/results/ARM-SEED.jsonl.gz  a row a question: what was answered
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from evisrag_jax.cli.config import load_config, to_dataclass
from evisrag_jax.cli.eval import EvalConfig, evaluate_run
from evisrag_jax.rl.run import train
from evisrag_jax.runtime.json_files import plain, read_json, read_jsonl, write_json
from experiments.ablation.arms import ARMS, Budget, run_config

KEPT = ("id", "prediction", "finish", "length", "degenerate")
CURVES = ("reward/", "kept/", "scope/", "filter/", "grad/", "rollout/length_mean", "loss/entropy")


def run_arm(name: str, seed: int, budget: Budget, *, out: Path, model: str, data: Path, test: Path):
    """Trains, evaluates and keeps one arm's result, unless it is there."""
    result = out / "results" / f"{name}-{seed}.json"
    if result.is_file():
        return
    config = run_config(ARMS[name], budget, model=model, data=str(data), seed=seed)
    folder = out / "runs" / f"{name}-{seed}"
    summary = train(config, folder)
    answers(str(folder / "model"), test, folder / "eval", config.rl.max_tokens)
    keep_predictions(folder / "eval", result.with_suffix(".jsonl.gz"))
    described = describe(config)
    write_json(
        result,
        {
            "arm": name,
            "seed": seed,
            "command": f"python -m experiments.ablation --out OUT --arms {name} --seeds {seed}",
            "budget": dataclasses.asdict(budget),
            "config": described,
            "config_hash": config_hash(described),
            "seconds": summary["seconds"],
            "curves": curves(folder),
        },
    )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    shutil.rmtree(folder / "model", ignore_errors=True)


def keep_start(name: str, model: str, *, out: Path, test: Path, max_tokens: int = 64) -> None:
    """The answers of a model that arms start from, unless they are there; name: "start_FAMILY"."""
    path = out / "results" / f"{name}.jsonl.gz"
    if not path.is_file():
        answers(model, test, out / "runs" / name / "eval", max_tokens)
        keep_predictions(out / "runs" / name / "eval", path)


def answers(model: str, test: Path, out: Path, max_tokens: int) -> dict[str, Any]:
    """Greedy answers of a model to the held-out questions; the summary of the evaluation."""
    config, _ = load_config("eval.py:mini")
    with config.unlocked():
        config.model.path, config.data.path = model, str(test)
        config.method.sampling.max_tokens, config.report = max_tokens, False
    return evaluate_run(to_dataclass(config, EvalConfig), out)


def keep_predictions(evaluation: Path, path: Path) -> None:
    """The rows of a predictions.jsonl, compressed; equal rows give equal bytes."""
    rows = [
        {name: row[name] for name in KEPT} for row in read_jsonl(evaluation / "predictions.jsonl")
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """What `keep_predictions` wrote."""
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def describe(config: Any) -> dict[str, Any]:
    """The resolved config without the places where this machine keeps files."""
    values = plain(dataclasses.asdict(config))
    for part, name in (("model", "path"), ("data", "path")):
        values[part][name] = Path(values[part][name]).name
    return values


def config_hash(described: dict[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of the described config."""
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def curves(folder: Path) -> dict[str, list[float | None]]:
    """What is plotted, a value a step, rounded to four digits; None where a step has none."""
    rows = read_jsonl(folder / "metrics.jsonl")
    names = sorted({name for row in rows for name in row if name.startswith(CURVES)})
    return {
        name: [None if row.get(name) is None else float(np.round(row[name], 4)) for row in rows]
        for name in names
    }


def results(folder: Path) -> list[dict[str, Any]]:
    """The kept results of a folder, in the order of arms and seeds."""
    found = [read_json(path) for path in folder.glob("*-*.json")]
    order = list(ARMS)
    return sorted(found, key=lambda one: (order.index(one["arm"]), one["seed"]))
