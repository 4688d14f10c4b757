"""``python -m experiments.evidence_rl.start --out DIR``: the start model of the experiment."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.weights import load_params
from experiments.evidence_rl import reader, tokenizer
from experiments.mini import sft
from experiments.mini.command import arguments

READER_STEPS = 1200


def widened(seed: int) -> tuple[dict, Qwen25VLConfig]:
    """The bundled `mini-sft` with rows for the new words, drawn like those that are there."""
    with importlib.resources.as_file(importlib.resources.files("evisrag_jax") / "assets") as assets:
        params, config = load_params(assets / "mini-sft", jnp.float32)
    table = np.asarray(params["text"]["embed"]["embedding"])
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, table.std(), (len(tokenizer.WORDS), table.shape[1]))
    table = jnp.asarray(np.concatenate([table, rows.astype(table.dtype)]))
    params = {**params, "text": {**params["text"], "embed": {"embedding": table}}}
    text = dataclasses.replace(config.text, vocab=len(table))
    return params, dataclasses.replace(config, text=text)


def main() -> None:
    """Runs what is missing."""
    args = arguments("experiments.evidence_rl.start", __doc__, seed={"type": int, "default": 0})
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    params, config = widened(args.seed)
    if not (out / "reader").is_dir():
        params = reader.train(params, args.seed, READER_STEPS, out / "reader.jsonl")
        sft.save(out / "reader", params)


if __name__ == "__main__":
    main()
