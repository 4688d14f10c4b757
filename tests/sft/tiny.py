"""A tiny Qwen2.5-VL with the mini tokenizer, as transformers writes it, and records with small pages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from evisrag_jax.data.schema import Record
from evisrag_jax.sft.config import DataSource, SFTConfig
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import OptimConfig
from evisrag_jax.training.settings import MeshShape, ModelSource
from experiments.mini.tokenizer import build, vocabulary
from tests.models.tiny import draw_weights

BUCKET = Bucket(
    prompts=4, images=2, windows=2, tokens=6, prompt_length=56, group=2, response_length=40
)
WORDS = "no page shows of is more than what the"


def make_model(folder: Path, seed: int = 0):
    """The torch model (float32), and its folder with tokenizer and processor files."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    names = vocabulary()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(names),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [1, 1, 2],
            },
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        image_token_id=names.index("<|image_pad|>"),
        video_token_id=names.index("<|video_pad|>"),
        vision_start_token_id=names.index("<|vision_start|>"),
        vision_end_token_id=names.index("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    reference = Qwen2_5_VLForConditionalGeneration(config).eval()
    draw_weights(reference, seed)
    reference.save_pretrained(folder)
    build(folder)
    return reference


def make_pages(folder: Path) -> list[str]:
    """Two noise pages of 56 x 56 and 56 x 84 pixels: 4 and 6 merged tokens, 1 and 2 windows."""
    paths = []
    for i, (height, width) in enumerate([(56, 56), (56, 84)]):
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        paths.append(str(folder / f"page{i}.png"))
        Image.fromarray(pixels).save(paths[-1])
    return paths


def words(count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS.split(), count))


def make_record(id: str, tokens: int, images=(), seed: int = 0) -> Record:
    """A record whose response takes `tokens` tokens with its end token."""
    return Record(
        id=id,
        question=words(5, seed + 100),
        images=tuple(images),
        answers=("42",),
        is_sufficient=True,
        response=f"<answer> {words(tokens - 3, seed)}</answer>",
    )


def write_rows(path: Path, records: list[Record]) -> Path:
    """The records as a data file beside their pages."""
    rows = [
        {
            "id": r.id,
            "question": r.question,
            "images": [Path(i).name for i in r.images],
            "answers": list(r.answers),
            "is_sufficient": r.is_sufficient,
            "response": r.response,
        }
        for r in records
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_config(model: Path, path: Path, **changes) -> SFTConfig:
    """A run of 4 steps on one device, whose every field can be changed."""
    data_fields = {"path": str(path), "template": "mini", "threads": 0}
    data_fields |= changes.pop("data", {})
    fields = {
        "buckets": (BUCKET,),
        "steps": 4,
        "optim": OptimConfig(learning_rate=1e-3, warmup_steps=3),
        "mesh": MeshShape(data=1, fsdp=-1),
        "remat": "none",
        "save_every": 2,
        "tensorboard": False,
    }
    return SFTConfig(
        model=ModelSource(path=str(model), compute_dtype="float32"),
        data=DataSource(**data_fields),
        **(fields | changes),
    )
