"""The SFT update: the sum of -log p over response tokens, divided once by their number.

    state, batch ─nll_sum, slice by slice─► Σ -log p, Σ tokens ─÷─► gradient ─optimiser─► state'

A response's trained tokens are its own and its one end token, never a token of the prompt. A batch
with no trained token is no update: loss 0, everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.accumulate import accumulate, slice_size, sum_over
from evisrag_jax.training.forward import GroupBatch, response_mask, score_responses
from evisrag_jax.training.optimiser import (
    OptimConfig,
    gradient_norms,
    learning_rate,
    make_optimiser,
    skipped_updates,
)
from evisrag_jax.training.state import Flat, TrainState, forward_params

Sums = dict[str, Float[Array, ""]]


@dataclass(frozen=True)
class UpdateConfig:
    """Static settings of an update.

    micro: prompts a slice on each device, 0 for all at once.  compute: dtype of products.  remat: what
    the backward pass computes again (`models.remat`).  chunk: response positions whose logits are held at
    once.  lora: adapters.
    """

    optim: OptimConfig
    micro: int
    compute: str = "float32"
    remat: str = "full"
    chunk: int = 2048
    lora: LoraConfig = LoraConfig()


def nll_sum(
    trainable: Flat,
    rows: GroupBatch,
    frozen: Flat,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
) -> tuple[Float[Array, ""], Sums]:
    """Σ -log p over the trained tokens of a slice, in nats; aux {"weight": tokens, "entropy": Σ}.

    Differentiable in `trainable`; nothing is divided.
    """
    params = forward_params(trainable, frozen, settings.lora, jnp.dtype(settings.compute))
    scores = score_responses(
        params,
        model,
        rows,
        train_vision=any(path.startswith("vision/") for path in trainable),
        remat=settings.remat,
        chunk=settings.chunk,
    )
    mask = response_mask(rows.lengths, rows.tokens.shape[-1])
    total = -jnp.sum(jnp.where(mask > 0, scores.logp, 0.0))
    entropy = jnp.sum(jnp.where(mask > 0, jax.lax.stop_gradient(scores.entropy), 0.0))
    return total, {"weight": jnp.sum(mask), "entropy": entropy}


def sft_gradient(
    state: TrainState,
    batch: GroupBatch,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    *,
    shardings: Any = None,
) -> tuple[Flat, Float[Array, ""], Sums]:
    """Gradient and mean of -log p over all trained tokens of the batch, and the sums behind them."""

    def objective(trainable: Flat, rows: GroupBatch) -> tuple[Float[Array, ""], Sums]:
        return nll_sum(trainable, rows, state.frozen, model, settings)

    grads, total, sums = accumulate(
        objective,
        state.trainable,
        batch,
        slice_size(batch.tokens.shape[0], settings.micro),
        shardings=shardings,
    )
    weight = jnp.maximum(sums["weight"], 1.0)
    return jax.tree.map(lambda g: g / weight, grads), total / weight, sums


def sft_update(
    state: TrainState,
    batch: GroupBatch,
    *,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    shardings: Any = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step. A batch without a trained token changes nothing, not even the counters."""
    grads, loss, sums = sft_gradient(state, batch, model, settings, shardings=shardings)
    rate = learning_rate(settings.optim, state.opt_state)
    updates, opt_state = make_optimiser(settings.optim).update(
        grads, state.opt_state, state.trainable
    )
    trainable = optax.apply_updates(state.trainable, updates)
    after = TrainState(state.step + 1, trainable, {}, opt_state)
    before = state._replace(frozen={})
    some = sums["weight"] > 0
    after = jax.tree.map(lambda new, old: jnp.where(some, new, old), after, before)
    metrics = {
        "loss/total": loss,
        "loss/tokens": sums["weight"],
        "loss/entropy": sums["entropy"] / jnp.maximum(sums["weight"], 1.0),
        **gradient_norms(grads),
        "loss/empty": 1.0 - some.astype(jnp.float32),
        "lr": rate,
        **skipped_updates(after.opt_state),
    }
    return after._replace(frozen=state.frozen), metrics


def sft_loss(
    trainable: Flat,
    frozen: Flat,
    batch: GroupBatch,
    *,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
) -> Sums:
    """Sums over one batch, without a gradient: {"nll", "weight", "entropy"}."""

    def one(rows: GroupBatch) -> Sums:
        total, sums = nll_sum(trainable, rows, frozen, model, settings)
        return {"nll": total, **sums}

    return sum_over(one, batch, slice_size(batch.tokens.shape[0], settings.micro))


def compile_update(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
) -> Callable[[TrainState, GroupBatch], tuple[TrainState, dict[str, Array]]]:
    """`sft_update` under jit: explicit shardings in and out, the state donated."""
    update = partial(sft_update, model=model, settings=settings, shardings=shardings.trainable)
    return jax.jit(
        meshes.traced_on(mesh, update),
        in_shardings=(shardings, meshes.batch_sharding(mesh)),
        out_shardings=(shardings, meshes.replicated(mesh)),
        donate_argnums=0,
    )


def compile_loss(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
) -> Callable[[Flat, Flat, GroupBatch], Sums]:
    """`sft_loss` under jit, with the shardings of the update."""
    return jax.jit(
        meshes.traced_on(mesh, partial(sft_loss, model=model, settings=settings)),
        in_shardings=(shardings.trainable, shardings.frozen, meshes.batch_sharding(mesh)),
        out_shardings=meshes.replicated(mesh),
    )
