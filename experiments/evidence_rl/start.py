"""``python -m experiments.evidence_rl.start --out DIR``: the start model of the experiment.

    reader    the bundled tower learns scenes and keeps pages       → DIR/reader
    looking   decoder: exercises on scenes, tower frozen            → DIR/looking
    seeing    the four kinds of question, every answer as frequent  → DIR/seeing
    counting  the same, with more counting                          → DIR/counting
    habits    usual answers, three in ten responses lazy            → DIR/habits, DIR/start
    skills    free responses of DIR/start                           → DIR/skills.jsonl

Stages that are there already are not run again. DIR/*.jsonl hold the curves; DIR/start is the folder to
train from.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.prompts.tokenizer import load_tokenizer
from experiments.evidence_rl import reader, sft, tokenizer
from experiments.evidence_rl.skills import write_skills
from experiments.mini import sft as mini
from experiments.mini.command import arguments
from experiments.mini.export import export

READER_STEPS = 1200


class Leg(NamedTuple):
    """A leg of SFT: `steps` updates on questions of `split`, `lazy_share` of the responses lazy;
    `exercises` of every four updates are on exercises, and a share `counting` of the questions count."""

    name: str
    split: str
    lazy_share: float
    exercises: int
    counting: float
    steps: int
    rate: float


LEGS = (
    Leg("looking", "even", 0.0, 3, 0.5, 500, 1.5e-3),
    Leg("seeing", "even", 0.0, 1, 0.5, 600, 1.2e-3),
    Leg("counting", "even", 0.0, 2, 0.75, 900, 1.2e-3),
    Leg("habits", "train", 0.3, 0, 0.5, 250, 5e-4),
)


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
        mini.save(out / "reader", params)
    tokenizer.build(out / "tokenizer")
    layout = mini.Layout(load_tokenizer(out / "tokenizer"))
    skills = functools.partial(sft.skill_table, config=config, layout=layout)
    before, done = "reader", 0
    for leg in LEGS:
        if not (out / leg.name).is_dir():
            make = sft.lessons(
                layout, args.seed, leg.split, leg.lazy_share, leg.exercises, leg.counting
            )
            params = mini.train(
                config,
                layout,
                mini.load(out / before),
                make,
                leg.steps,
                out / f"{leg.name}.jsonl",
                rate=leg.rate,
                start=done,
                skills=skills,
            )
            mini.save(out / leg.name, params)
        before, done = leg.name, done + leg.steps
    if not (out / "start").is_dir():
        export(mini.load(out / before), config, out / "start", tokenizer.WORDS)
    if not (out / "skills.jsonl").is_file():
        write_skills(out / "start", out / "skills.jsonl")


if __name__ == "__main__":
    main()
