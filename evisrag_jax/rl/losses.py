"""The clipped policy loss of one group with channel masks: one objective, its members by switches.

    ratio            r of a token                                                   source
    token            exp(logp - old)                                                PPO, GRPO, DAPO
    sequence         exp(mean of logp - old over the response), the same on all     GSPO
    sequence_token   the same value, the gradient of the token's own log-prob       GSPO-token

    average          of the token losses of a channel                               source
    token_batch      one mean over all tokens                                       DAPO
    token_group      the mean over groups of each group's token mean                EVisRAG eq. 10
    sequence         the mean over responses of each response's token mean          GRPO, GSPO
    constant         their sum over (responses x T), T = max_tokens                 Dr.GRPO

A loss is a pair (sum, weight) a channel; `rl.combine` adds pairs up and divides them once.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from evisrag_jax.rl.kl import kl_kind, kl_penalty

_CHOICES = {
    "ratio": ("token", "sequence", "sequence_token"),
    "average": ("token_batch", "token_group", "sequence", "constant"),
    "channel_divisor": ("nonzero_count", "n_channels", "none"),
    "divisor_scope": ("global", "micro"),
    "nan_policy": ("safe_zero", "code"),
    "kl_placement": ("response", "channels", "reward"),
    "entropy": ("exact", "sampled"),
    "correction": ("none", "token", "sequence"),
}


@dataclass(frozen=True)
class PolicyLossConfig:
    """Static choices of the policy loss.

    clip_low, clip_high  the ratio is clipped to [1 - clip_low, 1 + clip_high]
    ratio, average       see above
    dual_clip            c of the dual clip (bound c|A| for A < 0), or None; absent from the paper
    log_ratio_limit      log-ratios are cut to +- this before exp
    channel_divisor      K: "nonzero_count" (channels with a non-zero loss), "n_channels" or "none"
    divisor_scope        K counted over the whole batch ("global") or in each micro-batch ("micro")
    nan_policy           "safe_zero": a channel without tokens, or a batch without any non-zero
                         channel, contributes exactly 0; "code": 0/0 there gives NaN, as released
    kl_coef, kl          weight and kind (`kl.KINDS`) of a penalty against a frozen reference; 0 = no
                         reference is held
    kl_placement         "response": its mean over response tokens, added once (averaged like the
                         policy term, outside K); "channels": its mean over the group's channel
                         tokens, added to every channel (released; there defined for one row only);
                         "reward": each channel's reward less its sum over the channel's tokens.
                         In the loss the gradient of k1 knows nothing of the reference: it is that of
                         logp, zero in expectation (known failure B56). k2 and k3 have one there
    entropy_coef         weight of an entropy bonus (negative: a penalty), averaged like the policy term
    entropy              "exact", of the whole distribution, or "sampled", -logp of the sampled tokens
    correction           weight of each token (or response) by min(p_trainer / p_sampler,
                         correction_cap): truncated importance sampling for samplers that compute
                         another distribution than the trainer
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio: str = "token"
    average: str = "token_batch"
    dual_clip: float | None = None
    log_ratio_limit: float = 20.0
    channel_divisor: str = "none"
    divisor_scope: str = "global"
    nan_policy: str = "safe_zero"
    kl_coef: float = 0.0
    kl: str = "low_var_kl"
    kl_placement: str = "response"
    entropy_coef: float = 0.0
    entropy: str = "exact"
    correction: str = "none"
    correction_cap: float = 2.0

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
        if self.correction_cap < 1:
            raise ValueError(f"correction_cap={self.correction_cap}; at least 1")

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
    penalty      (sum, weight), each [...]: KL and what else is added once, its coefficients inside
    metrics      name -> (sum, weight), each [...]: ppo_kl, entropy, clipfrac_higher,
                 clipfrac_lower, and kl with a reference. No gradient.
    """

    sum: Float[Array, "..."]
    weight: Float[Array, "..."]
    penalty: tuple[Float[Array, "..."], Float[Array, "..."]]
    metrics: dict[str, tuple[Float[Array, "..."], Float[Array, "..."]]]


def policy_loss(
    logp: Float[Array, "G T"],
    old: Float[Array, "G T"],
    adv: Float[Array, "G C T"],
    mask: Bool[Array, "G C T"],
    cfg: PolicyLossConfig,
    *,
    response_mask: Bool[Array, "G T"] | None = None,
    ref: Float[Array, "G T"] | None = None,
    extra: Float[Array, "G T"] | None = None,
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
      response_mask: tokens of the ratio of a sequence, of metrics and penalties; None = those of any
        channel.
      ref: log-probs under the reference policy; required when `cfg.kl_coef` is in the loss.
      extra: further penalties a token, their coefficients inside.

    Values at unmasked tokens may be anything, infinities included.
    """
    tokens = jnp.any(mask, axis=1) if response_mask is None else response_mask
    used = tokens | jnp.any(mask, axis=1)
    logp = jnp.where(used, logp.astype(jnp.float32), 0.0)
    old = jnp.where(used, jax.lax.stop_gradient(old).astype(jnp.float32), 0.0)

    d = jnp.clip(log_ratio(logp, old, tokens, cfg), -cfg.log_ratio_limit, cfg.log_ratio_limit)
    clipped = jnp.clip(d, jnp.log1p(-cfg.clip_low), jnp.log1p(cfg.clip_high))
    a = jax.lax.stop_gradient(jnp.where(mask, adv.astype(jnp.float32), 0.0))
    plain, bounded = -a * jnp.exp(d)[:, None], -a * jnp.exp(clipped)[:, None]
    loss = jnp.maximum(plain, bounded)
    metrics = {
        "ppo_kl": masked_sum(-d, tokens),
        "entropy": masked_sum(-logp, tokens),
        "clipfrac_higher": masked_sum((plain < bounded).astype(jnp.float32), mask),
        "clipfrac_lower": (jnp.zeros(()), jnp.sum(mask, dtype=jnp.float32)),
    }
    if cfg.dual_clip is not None:
        limit = -a * cfg.dual_clip
        metrics["clipfrac_lower"] = masked_sum(((loss > limit) & (a < 0)).astype(jnp.float32), mask)
        loss = jnp.where(a < 0, jnp.minimum(loss, limit), loss)

    in_loss = cfg.kl_coef and cfg.kl_placement != "reward"
    if in_loss and ref is None:
        raise ValueError(f"kl_coef={cfg.kl_coef} needs the reference log-probs")
    each = jnp.zeros_like(logp) if extra is None else jnp.where(tokens, extra, 0.0)
    if ref is not None:
        ref = jnp.where(used, jax.lax.stop_gradient(ref).astype(jnp.float32), 0.0)
        kl = kl_penalty(logp, ref, cfg.kl)
        if in_loss and cfg.kl_placement == "channels":
            total, count = masked_sum(jnp.broadcast_to(kl[:, None], mask.shape), mask)
            loss = loss + cfg.kl_coef * total / jnp.maximum(count, 1.0)
            metrics["kl"] = (total, count)
        else:
            metrics["kl"] = masked_sum(kl, tokens)
            each = each + (cfg.kl_coef * kl if in_loss else 0.0)

    total, weight = jax.vmap(lambda v, m: average(v, m, tokens, cfg), in_axes=1)(loss, mask)
    penalty = average(each, tokens, tokens, cfg)
    return LossTerms(total, weight, penalty, jax.lax.stop_gradient(metrics))


def log_ratio(
    logp: Float[Array, "G T"],
    old: Float[Array, "G T"],
    tokens: Bool[Array, "G T"],
    cfg: PolicyLossConfig,
) -> Float[Array, "G T"]:
    """log r of every token by `cfg.ratio`; 0 outside the responses."""
    d = jnp.where(tokens, logp - old, 0.0) if cfg.ratio != "token" else logp - old
    if cfg.ratio == "token":
        return d
    count = jnp.maximum(jnp.sum(tokens, -1, keepdims=True), 1)
    mean = jnp.where(tokens, jnp.sum(d, -1, keepdims=True) / count, 0.0)
    if cfg.ratio == "sequence":
        return mean
    return jax.lax.stop_gradient(mean) + d - jax.lax.stop_gradient(d)


def average(
    values: Float[Array, "G T"],
    mask: Bool[Array, "G T"],
    tokens: Bool[Array, "G T"],
    cfg: PolicyLossConfig,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum, weight) of one group's masked values by `cfg.average`. tokens: of the responses that train,
    whose number times T is the weight of "constant"."""
    if cfg.average == "sequence":
        means, counted = token_mean(*jax.vmap(masked_sum)(values, mask))
        return jnp.sum(means), jnp.sum(counted)
    total, weight = masked_sum(values, mask)
    if cfg.average == "token_group":
        return token_mean(total, weight)
    if cfg.average == "constant":
        weight = jnp.sum(jnp.any(tokens, -1), dtype=jnp.float32) * mask.shape[-1]
    return total, weight


def batch_policy_loss(
    logp: Float[Array, "P G T"],
    old: Float[Array, "P G T"],
    adv: Float[Array, "P G C T"],
    mask: Bool[Array, "P G C T"],
    cfg: PolicyLossConfig,
    *,
    response_mask: Bool[Array, "P G T"] | None = None,
    ref: Float[Array, "P G T"] | None = None,
    extra: Float[Array, "P G T"] | None = None,
) -> LossTerms:
    """`policy_loss` over prompts: sums and weights [P, C], penalties and metrics pairs of [P]."""
    one = partial(policy_loss, cfg=cfg)
    return jax.vmap(lambda a, b, c, d, e, f, g: one(a, b, c, d, response_mask=e, ref=f, extra=g))(
        logp, old, adv, mask, response_mask, ref, extra
    )


def sampler_weights(
    trainer: Float[Array, "P G T"],
    sampler: Float[Array, "P G T"],
    tokens: Bool[Array, "P G T"],
    cfg: PolicyLossConfig,
) -> Float[Array, "P G T"]:
    """min(p_trainer / p_sampler, cap) of each token, or of each response as a whole; a constant."""
    d = jnp.where(tokens, jax.lax.stop_gradient(trainer - sampler), 0.0)
    if cfg.correction == "sequence":
        d = jnp.broadcast_to(jnp.sum(d, -1, keepdims=True), d.shape)
    return jnp.minimum(jnp.exp(jnp.minimum(d, cfg.log_ratio_limit)), cfg.correction_cap)


def masked_sum(values: Array, mask: Array) -> tuple[Array, Array]:
    """Masked sum and number of masked entries."""
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32)


def token_mean(total: Array, weight: Array) -> tuple[Array, Array]:
    """(mean, 1) where there is weight, (0, 0) where there is none."""
    return divide(total, weight), (weight > 0).astype(jnp.float32)


def divide(total: Array, weight: Array) -> Array:
    """total / weight; 0 with gradient 0 where weight is 0."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)
