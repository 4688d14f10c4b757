"""The clipped policy loss of one group with channel masks, and how groups are put together.

A loss is a pair (sum, weight) a channel. Pairs of prompts, micro-batches and devices are added, and
divided once, by weights that are known from the masks before the first backward pass:

    L_c  = sum_m S_c[m] / N_c           N_c = sum_m n_c[m]: all tokens of channel c
    loss = sum_c L_c / K                K: `channel_divisor`

so no split of the batch changes a gradient. The released divisor, which counts the channels with a
non-zero loss in each micro-batch, depends on the split and exists as `divisor_scope="micro"`.

A split accumulated step by step: N = channel_totals(masks); gradients of objective(S[m], N) are
added over m, and divided at the end by channel_divisor(sum_m S[m]): the gradient of `combine`.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from evisrag_jax.rl.kl import kl_kind, kl_penalty

_CHOICES = {
    "channel_divisor": ("nonzero_count", "n_channels", "none"),
    "divisor_scope": ("global", "micro"),
    "average": ("token_batch", "token_group"),
    "nan_policy": ("safe_zero", "code"),
    "kl_placement": ("response", "channels"),
}


@dataclass(frozen=True)
class PolicyLossConfig:
    """Static choices of the policy loss.

    clip_low, clip_high  the ratio is clipped to [1 - clip_low, 1 + clip_high]
    dual_clip            c of the dual clip (bound c|A| for A < 0), or None; absent from the paper
    log_ratio_limit      log-ratios are cut to +- this before exp
    channel_divisor      K: "nonzero_count" (channels with a non-zero loss), "n_channels" or "none"
    divisor_scope        K counted over the whole batch ("global") or in each micro-batch ("micro")
    average              "token_batch": one mean over all tokens of a channel (DAPO);
                         "token_group": the mean over groups of each group's token mean (eq. 10)
    nan_policy           "safe_zero": a channel without tokens, or a batch without any non-zero
                         channel, contributes exactly 0; "code": 0/0 there gives NaN, as released
    kl_coef, kl          weight and kind (`kl.KINDS`) of a penalty against a reference; 0 = none
    kl_placement         "response": its mean over response tokens, added once (averaged like the
                         policy term, outside K); "channels": its mean over the group's channel
                         tokens, added to every channel (released; there defined for one row only)
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    log_ratio_limit: float = 20.0
    channel_divisor: str = "none"
    divisor_scope: str = "global"
    average: str = "token_batch"
    nan_policy: str = "safe_zero"
    kl_coef: float = 0.0
    kl: str = field(default="low_var_kl")
    kl_placement: str = "response"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}; one of {', '.join(choices)}")
        if not (0 < self.clip_low < 1 and self.clip_high > 0 and self.log_ratio_limit > 0):
            raise ValueError("0 < clip_low < 1, clip_high > 0 and log_ratio_limit > 0 are needed")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip}; greater than 1, or None")
        if self.kl_coef < 0 or kl_kind(self.kl) == "full":
            raise ValueError("kl_coef must not be negative; kl=full needs whole distributions")

    @classmethod
    def paper(cls, **changes) -> "PolicyLossConfig":
        """EVisRAG eq. 10: asymmetric clip, no dual clip, token mean, one channel of advantages."""
        return cls(**changes)

    @classmethod
    def code(cls, **changes) -> "PolicyLossConfig":
        """The released loss: dual clip 3, divisor by non-zero channels of each micro-batch, NaN."""
        released = {
            "dual_clip": 3.0,
            "channel_divisor": "nonzero_count",
            "divisor_scope": "micro",
            "nan_policy": "code",
            "kl_placement": "channels",
        }
        return cls(**{**released, **changes})


class LossTerms(NamedTuple):
    """Sums and weights that add up over prompts, micro-batches and devices.

    sum, weight  [..., C]: numerator and denominator of each channel
    metrics      name -> (sum, weight), each [...]: ppo_kl, entropy, clipfrac_higher,
                 clipfrac_lower, and kl with a reference. "kl" carries gradients.
    """

    sum: Float[Array, "..."]
    weight: Float[Array, "..."]
    metrics: dict[str, tuple[Float[Array, "..."], Float[Array, "..."]]]


class Combined(NamedTuple):
    """A divided loss: `loss` (scalar), `micro` [M] its parts, `channels` [C] before the divisor."""

    loss: Float[Array, ""]
    micro: Float[Array, " M"]
    channels: Float[Array, " C"]


def policy_loss(
    logp: Float[Array, "G T"],
    old: Float[Array, "G T"],
    adv: Float[Array, "G C T"],
    mask: Bool[Array, "G C T"],
    cfg: PolicyLossConfig,
    *,
    response_mask: Bool[Array, "G T"] | None = None,
    ref: Float[Array, "G T"] | None = None,
) -> LossTerms:
    """Clipped loss of one group, as (sum, weight) a channel.

        d = clip(logp - old)   r = exp(d)   a = adv * mask
        loss = max(-a r, -a clip(r)), for a < 0 at most -a dual_clip

    Args:
      logp: log-probs of the sampled tokens under the policy being trained.
      old: the same under the policy that made them (constant).
      adv: advantage of each token in each channel (`advantages.to_tokens`, or [G, 1, T]).
      mask: tokens of each channel. A response left out has no token here: it then is in neither
        the sums nor the weights.
      response_mask: tokens for the token-mean metrics and the KL; None = those of any channel.
      ref: log-probs under the reference policy; required when `cfg.kl_coef` is not 0.

    Values at unmasked tokens may be anything, infinities included.
    """
    tokens = jnp.any(mask, axis=1) if response_mask is None else response_mask
    used = tokens | jnp.any(mask, axis=1)
    logp = jnp.where(used, logp.astype(jnp.float32), 0.0)
    old = jnp.where(used, jax.lax.stop_gradient(old).astype(jnp.float32), 0.0)
    weight = jnp.sum(mask, (0, 2), dtype=jnp.float32)

    d = jnp.clip(logp - old, -cfg.log_ratio_limit, cfg.log_ratio_limit)
    clipped = jnp.clip(d, jnp.log1p(-cfg.clip_low), jnp.log1p(cfg.clip_high))
    a = jax.lax.stop_gradient(jnp.where(mask, adv.astype(jnp.float32), 0.0))
    plain, bounded = -a * jnp.exp(d)[:, None], -a * jnp.exp(clipped)[:, None]
    loss = jnp.maximum(plain, bounded)
    metrics = {
        "ppo_kl": _total(-d, tokens),
        "entropy": _total(-logp, tokens),
        "clipfrac_higher": _total((plain < bounded).astype(jnp.float32), mask),
        "clipfrac_lower": (jnp.zeros(()), jnp.sum(mask, dtype=jnp.float32)),
    }
    if cfg.dual_clip is not None:
        limit = -a * cfg.dual_clip
        metrics["clipfrac_lower"] = _total(((loss > limit) & (a < 0)).astype(jnp.float32), mask)
        loss = jnp.where(a < 0, jnp.minimum(loss, limit), loss)
    total = jnp.sum(loss * mask, (0, 2))
    metrics = jax.lax.stop_gradient(metrics)

    if cfg.kl_coef and ref is None:
        raise ValueError(f"kl_coef={cfg.kl_coef} needs the reference log-probs")
    if ref is not None:
        ref = jnp.where(used, jax.lax.stop_gradient(ref).astype(jnp.float32), 0.0)
        penalty = kl_penalty(logp, ref, cfg.kl)
        in_channels = cfg.kl_placement == "channels"
        kl = _total(jnp.broadcast_to(penalty[:, None], mask.shape) if in_channels else penalty,
                    mask if in_channels else tokens)  # fmt: skip
        if in_channels:
            total += cfg.kl_coef * weight * kl[0] / jnp.maximum(kl[1], 1.0)
        elif cfg.average == "token_group":
            kl = _token_mean(*kl)
        metrics["kl"] = kl
    if cfg.average == "token_group":
        total, weight = _token_mean(total, weight)
    return LossTerms(total, weight, metrics)


def batch_policy_loss(
    logp: Float[Array, "P G T"],
    old: Float[Array, "P G T"],
    adv: Float[Array, "P G C T"],
    mask: Bool[Array, "P G C T"],
    cfg: PolicyLossConfig,
    *,
    response_mask: Bool[Array, "P G T"] | None = None,
    ref: Float[Array, "P G T"] | None = None,
) -> LossTerms:
    """`policy_loss` over prompts: sums and weights [P, C], metrics pairs of [P]."""
    one = partial(policy_loss, cfg=cfg)
    return jax.vmap(lambda a, b, c, d, e, f: one(a, b, c, d, response_mask=e, ref=f))(
        logp, old, adv, mask, response_mask, ref
    )


def channel_totals(mask: Bool[Array, "P G C T"], cfg: PolicyLossConfig) -> Float[Array, " C"]:
    """N_c, the weights of a whole batch, from its masks alone: tokens, or groups with any token."""
    count = jnp.sum(mask, (1, 3), dtype=jnp.float32)
    return jnp.sum(count > 0 if cfg.average == "token_group" else count, 0, dtype=jnp.float32)


def objective(
    sums: Float[Array, "*M C"], totals: Float[Array, " C"], cfg: PolicyLossConfig
) -> Float[Array, "*M"]:
    """sum_c S_c / N_c: a part's share of the loss, before the divisor K.

    A channel with N_c = 0 adds exactly 0; under nan_policy "code" it turns value and gradient to NaN.
    """
    share = jnp.sum(_divide(sums, totals), -1)
    if cfg.nan_policy == "code":  # a factor, since XLA may drop the 0 * inf of a plain 0 / 0
        share *= jnp.where(jnp.all(totals > 0), 1.0, jnp.nan)
    return share


def channel_divisor(sums: Float[Array, "*M C"], cfg: PolicyLossConfig) -> Float[Array, "*M"]:
    """K of each row of sums, a constant for differentiation.

    At least 1, except that "nonzero_count" of no channel is NaN under nan_policy "code".
    """
    match cfg.channel_divisor:
        case "none":
            return jnp.ones(sums.shape[:-1], jnp.float32)
        case "n_channels":
            return jnp.full(sums.shape[:-1], sums.shape[-1], jnp.float32)
    count = jnp.sum(jax.lax.stop_gradient(sums) != 0, -1, dtype=jnp.float32)
    return jnp.where(count > 0, count, jnp.nan if cfg.nan_policy == "code" else 1.0)


def combine(
    sums: Float[Array, "M C"],
    weights: Float[Array, "M C"],
    cfg: PolicyLossConfig,
    *,
    totals: Float[Array, " C"] | None = None,
    kl: tuple[Float[Array, " M"], Float[Array, " M"]] | None = None,
) -> Combined:
    """One division for a whole batch.

    Args:
      sums, weights: pairs of the parts m: prompts, or micro-batches, whose split matters under
        `divisor_scope="micro"` only.
      totals: N_c when more parts exist elsewhere (other devices); None = the sum of `weights`.
        A global K is counted over the parts given here.
      kl: the "kl" pair of the metrics; added as kl_coef times its mean for placement "response".

    Returns the loss, its parts (they add up to the loss), and the mean of each channel.
    """
    totals = jnp.sum(weights, 0) if totals is None else totals
    share = objective(sums, totals, cfg)
    rows = sums if cfg.divisor_scope == "micro" else jnp.sum(sums, 0, keepdims=True)
    micro = share / channel_divisor(rows, cfg)
    if kl is not None and cfg.kl_coef and cfg.kl_placement == "response":
        micro += cfg.kl_coef * _divide(kl[0], jnp.sum(kl[1]))
    channels = _divide(jnp.sum(sums, 0), totals)
    return Combined(jnp.sum(micro), micro, channels)


def metric_means(
    metrics: dict[str, tuple[Float[Array, "..."], Float[Array, "..."]]],
) -> dict[str, Float[Array, ""]]:
    """Each metric's sum over its weight, 0 where nothing was counted."""
    return {
        name: _divide(jnp.sum(total), jnp.sum(weight)) for name, (total, weight) in metrics.items()
    }


def average_loss(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], average: str = "token"
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, weight) of a masked mean: over tokens ("token"), or over rows' means ("seq").

    A row without tokens is in neither part.
    """
    if average not in ("token", "seq"):
        raise ValueError(f"average={average!r}; token or seq")
    if average == "token":
        return _total(values, mask)
    total, weight = jax.vmap(_total)(values, mask)
    means, counted = _token_mean(total, weight)
    return jnp.sum(means), jnp.sum(counted)


def _total(values: Array, mask: Array) -> tuple[Array, Array]:
    """Masked sum and number of masked entries."""
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32)


def _token_mean(total: Array, weight: Array) -> tuple[Array, Array]:
    """(mean, 1) where there is weight, (0, 0) where there is none."""
    return _divide(total, weight), (weight > 0).astype(jnp.float32)


def _divide(total: Array, weight: Array) -> Array:
    """total / weight; 0 with gradient 0 where weight is 0."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)
