"""Runs that one process and several shall do alike: a tiny model, ten questions, two of them of no use."""

from __future__ import annotations

import json
from pathlib import Path

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.rl.config import RLRunConfig
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.sft.config import DataSource, SFTConfig
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import OptimConfig
from evisrag_jax.training.settings import MeshShape, ModelSource
from tests.rl import tiny

PROMPTS = 8


def write_inputs(folder: Path) -> None:
    """FOLDER/model and FOLDER/data; one question has no evidence, one a page that is cut."""
    tiny.write_model(folder / "model")
    path = write_dataset(folder / "data", 10, "train")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[3]["evidence"]
    page = path.parent / rows[7]["images"][0]
    page.write_bytes(page.read_bytes()[:150])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rl_config(folder: Path, devices: int) -> RLRunConfig:
    """Three steps whose filter drops groups, so that a second rollout fills the batch."""
    rl = tiny.code_config(
        prompts=PROMPTS, filter=FilterConfig("both", low=-0.7, tries=2, train_on_partial=True)
    )
    return tiny.run_config(
        folder / "model",
        folder / "data" / "train.jsonl",
        rl=rl,
        steps=3,
        devices=devices,
        rollout_rows=PROMPTS,
        save_every=1,
        keep=9,
        stuck_after=300,
    )


def sft_config(folder: Path, devices: int) -> SFTConfig:
    """Three steps in two shapes, with validation."""
    path = str(folder / "data" / "train.jsonl")
    sizes = {"prompts": PROMPTS, "group": 1, **tiny.PAGES}
    return SFTConfig(
        model=ModelSource(path=str(folder / "model"), compute_dtype="float32"),
        data=DataSource(path=path, validation=path, template="mini", threads=2),
        buckets=tuple(Bucket(response_length=n, **sizes) for n in (48, 96)),
        steps=3,
        optim=OptimConfig(learning_rate=1e-3),
        mesh=MeshShape(data=1, fsdp=devices),
        remat="none",
        save_every=1,
        keep=9,
        tensorboard=False,
        export_dtype="float32",
    )
