"""Adapters as PEFT's files, so that peft and servers put them on the published model.

    adapter_config.json          rank, alpha, and a pattern of the modules by their full names
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [r, in], …lora_B.weight [out, r]

MODULE is a module of transformers' class (model.language_model.layers.0.self_attn.q_proj, …).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from evisrag_jax.models.lora import LoraConfig, Target, find_targets
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.weights import fetch

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def module_name(name: str, config: Qwen25VLConfig) -> str:
    """A module of the published layout as transformers' class names it since 4.52."""
    if config.vision is None:
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    return re.sub(r"^model\.", "model.language_model.", name)


def save_adapter(
    params: Mapping[str, Any],
    config: Qwen25VLConfig,
    lora: LoraConfig,
    folder: str | Path,
    *,
    base: str,
) -> None:
    """Write the adapters of nested parameters into `folder`, float32. All of several processes call this,
    and process 0 writes.

    Args:
        base: the model that they are for, as adapter_config.json names it.
    """
    folder = Path(folder)
    tensors: dict[str, np.ndarray] = {}
    targets = find_targets(config, lora)
    for target in targets:
        node: Any = params
        for key in target.path.split("/"):
            node = node[key]
        a, b = (fetch(node[f"lora_{one}"]).astype(np.float32) for one in "ab")
        layers = len(target.names)
        a = a.reshape(layers, target.sizes[0], lora.rank)
        b = b.reshape(layers, lora.rank, target.sizes[1])
        for i, name in enumerate(target.names):
            stem = f"base_model.model.{module_name(name, config)}"
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(a[i].T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(b[i].T)
    if jax.process_index():
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(peft_config(config, lora, targets, base=base), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # save_file makes it private


def peft_config(
    config: Qwen25VLConfig, lora: LoraConfig, targets: tuple[Target, ...], *, base: str
) -> dict[str, Any]:
    """The content of adapter_config.json.

    Modules are given by a pattern over full names: bare names such as "gate_proj" would also put
    adapters on the other tower.
    """
    patterns = []
    for target in targets:
        pattern = re.escape(module_name(target.names[0], config))
        patterns.append(pattern.replace(r"\.0\.", r"\.\d+\.", target.stacked))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": "|".join(patterns),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
