"""What the backward pass computes again instead of keeping it, by name.

             kept of every layer                                     computed again
    none       all intermediate values                                 nothing
    dots       its input, results of weight products, of attention     norms, rotations, activations
    attention  its input, results of attention                         all but attention
    full       its input                                               the layer

From top to bottom less memory and more time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

_policies = jax.checkpoint_policies
_ATTENTION = _policies.save_only_these_names("attention")
POLICIES = {
    "none": None,
    "dots": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _ATTENTION
    ),
    "attention": _ATTENTION,
    "full": _policies.nothing_saveable,
}


def check_remat(name: str) -> str:
    """The name; ValueError for one that is none of `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"remat={name!r}: choose one of {', '.join(POLICIES)}")
    return name


def rematerialise(layer: Callable, remat: str, *, static_argnums: Sequence[int] = ()) -> Callable:
    """The layer, keeping for its backward pass what the named policy says."""
    if check_remat(remat) == "none":
        return layer
    return jax.checkpoint(layer, policy=POLICIES[remat], static_argnums=tuple(static_argnums))
