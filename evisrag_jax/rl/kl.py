"""Penalties for drifting from a reference policy, by token.

With x = log-prob under the policy, y = under the reference, d = y - x:

    name                value                                    estimator
    kl                  x - y                                    k1
    abs                 |x - y|
    mse                 (x - y)^2 / 2                            k2
    low_var_kl          exp(d) - d - 1, d in [-20, 20],          k3
                        result in [-10, 10]
    full                sum over the last axis of exp(x)(x - y)  exact, from whole distributions
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
KINDS = ("kl", "abs", "mse", "low_var_kl", "full")
LOG_RATIO_LIMIT = 20.0
VALUE_LIMIT = 10.0
_SERIES_BELOW = 0.03  # |d| under which exp(d) - d - 1 is taken from its series


def kl_kind(name: str) -> str:
    """The canonical name of an estimator; ValueError, listing the names, for an unknown one."""
    kind = ALIASES.get(name, name)
    if kind not in KINDS:
        raise ValueError(f"unknown KL kind {name!r}; one of {', '.join((*KINDS, *ALIASES))}")
    return kind


def kl_penalty(
    logp: Float[Array, "*B T"], ref: Float[Array, "*B T"], kind: str = "low_var_kl"
) -> Float[Array, "*B T"] | Float[Array, "*B"]:
    """Penalty of each token, float32; its gradient with respect to `logp` is plain autodiff.

    Args:
      logp: log-probs of the sampled tokens (full: of the whole vocabulary on the last axis).
      ref: the same under the reference policy.
      kind: one of `KINDS` or of `ALIASES`.

    Returns one value a token; "full" sums over the last axis. low_var_kl is never negative, also
    for tiny differences, where the direct formula cancels in float32.
    """
    logp, ref = logp.astype(jnp.float32), ref.astype(jnp.float32)
    match kl_kind(kind):
        case "kl":
            return logp - ref
        case "abs":
            return jnp.abs(logp - ref)
        case "mse":
            return 0.5 * jnp.square(logp - ref)
        case "full":
            return jnp.sum(jnp.exp(logp) * (logp - ref), axis=-1)
    d = jnp.clip(ref - logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    small = jnp.abs(d) < _SERIES_BELOW
    near = jnp.where(small, d, 0.0)
    series = 0.5 * near * near * (1.0 + near / 3.0 * (1.0 + near / 4.0 * (1.0 + near / 5.0)))
    return jnp.clip(jnp.where(small, series, jnp.expm1(d) - d), -VALUE_LIMIT, VALUE_LIMIT)


def adapt_coefficient(
    coefficient: float, measured: float, samples: int, *, target: float = 0.1, horizon: int = 10_000
) -> float:
    """The next coefficient of an adaptive penalty: raised while `measured` exceeds `target`.

    coefficient * (1 + clip(measured / target - 1, -0.2, 0.2) * samples / horizon)
    """
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)
