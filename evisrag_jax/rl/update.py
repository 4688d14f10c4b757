"""The RL update on the device: advantages from rewards, and one optimiser step of the policy loss.

    rewards [P, G, C], masks [P, G, C, T] ─advantages─► adv, mask [P, G, C', T]   C' = 1 but for "code"
    RLBatch ─rl_update: score_responses, policy loss, accumulate, optimiser─► state, metrics

Sums are divided once, by weights known from the masks before the first backward pass, so slices and
devices never change a gradient (`rl.losses`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from evisrag_jax.models.lora import LoraConfig, merged_shardings
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.rl import advantages as adv
from evisrag_jax.rl import losses
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.accumulate import accumulate, slice_size
from evisrag_jax.training.forward import (
    GroupBatch,
    TokenScores,
    response_mask,
    score_responses,
)
from evisrag_jax.training.layout import SamplingLayout
from evisrag_jax.training.optimiser import (
    gradient_norms,
    learning_rate,
    make_optimiser,
    skipped_updates,
)
from evisrag_jax.training.state import Flat, TrainState, forward_params, full_params, merged_params


@dataclass(frozen=True)
class UpdateConfig:
    """Static settings of an update beside the objective: dtype of products, what the backward pass
    computes again (`models.remat`), response positions whose logits are held at once, and adapters."""

    rl: RLConfig
    compute: str = "float32"
    remat: str = "full"
    chunk: int = 2048
    lora: LoraConfig = LoraConfig()


class RLBatch(NamedTuple):
    """What one update reads.

    groups   prompts, pages and sampled ids
    sampled  the engine's own log-probs of them, for the sampler/trainer gap only
    old      log-probs under the policy before the first of several updates; None when there is
             one update a rollout, whose ratio is 1 by construction
    rewards  channel values
    masks    tokens of each channel (`rl.scopes`)
    valid    responses that exist: a group's baseline is taken over them
    trained  those of them whose tokens are in the loss
    """

    groups: GroupBatch
    sampled: Float[Array, "P G T"]
    old: Float[Array, "P G T"] | None
    rewards: Float[Array, "P G C"]
    masks: Bool[Array, "P G C T"]
    valid: Bool[Array, "P G"]
    trained: Bool[Array, "P G"]


def trained_mask(batch: RLBatch) -> Bool[Array, "P G T"]:
    """Tokens whose log-probs the loss reads."""
    tokens = response_mask(batch.groups.lengths, batch.groups.tokens.shape[-1]) > 0
    return tokens & (batch.valid & batch.trained)[..., None]


def token_advantages(
    batch: RLBatch, rl: RLConfig
) -> tuple[Float[Array, "P G Z T"], Bool[Array, "P G Z T"]]:
    """Advantages on tokens and the channel masks of the loss: Z = C for code, 1 for paper and grpo.

    Baselines are taken over `valid` responses, masks hold tokens of `trained` ones alone.
    """
    rewards, valid, response = batch.rewards, batch.valid, trained_mask(batch)
    if rl.estimator == "code":
        values = adv.code_advantages(rewards, valid, exact_zero=rl.exact_zero)
        masks = batch.masks & response[:, :, None]
        return adv.to_tokens(values, masks), masks
    if rl.estimator == "paper":
        values = adv.paper_advantages(
            rewards, batch.masks, valid, align=rl.align, exact_zero=rl.exact_zero
        )
    else:
        whole = adv.grpo_advantages(rewards, valid, exact_zero=rl.exact_zero)
        values = jnp.broadcast_to(whole[..., None], response.shape)
    return jnp.where(response, values, 0.0)[:, :, None], response[:, :, None]


def score(
    trainable: Flat, frozen: Flat, groups: GroupBatch, model: Qwen25VLConfig, settings: UpdateConfig
) -> TokenScores:
    """Scores of the sampled tokens at the sampling temperature: old and new by one function."""
    return score_responses(
        forward_params(trainable, frozen, settings.lora, jnp.dtype(settings.compute)),
        model,
        groups,
        temperature=settings.rl.temperature,
        train_vision=any(path.startswith("vision/") for path in trainable),
        remat=settings.remat,
        chunk=settings.chunk,
    )


def rl_gradient(
    state: TrainState,
    batch: RLBatch,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    *,
    shardings: Any = None,
) -> tuple[Flat, dict[str, Array]]:
    """Gradient of the divided loss for the trainable parameters, and the step's metrics."""
    rl, P = settings.rl, batch.groups.tokens.shape[0]
    response = trained_mask(batch)
    values, masks = token_advantages(batch, rl)
    totals = losses.channel_totals(masks, rl.loss)

    def objective(trainable, rows):
        index, part, old, values, masks, response, sampled = rows
        scores = score(trainable, state.frozen, part, model, settings)
        before = jax.lax.stop_gradient(scores.logp) if old is None else old
        terms = losses.batch_policy_loss(
            scores.logp,
            before,
            values,
            masks,
            rl.loss,
            response_mask=response,
        )
        sums = jnp.sum(terms.sum, 0)
        share = losses.objective(sums, totals, rl.loss)
        if rl.loss.divisor_scope == "micro":
            share = share / losses.channel_divisor(sums, rl.loss)
        gap = jnp.where(response, jnp.abs(before - sampled), 0.0)
        entropy = jnp.where(response, jax.lax.stop_gradient(scores.entropy), 0.0)
        kept = {
            "sums": sums,
            "entropy": jnp.sum(entropy),
            "gap": jnp.sum(gap),
            # Slices are added up, so each prompt's largest gap goes to its own place.
            "gap_max": jnp.zeros(P).at[index].set(jnp.max(gap, (1, 2))),
            "metrics": jax.tree.map(jnp.sum, terms.metrics),
        }
        return share, kept

    slices = (jnp.arange(P), batch.groups, batch.old, values, masks, response, batch.sampled)
    grads, loss, kept = accumulate(
        objective, state.trainable, slices, slice_size(P, rl.micro), shardings=shardings
    )
    if rl.loss.divisor_scope == "global":
        divisor = losses.channel_divisor(kept["sums"], rl.loss)
        grads, loss = jax.tree.map(lambda g: g / divisor, grads), loss / divisor
    tokens = jnp.maximum(jnp.sum(response), 1)
    means = losses.metric_means(kept["metrics"])
    metrics = {
        "loss/total": loss,
        **gradient_norms(grads),
        "loss/entropy": kept["entropy"] / tokens,
        "rollout/logp_gap_mean": kept["gap"] / tokens,
        "rollout/logp_gap_max": jnp.max(kept["gap_max"]),
        "rollout/trained_tokens": jnp.sum(response),
        **{f"loss/{name}": value for name, value in means.items() if name != "entropy"},
    }
    return grads, metrics


def rl_update(
    state: TrainState,
    batch: RLBatch,
    *,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    shardings: Any = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step. A gradient of exactly zero, or one that is not finite, moves nothing."""
    grads, metrics = rl_gradient(state, batch, model, settings, shardings=shardings)
    optim = settings.rl.optim
    rate = learning_rate(optim, state.opt_state)
    updates, opt_state = make_optimiser(optim).update(grads, state.opt_state, state.trainable)
    trainable = optax.apply_updates(state.trainable, updates)
    metrics = metrics | {"lr": rate} | skipped_updates(opt_state)
    return TrainState(state.step + 1, trainable, state.frozen, opt_state), metrics


def old_log_probs(
    trainable: Flat,
    frozen: Flat,
    groups: GroupBatch,
    *,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
) -> Float[Array, "P G T"]:
    """Log-probs before the first of several updates, a slice of prompts at a time."""
    P = groups.tokens.shape[0]
    size = slice_size(P, settings.rl.micro)
    if size == P:
        return score(trainable, frozen, groups, model, settings).logp
    cut = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]).swapaxes(0, 1), groups)
    logp = jax.lax.map(lambda rows: score(trainable, frozen, rows, model, settings).logp, cut)
    return logp.swapaxes(0, 1).reshape(groups.tokens.shape)


def compute_params(trainable: Flat, frozen: Flat, *, settings: UpdateConfig) -> dict[str, Any]:
    """The model's nested parameters in the compute dtype, adapters merged: what the sampler computes
    with."""
    return merged_params(trainable, frozen, settings.lora, jnp.dtype(settings.compute))


def compile_update(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
):
    """`rl_update` under jit: explicit shardings in and out, the state donated."""
    update = partial(rl_update, model=model, settings=settings, shardings=shardings.trainable)
    return jax.jit(
        meshes.traced_on(mesh, update),
        in_shardings=(shardings, meshes.batch_sharding(mesh)),
        out_shardings=(shardings, meshes.replicated(mesh)),
        donate_argnums=0,
    )


def compile_old_log_probs(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
):
    """`old_log_probs` under jit, with the shardings of the update."""
    batch = meshes.batch_sharding(mesh)
    return jax.jit(
        meshes.traced_on(mesh, partial(old_log_probs, model=model, settings=settings)),
        in_shardings=(shardings.trainable, shardings.frozen, batch),
        out_shardings=batch,
    )


def compile_params(
    settings: UpdateConfig, shardings: TrainState, layout: SamplingLayout | None = None
):
    """`compute_params` under jit, in the sampler's layout. Where training has that layout, whole stacks,
    no adapters and every parameter the compute dtype, nothing is copied (the arrays are then the state's
    own, which the next update gives away). `.cast` is the jitted copy."""
    same = layout is None or layout.same
    whole = merged_shardings(full_params(shardings.trainable, shardings.frozen))
    cast = jax.jit(
        partial(compute_params, settings=settings),
        in_shardings=(shardings.trainable, shardings.frozen),
        out_shardings=whole if same else layout.wide,
    )

    def params(state: TrainState) -> dict[str, Any]:
        leaves = [*state.trainable.values(), *state.frozen.values()]
        plain = not (settings.lora.rank or state.trainable.keys() & state.frozen)
        ready = all(leaf.dtype == jnp.dtype(settings.compute) for leaf in leaves)
        if same and plain and ready:
            return full_params(state.trainable, state.frozen)
        copy = cast(state.trainable, state.frozen)
        return copy if same else layout.take(copy)

    params.cast = cast
    return params
