"""Learning-rate schedules: from the update count (0 first) to a rate, as optax takes them.

    kind      rate at update k                                        source
    constant  base * min(1, k' / max(1, warmup))                      released RL and SFT warm-up
    cosine    base * k' / max(1, warmup) up to the warm-up, then      released SFT
              half a cosine down to final * base at update `total`

`first_step_lr` fixes k': "zero" counts k' = k, so the first update has rate 0 and only fills the
optimiser's moments, also with a warm-up of 0 (as released); "base" counts k' = k + 1, so no update
is wasted and without warm-up the first one already runs at the base rate.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

Schedule = Callable[..., Float[Array, ""]]


def constant_with_warmup(base: float, warmup: int = 0, *, first_step_lr: str = "base") -> Schedule:
    """Linear warm-up over `warmup` updates, then `base`."""
    ramp = _ramp(base, warmup, first_step_lr)
    return lambda count: base * ramp(count)


def cosine_with_warmup(
    base: float, total: int, warmup: int = 0, *, final: float = 0.0, first_step_lr: str = "base"
) -> Schedule:
    """Linear warm-up over `warmup` updates, then half a cosine to `final` * base at `total`.

    The cosine counts updates as they are (k): it starts where the warm-up ends. Raises ValueError
    when the warm-up is not shorter than the run.
    """
    if not warmup < total:
        raise ValueError(f"warmup={warmup} leaves nothing of a run of total={total} updates")
    if not 0.0 <= final <= 1.0:
        raise ValueError(f"final={final}; a fraction of the base rate in [0, 1]")
    ramp = _ramp(base, warmup, first_step_lr)

    def schedule(count):
        progress = jnp.clip((jnp.asarray(count, jnp.float32) - warmup) / (total - warmup), 0.0, 1.0)
        decay = final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return base * ramp(count) * decay

    return schedule


def _ramp(base: float, warmup: int, first_step_lr: str) -> Schedule:
    if first_step_lr not in ("zero", "base"):
        raise ValueError(f"first_step_lr={first_step_lr!r}; zero or base")
    if warmup < 0 or base < 0:
        raise ValueError(f"warmup={warmup} and base={base} must not be negative")
    offset = 0.0 if first_step_lr == "zero" else 1.0
    span = float(max(1, warmup))
    return lambda count: jnp.minimum(1.0, (jnp.asarray(count, jnp.float32) + offset) / span)
