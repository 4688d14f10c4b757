"""PAPO and VPPO without training: how far each of several responses leans on its pages, to choose one by
(`evaluation.rerank`).

    papo_lite   mean of v over the response       v_t = k3(masked - plain), `rl.masked.dependency`
    vppo_lite   mean of v over the ⌈0.4 n⌉ tokens of the response that have most of it

Source: Evidence-RL A.11 (baselines spec 3.1), which names both and writes neither down. Decision: PAPO's
KL is its k3 estimate on the sampled tokens, as in its loss, and VPPO's share of tokens is the one that
VPPO trains on.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float64

from evisrag_jax.rl.masked import dependency, top_tokens

TOP = 0.4  # of VPPO


def papo_lite(
    logp: Float[np.ndarray, "*B T"],
    logp_mask: Float[np.ndarray, "*B T"],
    mask: Bool[np.ndarray, "*B T"],
) -> Float64[np.ndarray, "*B"]:
    """The mean dependency of each response.

    logp, logp_mask: of its tokens with the pages as they are, and with a share of their patches black.
    mask: which tokens are the response's; what stands elsewhere does not matter. A response without
    tokens scores 0.

    Raises ValueError for a log-prob of the response that is not finite.
    """
    return _mean(_dependency(logp, logp_mask, mask), mask)


def vppo_lite(
    logp: Float[np.ndarray, "*B T"],
    logp_mask: Float[np.ndarray, "*B T"],
    mask: Bool[np.ndarray, "*B T"],
    top: float = TOP,
) -> Float64[np.ndarray, "*B"]:
    """The mean dependency of the `top` share of each response's tokens, the most dependent ones; see
    `papo_lite`."""
    if not 0 < top <= 1:
        raise ValueError(f"top={top}; a share above 0, at most 1")
    v = _dependency(logp, logp_mask, mask)
    keep = top_tokens(jnp.asarray(v, jnp.float32), jnp.asarray(mask), top)
    return _mean(v, np.asarray(keep))


def _dependency(logp: np.ndarray, logp_mask: np.ndarray, mask: np.ndarray) -> np.ndarray:
    for name, values in (("logp", logp), ("logp_mask", logp_mask)):
        if not np.isfinite(values[mask]).all():
            place = np.argwhere(mask & ~np.isfinite(values))[0].tolist()
            raise ValueError(f"{name} is not finite at {place}, a token of a response")
    plain, masked = (jnp.asarray(np.where(mask, x, 0.0), jnp.float32) for x in (logp, logp_mask))
    return np.asarray(dependency(plain, masked), np.float64)


def _mean(v: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(keep, v, 0.0).sum(-1) / np.maximum(keep.sum(-1), 1))
