"""transformers with SDPA on the same card: random bf16 weights of the same shape."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from evisrag_jax.models.qwen25vl.config import to_hf

from . import peer
from .case import Case


def reason_against(*, tiny: bool) -> str | None:
    """Why torch cannot run beside us here; None when it can."""
    if torch.cuda.is_available() or tiny:
        return None
    return f"torch {torch.__version__} sees no GPU"


def make_model(case: Case) -> Qwen2_5_VLForConditionalGeneration:
    """The shape's model made on the card (its weights are its own: only time is compared)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(to_hf(case.shape.config))
        Path(folder, "config.json").write_text(text, encoding="utf-8")
        config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def rollout(model: Qwen2_5_VLForConditionalGeneration, case: Case) -> Callable[[], None]:
    """generate(num_return_sequences=G) for every prompt at once."""
    device = str(model.device)
    inputs = peer.make_inputs(case, device=device)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)

    def run() -> None:
        peer.generate(
            model,
            inputs,
            tokens=case.shape.response,
            greedy=False,
            group=case.shape.group,
            suppress=case.never_sampled,
            stop_ids=case.stop_ids,
        )
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return run


def free() -> None:
    """Gives the card's memory back that torch keeps for itself."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
