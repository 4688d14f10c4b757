"""Do both sides compute the same? Asked before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evisrag_jax.models.qwen25vl.tensors import entries

from .shapes import Shape


def equal_tokens(ours: Sequence[np.ndarray], theirs: np.ndarray) -> tuple[int, int]:
    """(equal, all): leading ids of every row that agree, and ids compared."""
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        n = min(len(a), len(b))
        differs = np.flatnonzero(np.asarray(a)[:n] != np.asarray(b)[:n])
        equal += int(differs[0]) if len(differs) else n
    return equal, int(np.asarray(theirs).size)


def gradient_errors(
    shape: Shape, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """‖ours - theirs‖₂ / ‖theirs‖₂ of every trained tensor, by its published name.

    A tensor whose gradient is below a thousandth of the whole gradient (the biases of keys, which
    softmax cancels) is measured against that.
    """
    whole = np.sqrt(sum(float(np.sum(np.square(np.float64(g)))) for g in theirs.values()))
    errors = {}
    for entry in entries(shape.config):
        path = "/".join(entry.path)
        if path not in ours or entry.name not in theirs:
            continue
        value = ours[path] if entry.layer is None else ours[path][entry.layer]
        got, want = np.float64(entry.save(np.asarray(value))), np.float64(theirs[entry.name])
        size = max(float(np.linalg.norm(want)), 1e-3 * whole)
        errors[entry.name] = float(np.linalg.norm(got - want)) / size
    return errors
