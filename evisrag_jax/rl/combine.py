"""How pairs (sum, weight) of prompts, micro-batches and devices become one loss.

Pairs are added, and divided once, by weights that are known from the masks before the first backward
pass:

    L_c  = sum_m S_c[m] / N_c           N_c = sum_m n_c[m]: the weight of all of channel c
    loss = sum_c L_c / K + penalty      K: `channel_divisor`

so no split of the batch changes a gradient. The released divisor, which counts the channels with a
non-zero loss in each micro-batch, depends on the split and exists as `divisor_scope="micro"`.

A split accumulated step by step: N = channel_totals(masks); gradients of objective(S[m], N) are
added over m, and divided at the end by channel_divisor(sum_m S[m]): the gradient of `combine`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from evisrag_jax.rl.losses import PolicyLossConfig, average, divide, masked_sum, token_mean


class Combined(NamedTuple):
    """A divided loss: `loss` (scalar), `micro` [M] its parts, `channels` [C] before the divisor."""

    loss: Float[Array, ""]
    micro: Float[Array, " M"]
    channels: Float[Array, " C"]


def channel_totals(
    mask: Bool[Array, "P G C T"],
    cfg: PolicyLossConfig,
    response_mask: Bool[Array, "P G T"] | None = None,
) -> Float[Array, " C"]:
    """N_c, the weights of a whole batch, from its masks alone. response_mask as of `policy_loss`."""
    tokens = jnp.any(mask, axis=2) if response_mask is None else response_mask

    def weights(mask, tokens):
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        return jax.vmap(lambda m: average(zeros, m, tokens, cfg)[1], in_axes=1)(mask)

    return jnp.sum(jax.vmap(weights)(mask, tokens), 0)


def objective(
    sums: Float[Array, "*M C"], totals: Float[Array, " C"], cfg: PolicyLossConfig
) -> Float[Array, "*M"]:
    """sum_c S_c / N_c: a part's share of the loss, before the divisor K.

    A channel with N_c = 0 adds exactly 0; under nan_policy "code" it turns value and gradient to NaN.
    """
    share = jnp.sum(divide(sums, totals), -1)
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
    penalty: tuple[Float[Array, " M"], Float[Array, " M"]] | None = None,
) -> Combined:
    """One division for a whole batch.

    Args:
      sums, weights: pairs of the parts m: prompts, or micro-batches, whose split matters under
        `divisor_scope="micro"` only.
      totals: N_c when more parts exist elsewhere (other devices); None = the sum of `weights`.
        A global K is counted over the parts given here.
      penalty: the pair of `LossTerms`; its mean is added outside K.

    Returns the loss, its parts (they add up to the loss), and the mean of each channel.
    """
    totals = jnp.sum(weights, 0) if totals is None else totals
    share = objective(sums, totals, cfg)
    rows = sums if cfg.divisor_scope == "micro" else jnp.sum(sums, 0, keepdims=True)
    micro = share / channel_divisor(rows, cfg)
    if penalty is not None:
        micro += divide(penalty[0], jnp.sum(penalty[1]))
    channels = divide(jnp.sum(sums, 0), totals)
    return Combined(jnp.sum(micro), micro, channels)


def metric_means(
    metrics: dict[str, tuple[Float[Array, "..."], Float[Array, "..."]]],
) -> dict[str, Float[Array, ""]]:
    """Each metric's sum over its weight, 0 where nothing was counted."""
    return {
        name: divide(jnp.sum(total), jnp.sum(weight)) for name, (total, weight) in metrics.items()
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
        return masked_sum(values, mask)
    means, counted = token_mean(*jax.vmap(masked_sum)(values, mask))
    return jnp.sum(means), jnp.sum(counted)
