"""Gradient accumulation over prompts that never changes a gradient.

    rows of a batch, P = 6, micro = 3, on devices a a a b b b:  0 1 2 3 4 5
    slice 0                                                     0 . 2 . 4 .
    slice 1                                                     . 1 . 3 . 5

Every slice takes every (P / micro)-th row, so each device works on its own rows. What is added up
are sums; dividing by the total weight is left to the caller, once, after the last slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from evisrag_jax.runtime.mesh import batch_shards

Objective = Callable[[Any, Any], tuple[Float[Array, ""], Any]]


def slice_size(prompts: int, micro: int, shards: int | None = None) -> int:
    """Prompts of a slice, over all devices: `micro` on each, all of the batch for 0 or where that is less.

    shards: parts of a batch; None for those of the program that is being traced. ValueError unless slices
    of this size make up the batch.
    """
    size = min(prompts, micro * (batch_shards() if shards is None else shards)) or prompts
    if prompts % size:
        raise ValueError(
            f"{prompts} prompts cannot be cut into slices of {size}: micro={micro} on each of "
            f"{size // micro} devices that share a batch; choose a divisor"
        )
    return size


def accumulate(
    objective: Objective, trainable: Any, batch: Any, micro: int, *, shardings: Any = None
) -> tuple[Any, Float[Array, ""], Any]:
    """Gradient of the summed objective over a batch, `micro` prompts at a time.

    Args:
        objective: (trainable, slice) → (a scalar sum over the slice, a tree of sums).
        trainable: the tree to differentiate for.
        batch: a tree whose leaves all have the prompts P as their first axis (None is no leaf).
        micro: prompts a slice; sets memory, never the result.
        shardings: of `trainable`; gradients are kept where their parameters lie.
    Returns:
        gradient (float32, a tree like trainable), total, aux sums. Nothing is divided.
    Raises:
        ValueError: P is not a multiple of micro, or leaves of different P.
    """

    def one(rows: Any) -> tuple[Any, Any, Any]:
        (total, aux), grads = jax.value_and_grad(objective, has_aux=True)(trainable, rows)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return _keep(grads, shardings), total, aux

    grads, total, aux = sum_over(one, batch, micro)
    return _keep(grads, shardings), total, aux


def sum_over(function: Callable[[Any], Any], batch: Any, micro: int) -> Any:
    """Σ function(slice) over the slices of a batch, a tree of sums; only one slice is at work.

    Raises ValueError as `accumulate` does.
    """
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(f"leaves of one batch have {sorted(sizes)} prompts; all need the same")
    prompts = sizes.pop()
    if micro < 1 or prompts % micro:
        raise ValueError(
            f"{prompts} prompts a batch cannot be cut into micro-batches of micro={micro}; "
            "choose a divisor"
        )
    slices = prompts // micro
    if slices == 1:
        return function(batch)
    cut = jax.tree.map(
        lambda a: jnp.asarray(a).reshape(micro, slices, *a.shape[1:]).swapaxes(0, 1), batch
    )
    shapes = jax.eval_shape(function, jax.tree.map(lambda a: a[0], cut))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def step(sums: Any, rows: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(rows)), None

    return jax.lax.scan(step, zeros, cut)[0]


def _keep(grads: Any, shardings: Any) -> Any:
    return grads if shardings is None else jax.lax.with_sharding_constraint(grads, shardings)
