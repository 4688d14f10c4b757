"""Objectives that ask how a response depends on its pages, by a second forward over blackened pages.

pages ─ patches of 14 px black with probability `share` ─ score ─► masked log-probs [P, G, T]

v_t = k3(masked - plain), in [0, 10]: how far token t leans on what was hidden

PAPO   loss - coef · mean v, and a penalty on the entropy of both passes (else the masked pass is
       made unlikely at any price)                                      baselines spec 3.1
VPPO   the loss keeps the `top` share of each response's tokens by v, and multiplies each response's
       advantage by a factor that grows with its mean v and is 1 on average
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from evisrag_jax.pages.patches import ImageArrays
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.rl.kl import kl_penalty


@dataclass(frozen=True)
class MaskedConfig:
    """share: of the patches that are black; 0 = no second forward.

    coef: PAPO's γ, weight of the mean v that is rewarded.  entropy_coef: PAPO's η₂, a penalty on
    -masked log-prob; needs `gradient`.  gradient: the masked pass is part of the update and gets a
    gradient; off, its log-probs are taken once a rollout.  top: VPPO's share of tokens that stay in the
    loss, 0 for all.  factor_low: VPPO's smallest advantage factor (0.9), 0 for none.
    """

    share: float = 0.0
    coef: float = 0.0
    entropy_coef: float = 0.0
    gradient: bool = False
    top: float = 0.0
    factor_low: float = 0.0

    def __post_init__(self) -> None:
        for name in ("share", "top", "factor_low"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}; a share between 0 and 1")
        for name in ("coef", "entropy_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; not negative")
        if self._users and not self.share:
            raise ValueError(f"{self._users[0]} needs pages with black patches, but share=0")
        if self.entropy_coef and not self.gradient:
            raise ValueError(
                f"entropy_coef={self.entropy_coef} of the masked pass has no gradient without gradient=True"
            )
        if self.gradient and not (self.coef or self.entropy_coef):
            raise ValueError("gradient=True, but no term of the masked pass is in the loss")

    @property
    def _users(self) -> list[str]:
        names = ("coef", "entropy_coef", "top", "factor_low")
        return [name for name in names if getattr(self, name)]

    @property
    def active(self) -> bool:
        """Whether there is a masked pass: pages to hide, and a term that uses it (γ = 0 has none)."""
        return bool(self.share and self._users)

    @property
    def focused(self) -> bool:
        """Whether v decides which tokens train, or how much."""
        return bool(self.top or self.factor_low)


def blacken(
    pages: ImageArrays, salts: UInt32[Array, " P"], share: float, layout: VisionLayout
) -> ImageArrays:
    """The pages with each patch black with probability `share`, after the resize.

    salts: a number a prompt; the draw depends on it and on the place in the page alone.
    """

    def draw(salt: Array) -> Bool[Array, "I W S"]:
        return jax.random.bernoulli(jax.random.key(salt), share, pages.mask.shape[1:])

    hidden = jax.vmap(draw)(salts) & pages.mask
    mean, std = (np.asarray(c, np.float32) for c in (layout.mean, layout.std))
    black = np.repeat(-mean / std, pages.patches.shape[-1] // 3)  # patches are channel-major
    patches = jnp.where(hidden[..., None], jnp.asarray(black, pages.patches.dtype), pages.patches)
    return pages._replace(patches=patches)


def dependency(logp: Float[Array, "*B T"], masked: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """v = exp(d) - d - 1 with d = masked - logp in [-20, 20], in [0, 10]."""
    return kl_penalty(logp, masked, "low_var_kl")


def top_tokens(
    v: Float[Array, "*B T"], response: Bool[Array, "*B T"], top: float
) -> Bool[Array, "*B T"]:
    """The ⌈top · n⌉ tokens of largest v of each response of n tokens, the earlier one of equals."""
    order = jnp.argsort(jnp.where(response, -v, jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    # A share times a whole number that should be whole may come out a hair above it.
    return rank < jnp.ceil(top * jnp.sum(response, -1) - 1e-4)[..., None]


def focus(
    values: Float[Array, "P G Z T"],
    masks: Bool[Array, "P G Z T"],
    v: Float[Array, "P G T"],
    response: Bool[Array, "P G T"],
    config: MaskedConfig,
) -> tuple[Float[Array, "P G Z T"], Bool[Array, "P G Z T"]]:
    """VPPO's advantages and masks: those of the tokens that lean on the pages most.

    top: the tokens of `top_tokens`.
    factor_low: f = low + u · (high - low), u the response's mean v between the smallest (0) and largest
    (1) of the batch, high = low + (1 - low) / mean u, so that the mean of f is 1. Where all are equal
    f = 1.
    """
    v = jnp.where(response, jax.lax.stop_gradient(v), 0.0)
    count = jnp.sum(response, -1)
    if config.top:
        keep = top_tokens(v, response, config.top)
        masks = masks & keep[:, :, None]
        values = jnp.where(keep[:, :, None], values, 0.0)
    if config.factor_low:
        live = count > 0
        mean = jnp.sum(v, -1) / jnp.maximum(count, 1)
        low = jnp.min(mean, initial=jnp.inf, where=live)
        high = jnp.max(mean, initial=-jnp.inf, where=live)
        u = jnp.where(live & (high > low), (mean - low) / jnp.maximum(high - low, 1e-30), 0.0)
        mean_u = jnp.sum(u) / jnp.maximum(jnp.sum(live), 1)
        below = config.factor_low
        factor = below + u * (1 - below) / jnp.maximum(mean_u, 1e-30)
        values = values * jnp.where(mean_u > 0, factor, 1.0)[:, :, None, None]
    return values, masks
