"""Reinforcement learning. `rl.py:mini` runs on two CPU cores; `rl.py:paper` and `rl.py:code` hold the
published settings of RS-GRPO for a 7B checkpoint, as the paper and as the released code have them. Every
other recipe of `evisrag_jax.rl.recipes` (grpo, dapo, dr_grpo, gspo, papo, vppo, stepgrpo_r1vl, …) stands
beside them under the same schedule, and as `rl.py:mini-RECIPE` at the mini model's scale.

perception_r1 and vlm_r1 pay boxes, so their records need a field `boxes`, and they start from a model that
writes a list of boxes: columns and rows of merged tokens at the mini model's scale (it has no numbers above
99), pixels else.

    evisrag rl --config=configs/rl.py:mini --model mini-sft --data train.jsonl --out runs/rl
    evisrag rl --config=configs/rl.py:mini-dapo --model mini-sft --data train.jsonl --out runs/dapo
    evisrag rl --config=configs/rl.py:paper --model sft-checkpoint --data train.jsonl --out runs/rl
"""

import dataclasses

from ml_collections import ConfigDict

from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.recipes import RECIPES, preset
from evisrag_jax.training.optimiser import OptimConfig


def get_config(arg: str = "mini") -> ConfigDict:
    """The config of one argument: mini (the paper's recipe), mini-RECIPE or RECIPE."""
    if arg == "mini":
        return _mini("paper")
    if arg in RECIPES:
        return _full(arg)
    if arg.startswith("mini-") and arg[5:] in RECIPES:
        return _mini(arg[5:])
    raise ValueError(
        f"rl.py:{arg} is unknown; mini, or one of {', '.join(RECIPES)}, also as mini-…"
    )


def _run(rl: RLConfig, **fields) -> ConfigDict:
    return ConfigDict(
        {
            "model": {"path": "", "param_dtype": "float32", "compute_dtype": "auto"},
            "data": {
                "path": "",
                "validation": "",
                "image_root": "",
                "template": "evidence_cot",
                "system": "",
                "images_first": False,
                "budget": "",
                "exif_transpose": True,
                "threads": 2,
                "ahead": 64,
                "cache_mb": 1024,
                "feature_cache_mb": 4096,
                "feature_cache_dir": "",
            },
            "rl": dataclasses.asdict(rl),
            "lora": dataclasses.asdict(LoraConfig()),
            "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
            "rollout_tensor": 0,
            "slots": 0,
            "stuck_after": 3600,
            "seed": 0,
            "remat": "full",
            "chunk": 2048,
            "log_every": 1,
            "eval_limit": 0,
            "keep": 2,
            "max_skipped": 10,
            "preempt_seconds": 300.0,
            "rollout_rows": 4,
            "interference_every": 0,
            "tensorboard": True,
            "export": True,
            "export_dtype": "bfloat16",
            **fields,
        }
    )


def _mini(name: str) -> ConfigDict:
    """A recipe at a scale where a response has 40 tokens: what the recipe says of lengths is scaled so
    that no whole response (up to 60 tokens) is called long."""
    rl = preset(name)
    reward = dataclasses.replace(
        rl.reward, overlong_max=64, overlong_buffer=4, overlong_min=0 if name != "code" else 8
    )
    if reward.reads_boxes:
        reward = dataclasses.replace(reward, units="cells")
    rl = dataclasses.replace(
        rl,
        prompts=16,
        group=8,
        temperature=1.0,
        max_tokens=64,
        reward=reward,
        optim=OptimConfig(learning_rate=2e-4, warmup_steps=2, weight_decay=0.0, b2=0.98),
    )
    config = _run(
        rl,
        images=3,
        windows=6,
        tokens=20,
        prompt_length=96,
        steps=60,
        epochs=1.0,
        save_every=20,
        eval_every=0,
        rollouts_every=5,
    )
    config.model.path = "mini-sft"
    config.data.template = "mini"
    config.remat = "none"
    return config


def _full(name: str) -> ConfigDict:
    """Published RS-GRPO settings (EVisRAG table 7, spec 5-7)."""
    optim = OptimConfig(
        learning_rate=1e-6, weight_decay=0.01, first_step_lr="zero" if name == "code" else "base"
    )
    rl = preset(name, prompts=32, group=8, micro=1, max_tokens=1536, optim=optim)
    config = _run(
        rl,
        images=5,
        windows=200,
        tokens=2048,
        prompt_length=10752,
        steps=0,
        epochs=16.0 if name == "code" else 4.0,
        save_every=10,
        eval_every=0 if rl.reward.reads_boxes else 10,
        rollouts_every=1,
    )
    if rl.reward.reads_boxes:
        config.data.template = "boxes_think" if "think" in rl.reward.sections else "boxes"
    config.data.budget = "grpo"
    config.mesh.fsdp = -1
    config.mesh.data = 1
    return config
