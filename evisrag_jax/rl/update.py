"""The RL update on the device: advantages from rewards, and one optimiser step of the policy loss.

    rewards [P, G, C], masks [P, G, C, T] ─advantages─► adv, mask [P, G, Z, T]   Z = 1 but for "code"
    RLBatch ─rl_update: score_responses, policy loss, accumulate, optimiser─► state, metrics

Sums are divided once, by weights known from the masks before the first backward pass, so slices and
devices never change a gradient (`rl.combine`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, UInt32

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.pages.patches import ImageArrays
from evisrag_jax.rl import advantages as adv
from evisrag_jax.rl import combine, losses
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.kl import kl_penalty
from evisrag_jax.rl.masked import dependency, focus
from evisrag_jax.rl.passes import UpdateConfig, blackened, score
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.accumulate import accumulate, slice_size
from evisrag_jax.training.forward import GroupBatch, TokenScores, response_mask
from evisrag_jax.training.optimiser import (
    gradient_norms,
    learning_rate,
    make_optimiser,
    skipped_updates,
)
from evisrag_jax.training.state import Flat, TrainState


class RLBatch(NamedTuple):
    """What one update reads.

    groups   prompts, pages and sampled ids
    sampled  the engine's own log-probs of them: the gap to the trainer, its correction, and the policy
             that `stale` rows came from
    old      log-probs under the policy before the first of several updates; None when there is
             one update a rollout, whose ratio is 1 by construction
    rewards  channel values
    masks    tokens of each channel (`rl.scopes`)
    valid    responses that exist: a group's baseline is taken over them
    trained  those of them whose tokens are in the loss
    stale    prompts that an earlier policy answered (surplus of dynamic sampling)
    ref      log-probs under the reference
    masked   log-probs behind blackened pages, where they have no gradient
    pages    what is blackened, where `groups` hold features;  salts  of the draw, a number a prompt
    """

    groups: GroupBatch
    sampled: Float[Array, "P G T"]
    old: Float[Array, "P G T"] | None
    rewards: Float[Array, "P G C"]
    masks: Bool[Array, "P G C T"]
    valid: Bool[Array, "P G"]
    trained: Bool[Array, "P G"]
    stale: Bool[Array, " P"]
    ref: Float[Array, "P G T"] | None = None
    masked: Float[Array, "P G T"] | None = None
    pages: ImageArrays | None = None
    salts: UInt32[Array, " P"] | None = None


def trained_mask(batch: RLBatch) -> Bool[Array, "P G T"]:
    """Tokens whose log-probs the loss reads."""
    tokens = response_mask(batch.groups.lengths, batch.groups.tokens.shape[-1]) > 0
    return tokens & (batch.valid & batch.trained)[..., None]


def token_advantages(
    batch: RLBatch, rl: RLConfig
) -> tuple[Float[Array, "P G Z T"], Bool[Array, "P G Z T"]]:
    """Advantages on tokens and the channel masks of the loss: Z = C for code, else 1.

    Baselines are taken over `valid` responses, masks hold tokens of `trained` ones alone.
    """
    rewards, valid, response = batch.rewards, batch.valid, trained_mask(batch)
    names, paid = rl.reward.channels, rl.reward.paid
    counted = jnp.array([name in paid for name in names])
    rewards = jnp.where(counted, rewards, 0.0)
    options = {"exact_zero": rl.exact_zero, "scale": rl.scale}
    penalty = _reward_penalty(batch, rl)
    if rl.estimator in ("code", "paper") and penalty is not None:
        own = jnp.einsum("PGT,PGCT->PGC", penalty, (batch.masks & response[:, :, None]) * 1.0)
        rewards -= jnp.where(counted, own, 0.0)
    if rl.estimator == "code":
        values = adv.code_advantages(rewards, valid, **options)
        masks = batch.masks & response[:, :, None] & counted[:, None]
        return adv.to_tokens(values, masks), masks
    if rl.estimator == "paper":
        values = adv.paper_advantages(
            rewards,
            batch.masks,
            valid,
            channels=names,
            paid=paid,
            align=rl.align,
            scoped=rl.scoped,
            **options,
        )
    else:
        if penalty is not None:
            rewards = jnp.concatenate([rewards, -jnp.sum(penalty, -1, keepdims=True)], -1)
        if rl.estimator == "rloo":
            whole = adv.rloo_advantages(rewards, valid)
        else:
            whole = adv.grpo_advantages(rewards, valid, **options)
        values = jnp.broadcast_to(whole[..., None], response.shape)
    return jnp.where(response, values, 0.0)[:, :, None], response[:, :, None]


def _reward_penalty(batch: RLBatch, rl: RLConfig) -> Float[Array, "P G T"] | None:
    """The KL of each token that is taken from rewards, its coefficient inside."""
    if not rl.loss.kl_coef or rl.loss.kl_placement != "reward":
        return None
    kl = kl_penalty(batch.old, batch.ref, rl.loss.kl)
    return rl.loss.kl_coef * jnp.where(trained_mask(batch), kl, 0.0)


def rl_gradient(
    state: TrainState,
    batch: RLBatch,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    *,
    shardings: Any = None,
) -> tuple[Flat, dict[str, Array]]:
    """Gradient of the divided loss for the trainable parameters, and the step's metrics."""
    values, masks = token_advantages(batch, settings.rl)
    return advantage_gradient(state, batch, values, masks, model, settings, shardings=shardings)


def advantage_gradient(
    state: TrainState,
    batch: RLBatch,
    values: Float[Array, "P G Z T"],
    masks: Bool[Array, "P G Z T"],
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    *,
    shardings: Any = None,
) -> tuple[Flat, dict[str, Array]]:
    """The same for given advantages on the tokens of given masks."""
    rl, P = settings.rl, batch.groups.tokens.shape[0]
    response = trained_mask(batch)
    if rl.masked.focused:
        v = dependency(batch.old, batch.masked)
        values, masks = focus(values, masks, v, response, rl.masked)
    totals = combine.channel_totals(masks, rl.loss, response)
    (count,) = combine.channel_totals(response[:, :, None], rl.loss, response)

    def objective(trainable, rows):
        index, part, values, masks, response = rows
        scores = score(trainable, state.frozen, part.groups, model, settings)
        before = jax.lax.stop_gradient(scores.logp) if part.old is None else part.old
        gap = jnp.where(response, jnp.abs(before - part.sampled), 0.0)
        gap = jnp.where(part.stale[:, None, None], 0.0, gap)  # another policy, not another program
        if rl.loss.correction != "none":
            weights = losses.sampler_weights(before, part.sampled, response, rl.loss)
            weights = jnp.where(part.stale[:, None, None], 1.0, weights)
            values = values * weights[:, :, None]
        before = jnp.where(part.stale[:, None, None], part.sampled, before)
        extra, more = penalties(trainable, state.frozen, part, scores, response, model, settings)
        terms = losses.batch_policy_loss(
            scores.logp,
            before,
            values,
            masks,
            rl.loss,
            response_mask=response,
            ref=part.ref,
            extra=extra,
        )
        sums = jnp.sum(terms.sum, 0)
        share = combine.objective(sums, totals, rl.loss)
        if not late:
            share = share / combine.channel_divisor(sums, rl.loss)
        share += losses.divide(jnp.sum(terms.penalty[0]), count)
        kept = {
            "sums": sums,
            "more": {name: losses.masked_sum(value, response)[0] for name, value in more.items()},
            "gap": jnp.sum(gap),
            # Slices are added up, so each prompt's largest gap goes to its own place.
            "gap_max": jnp.zeros(P).at[index].set(jnp.max(gap, (1, 2))),
            "metrics": jax.tree.map(jnp.sum, terms.metrics),
        }
        return share, kept

    # A count over the whole batch is known after its last slice; no penalty is added then (RLConfig).
    late = rl.loss.divisor_scope == "global" and rl.loss.channel_divisor == "nonzero_count"
    slices = (jnp.arange(P), batch, values, masks, response)
    grads, loss, kept = accumulate(
        objective, state.trainable, slices, slice_size(P, rl.micro), shardings=shardings
    )
    if late:
        divisor = combine.channel_divisor(kept["sums"], rl.loss)
        grads, loss = jax.tree.map(lambda g: g / divisor, grads), loss / divisor
    tokens = jnp.maximum(jnp.sum(response), 1)
    fresh = jnp.maximum(jnp.sum(response & ~batch.stale[:, None, None]), 1)
    means = combine.metric_means(kept["metrics"])
    metrics = {
        "loss/total": loss,
        **gradient_norms(grads),
        **{name: value / tokens for name, value in kept["more"].items()},
        "rollout/logp_gap_mean": kept["gap"] / fresh,
        "rollout/logp_gap_max": jnp.max(kept["gap_max"]),
        "rollout/trained_tokens": jnp.sum(response),
        **{f"loss/{name}": value for name, value in means.items() if name != "entropy"},
    }
    return grads, metrics


def penalties(
    trainable: Flat,
    frozen: Flat,
    part: RLBatch,
    scores: TokenScores,
    response: Bool[Array, "P G T"],
    model: Qwen25VLConfig,
    settings: UpdateConfig,
) -> tuple[Float[Array, "P G T"] | None, dict[str, Float[Array, "P G T"]]]:
    """What is added to the loss a token beside the policy term and the KL, and metrics a token."""
    rl, stop = settings.rl, jax.lax.stop_gradient
    logp = jnp.where(response, scores.logp, 0.0)
    metrics = {"loss/entropy": stop(scores.entropy)}
    extra = None
    if rl.loss.entropy_coef:
        entropy = scores.entropy if rl.loss.entropy == "exact" else -logp
        extra = -rl.loss.entropy_coef * entropy
    if rl.masked.active:
        masked = part.masked
        if rl.masked.gradient:
            hidden = blackened(part.groups, part.pages, part.salts, settings)
            masked = score(trainable, frozen, hidden, model, settings).logp
        masked = jnp.where(response, masked, 0.0)
        v = dependency(logp, masked)
        metrics |= {"masked/dependency": stop(v), "masked/logp": stop(masked)}
        if rl.masked.coef or rl.masked.entropy_coef:
            added = -rl.masked.coef * v - rl.masked.entropy_coef * masked
            extra = added if extra is None else extra + added
    return extra, metrics


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
