"""Questions of the ablation: training and test sets of the mini world, and the start of the arms that
think without looking first.

The perception family starts from the bundled `mini-sft`, whose last lessons came from an imperfect
teacher. The generic family has the same weights, taught by the same teacher to write `<think>` and
`<answer>` alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from evisrag_jax.cli.config import load_config, to_dataclass
from evisrag_jax.data.miniworld.episodes import episode
from evisrag_jax.data.miniworld.files import record_row, write_dataset
from evisrag_jax.sft.config import SFTConfig
from evisrag_jax.sft.trainer import train
from experiments.mini.teacher import imperfect

TEST_SEED = 0  # of `evisrag eval`: the first 200 questions are its own
LESSON_SEED = 20_000  # apart from those of the arms, which are the seeds of their runs


def test_set(folder: Path, questions: int) -> Path:
    """Held-out questions, the same for every arm and seed."""
    path = folder / "test.jsonl"
    return path if path.is_file() else write_dataset(folder, questions, "test", TEST_SEED)


def training_set(folder: Path, questions: int, seed: int) -> Path:
    """Fresh training questions of a seed, the same for every arm."""
    path = folder / f"seed-{seed}" / "train.jsonl"
    if path.is_file() and sum(1 for _ in path.open(encoding="utf-8")) == questions:
        return path
    return write_dataset(path.parent, questions, "train", seed)


def write_lessons(folder: Path, questions: int) -> Path:
    """What the imperfect teacher thinks and answers, without its observations and evidence."""
    pages = folder / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    path = folder / "lessons.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for index in range(questions):
            ep = imperfect(episode(LESSON_SEED, "train", index), LESSON_SEED, index)
            names = []
            for k, pixels in enumerate(ep.images):
                names.append(f"pages/{index:06d}-{k}.png")
                Image.fromarray(pixels).save(folder / names[-1], compress_level=1)
            row = record_row(ep, f"lesson-{index:06d}", names)
            row["response"] = row["response"][row["response"].index("<think>") :]
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def generic_start(folder: Path, *, steps: int, prompts: int = 32, rate: float = 1e-3) -> Path:
    """The model that starts the generic family, trained if it is not there; its folder."""
    run = folder / "generic-sft"
    if not (run / "summary.json").is_file():
        lessons = write_lessons(folder / "lessons", steps * prompts)
        config, _ = load_config("sft.py:mini")
        with config.unlocked():
            config.data.path, config.steps, config.save_every = str(lessons), steps, 100
            config.optim.learning_rate, config.tensorboard = rate, False
            sizes = {"prompts": prompts, "prompt_length": 96, "response_length": 32}
            config.buckets = ({**config.buckets[0], **sizes},)
        train(to_dataclass(config, SFTConfig), run)
    return run / "model"
