"""Is this machine's fast attention right? A tiny input through it and through plain XLA.

A fused kernel depends on driver, library and card, and may fail or be wrong where it compiles. What
is compared: causal attention at the decoder's head width and attention inside an image with masked
slots in the middle at the tower's, and, where it is the default, a group's; outputs and gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np

from evisrag_jax.models import attention

# ‖fast - plain‖₂ / ‖plain‖₂ a tensor; a 16-bit format keeps 8 bits, and sums of it are rounded on
# both sides.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionCheck:
    """What was compared, and what is used from now on.

    backend: of jax.  fast: the implementation that was to be used.  used: the one that is.
    error: the largest relative error of any tensor; None when nothing was compared.
    problem: why `fast` is not used; "" when it is.
    """

    backend: str
    fast: str
    used: str
    dtype: str
    error: float | None
    problem: str

    @property
    def ok(self) -> bool:
        """Whether the backend's own choice is in use."""
        return self.used == self.fast

    def line(self) -> str:
        """The result in a line."""
        if not self.ok:
            return f"{self.fast} attention is not used on {self.backend}: {self.problem}"
        if self.error is None:
            return f"{self.used} attention on {self.backend}"
        return (
            f"{self.used} attention on {self.backend} agrees with xla: relative error "
            f"{self.error:.1e} in {self.dtype}"
        )


def start_up_check() -> AttentionCheck | None:
    """For engines and trainers, before they trace anything: checks a fused kernel, and falls back to
    XLA with one warning where it fails. None where there is none (CPU, TPU): nothing runs."""
    return check_attention() if attention.default_implementation() == "cudnn" else None


@functools.cache
def check_attention() -> AttentionCheck:
    """Compares the default implementation with XLA's, once a process; on failure XLA's becomes the
    default, and one warning says why."""
    fast, backend = attention.default_implementation(), jax.default_backend()
    if fast == "xla":
        return AttentionCheck(backend, fast, fast, "", None, "")
    dtype = "bfloat16" if fast == "cudnn" else "float32"
    try:
        error, name = max((value, key) for key, value in _errors(fast, dtype).items())
        problem = ""
        if not error <= TOLERANCE[dtype]:
            problem = (
                f"{name} is off by {error:.1e} (relative, {dtype}; at most {TOLERANCE[dtype]})"
            )
    except Exception as failure:  # whatever a driver raises, XLA still works
        error, problem = None, f"{type(failure).__name__}: {failure}".splitlines()[0]
    used = "xla" if problem else fast
    result = AttentionCheck(backend, fast, used, dtype, error, problem)
    if problem:
        attention.set_default_implementation("xla")
        log.warning("%s; falling back to xla", result.line())
    return result


def _errors(fast: attention.Implementation, dtype: str) -> dict[str, float]:
    """Relative error by tensor; infinite where anything is not finite."""
    errors = {}
    for name, (function, arrays, rest, real) in _cases(fast).items():
        weights = _draw(99, *arrays[0].shape) * real
        ours = _outputs(function, arrays, rest, weights, fast, dtype)
        plain = _outputs(function, arrays, rest, weights, "xla", "float32")
        for part, a, b in zip(("output", "q", "k", "v"), ours, plain, strict=False):
            size = np.linalg.norm(b)
            off = np.linalg.norm(a - b) / size
            errors[f"{name}: {part}"] = float(off) if np.isfinite(off) else float("inf")
    return errors


def _cases(fast: str) -> dict:
    """name: (function, float arrays, other arrays, rows that count)."""
    L, S = 150, 200
    lengths = jnp.array([L, 70], jnp.int32)
    real = (jnp.arange(L) < lengths[:, None])[..., None, None]
    mask = jnp.asarray(np.random.default_rng(0).random((2, S)) < 0.8)
    decoder = (_draw(0, 2, L, 4, 128), _draw(1, 2, L, 2, 128), _draw(2, 2, L, 2, 128))
    tower = tuple(_draw(i, 2, S, 2, 80) for i in range(3))
    cases = {
        "causal": (attention.causal_attention, decoder, (lengths,), real),
        "image": (attention.masked_attention, tower, (mask,), mask[..., None, None]),
    }
    if fast == "blocked":
        own = tuple(_draw(i, 2, 2, 20, 2, 128) for i in (4, 5))
        group = (_draw(3, 2, 2, 20, 4, 128), *decoder[1:])
        cases["group"] = (_group, group, (lengths, *own), jnp.ones(()))
    return cases


def _group(q, k, v, lengths, own_k, own_v, *, implementation):
    return attention.group_attention(q, k, v, lengths, own_k, own_v, implementation=implementation)


def _outputs(function, arrays, rest, weights, implementation, dtype) -> list[np.ndarray]:
    """The rows that count, and the gradients of a weighted sum of them."""

    @jax.jit
    def attention_check(*arrays):
        arrays = [a.astype(dtype) for a in arrays]
        out, pullback = jax.vjp(
            lambda *a: function(*a, *rest, implementation=implementation), *arrays
        )
        return out.astype(jnp.float32) * (weights != 0), *pullback(weights.astype(out.dtype))

    return [np.asarray(a, np.float32) for a in jax.device_get(attention_check(*arrays))]


def _draw(seed: int, *shape: int) -> jax.Array:
    """Numbers that bfloat16 holds exactly: the plain side starts from the same ones."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(drawn, jnp.bfloat16).astype(jnp.float32)
