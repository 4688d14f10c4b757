"""A tiny Qwen2.5-VL with the mini tokenizer and drawn weights, as a folder that transformers loads too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.config import RLConfig, RLRunConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.runtime import mesh
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import OptimConfig
from evisrag_jax.training.settings import MeshShape, ModelSource, PromptSource
from experiments.mini import export, shapes
from experiments.mini.tokenizer import vocabulary

STOP = "<|im_end|>"
# Three mini-world pages of 140 x 112 pixels a prompt.
PAGES = {"images": 3, "windows": 6, "tokens": 20, "prompt_length": 96}
SPECIAL = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


@pytest.fixture(scope="module", autouse=True)
def few_devices():
    """Meshes take as many of the eight virtual devices as their sizes say, and one for a -1."""
    make_mesh = mesh.make_mesh

    def small(data=-1, fsdp=1, tensor=1, devices=None):
        sizes = [max(size, 1) for size in (data, fsdp, tensor)]
        return make_mesh(*sizes, devices=devices or jax.devices()[: int(np.prod(sizes))])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "make_mesh", small)
        yield


def tiny_config():
    """The mini model's config at a fraction of its sizes."""
    names = vocabulary()
    mini = shapes.mini_config(len(names), {k: names.index(v) for k, v in SPECIAL.items()})
    text = dataclasses.replace(
        mini.text,
        width=32,
        mlp=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mrope_section=(1, 1, 2),
    )
    vision = dataclasses.replace(
        mini.vision, depth=2, width=32, mlp=48, heads=2, out_width=32, full_attention=(1,)
    )
    return dataclasses.replace(mini, text=text, vision=vision)


def fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Numbers that an output of a kernel adds up; stacked kernels have their layers first."""
    module = name.split("/")[-2]
    if module in ("q", "k", "v", "qkv"):  # [layers, D, heads, H], [layers, D, 3, heads, H]
        return shape[1]
    if module in ("o", "proj"):  # [layers, heads, H, D]
        return shape[1] * shape[2]
    return shape[-2]


def draw_params(config, seed: int = 0):
    """Weights that keep activations near 1, with small logits (large ones let float32 itself move gradients
    by more than the tests allow), and make sampled responses vary and end by themselves."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if "norm" in name or name.endswith("scale"):
            return 1 + 0.1 * noise
        if name.endswith("bias"):
            return 0.1 * noise
        if name.endswith("embedding"):
            noise[vocabulary().index(STOP)] *= 5.0
            return 0.3 * noise
        return noise / fan_in(name, leaf.shape) ** 0.5

    return jax.tree_util.tree_map_with_path(draw, model.param_shapes(config))


def write_model(folder: Path, seed: int = 0) -> Path:
    """The model's folder; its weights are bfloat16 on disk."""
    config = tiny_config()
    return export.export(draw_params(config, seed), config, folder)


def code_config(**changes) -> RLConfig:
    """The released channels, of which the length penalty pays what a random model does: free up to 4
    tokens, falling to -1 at 12, and -1 above."""
    reward = RewardConfig(mode="code", overlong_max=12, overlong_buffer=8, overlong_min=1)
    fields = {
        "prompts": 4,
        "group": 4,
        "max_tokens": 16,
        "estimator": "code",
        "reward": reward,
        "loss": PolicyLossConfig.code(divisor_scope="global", nan_policy="safe_zero"),
        "optim": OptimConfig(learning_rate=2e-4, weight_decay=0.0),
    }
    return RLConfig(**(fields | changes))


def run_config(model_folder: Path, file: Path, **changes) -> RLRunConfig:
    """A run of 4 steps, whose every field can be changed; `devices` go to the mesh's data axis."""
    fields = {
        "rl": code_config(),
        "steps": 4,
        "mesh": MeshShape(data=changes.pop("devices", 1)),
        "remat": "none",
        "save_every": 2,
        "tensorboard": False,
        "export_dtype": "float32",
        **PAGES,
    }
    source = {"path": str(file), "template": "mini", "threads": 0} | changes.pop("data", {})
    return RLRunConfig(
        model=ModelSource(path=str(model_folder), compute_dtype="float32"),
        data=PromptSource(**source),
        **(fields | changes),
    )


def bucket(**changes) -> Bucket:
    """P = 4 prompts of three mini pages, G = 3 responses of 40 tokens."""
    sizes = {"prompts": 4, "group": 3, "response_length": 40, **PAGES}
    return Bucket(**(sizes | changes))
