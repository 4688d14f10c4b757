"""Writes a mini model as a Hugging Face folder: weights in bf16, config, tokenizer, processor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.weights import save_params
from experiments.mini import tokenizer


def export(params, config: Qwen25VLConfig, folder: Path, words: Sequence[str] = ()) -> Path:
    """A folder under 8 MB that transformers and `evisrag` load; `words` are further tokens."""
    tokenizer.build(folder, words)
    save_params(params, config, folder)
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = generation.get(name)
        raw[name] = value[0] if isinstance(value, list) else value
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return folder
