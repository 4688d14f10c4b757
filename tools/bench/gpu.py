"""The measured pieces of the GPU benchmark: weights on the device, prefill, rollout, update."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from evisrag_jax.models.qwen25vl import model as qwen
from evisrag_jax.training.optimiser import OptimConfig

from . import counts, ours
from .case import Case, make_case, make_responses
from .shapes import Shape

HEADROOM = 0.85  # of the device's memory that a plan may take


@dataclass(frozen=True)
class TrainPlan:
    """What an update trains, and in which dtype the parameters are kept."""

    words: str
    dtype: Any
    optim: OptimConfig
    trained: int | None  # kernel entries of the layers; None = all


def random_params(shape: Shape, dtype: Any, seed: int = 0) -> Any:
    """Random weights made on the device, one tensor at a time: nothing is held in float32 twice."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(qwen.param_shapes(shape.config))

    def fill(key, path, leaf):
        kind = path[-1].key
        if kind == "scale":
            return jnp.ones(leaf.shape, dtype)
        if kind == "bias":
            return jnp.zeros(leaf.shape, dtype)
        return 0.02 * jax.random.normal(key, leaf.shape, dtype)

    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree, [fill(key, path, leaf) for key, (path, leaf) in zip(keys, leaves, strict=True)]
    )


def parameter_bytes(shape: Shape, width: int) -> int:
    """Of all parameters, `width` bytes a number."""
    return width * sum(leaf.size for leaf in jax.tree.leaves(qwen.param_shapes(shape.config)))


def train_plan(shape: Shape, memory: float | None) -> TrainPlan:
    """Full float32 training where weights, moments, gradients and a bf16 copy fit into `memory` bytes
    (None: no limit known); else bf16 weights with the attention projections trained, the rest frozen."""
    if memory is None or 18 / 4 * parameter_bytes(shape, 4) < HEADROOM * memory:
        return TrainPlan("all of the decoder, float32 master weights and moments", jnp.float32,
                         ours.OPTIM, None)  # fmt: skip
    text = shape.text
    heads = 2 * text.width * text.head_dim * (text.heads + text.kv_heads)
    return TrainPlan(
        "attention projections only (frozen subset), bf16 weights, float32 moments",
        jnp.bfloat16,
        replace(ours.OPTIM, train=r"^text/layers/[qkvo]/"),
        text.layers * heads,
    )


def device_memory() -> float | None:
    """Bytes that the first device offers, where it tells."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit")


def prefill(case: Case, params: Any) -> Callable[[], Any]:
    """Tower, prompt and last logits of every prompt; waits for the logits."""
    config = case.shape.config
    images, prompt = jax.device_put((ours.image_arrays(case), ours.prompt_arrays(case)))

    @jax.jit
    def run(params, images, prompt):
        features = qwen.encode_images(params, config, images)
        hidden, kv = qwen.prefill(params, config, prompt, features)
        last = qwen.last_hidden(hidden, prompt.lengths)
        return qwen.logits(params, config, last), kv

    return lambda: jax.block_until_ready(run(params, images, prompt))


def prefill_flops(shape: Shape) -> int:
    """Of `prefill`, over all prompts."""
    pages = shape.pages * counts.tower_flops(shape.vision, shape.page)
    return shape.prompts * (pages + counts.prefill_flops(shape.text, shape.prompt))


def rollout(case: Case, params: Any, *, repeated: bool = False) -> Callable[[], Any]:
    """G responses of every prompt. `repeated`: each from its own copy of prompt and pages."""
    shape = case.shape
    copies = shape.group if repeated else 1
    engine = ours.make_engine(case, params, prompts=shape.prompts * copies)
    requests = ours.make_requests(case)
    if repeated:
        requests = [replace(r, id=f"{r.id}, copy {g}") for r in requests for g in range(copies)]
    how = ours.sampling(shape, greedy=False)

    def run() -> dict[str, float]:
        engine.generate(requests, how, group=shape.group // copies)
        return dict(engine.times)

    return run


def update(shape: Shape, plan: TrainPlan) -> ours.Update:
    """The update on given responses, bf16 products."""
    case, responses = make_case(shape, None), make_responses(shape)
    batch = ours.make_batch(case, responses.tokens, responses.rewards, responses.masks)
    settings = ours.rl_settings(shape, compute="bfloat16", optim=plan.optim)
    run = ours.Update(case, batch, settings=settings, dtype=plan.dtype)
    run.start(random_params(shape, plan.dtype))
    return run


def update_flops(shape: Shape, plan: TrainPlan) -> int:
    """Of `update`: the frozen tower forward, the decoder forward and backward."""
    pages = shape.pages * counts.tower_flops(shape.vision, shape.page)
    group = counts.update_flops(
        shape.text, shape.prompt, shape.group, shape.response, trained=plan.trained
    )
    return shape.prompts * (pages + group)


class Clock:
    """The run's budget: sections that come too late are left out by name."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()
