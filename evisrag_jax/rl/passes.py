"""Forward passes without a gradient that an update may need, each a named program of its own.

pass        parameters              when                                             gives
old         now                     several updates a rollout, a KL in the reward,   logp [P, G, T]
                                    VPPO
reference   at the start of the     a KL                                             logp [P, G, T]
            run, or without
            adapters
masked      now, blackened pages    PAPO and VPPO, unless it is part of the update   logp [P, G, T]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt32

from evisrag_jax.models.lora import LoraConfig, is_adapter, merged_shardings
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.pages.patches import ImageArrays
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.masked import blacken
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.accumulate import slice_size
from evisrag_jax.training.forward import GroupBatch, TokenScores, score_responses
from evisrag_jax.training.layout import SamplingLayout
from evisrag_jax.training.state import Flat, TrainState, forward_params, full_params, merged_params


@dataclass(frozen=True)
class UpdateConfig:
    """Static settings of an update beside the objective: dtype of products, what the backward pass
    computes again (`models.remat`), response positions whose logits are held at once, adapters, and how
    pages are normalised (for black patches)."""

    rl: RLConfig
    compute: str = "float32"
    remat: str = "full"
    chunk: int = 2048
    lora: LoraConfig = LoraConfig()
    layout: VisionLayout = VisionLayout()


def score(
    trainable: Flat, frozen: Flat, groups: GroupBatch, model: Qwen25VLConfig, settings: UpdateConfig
) -> TokenScores:
    """Scores of the sampled tokens at the sampling temperature: old and new by one function."""
    return score_responses(
        forward_params(trainable, frozen, settings.lora, jnp.dtype(settings.compute)),
        model,
        groups,
        temperature=settings.rl.temperature,
        train_vision=any(path.startswith("vision/") for path in trainable),
        remat=settings.remat,
        chunk=settings.chunk,
    )


def blackened(
    groups: GroupBatch,
    pages: ImageArrays | None,
    salts: UInt32[Array, " P"],
    settings: UpdateConfig,
) -> GroupBatch:
    """The groups before pages with black patches. pages: where `groups` hold features instead."""
    pages = groups.images if pages is None else pages
    hidden = blacken(pages, salts, settings.rl.masked.share, settings.layout)
    return groups._replace(images=hidden, features=None)


def old_log_probs(
    trainable: Flat,
    frozen: Flat,
    groups: GroupBatch,
    *,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
) -> Float[Array, "P G T"]:
    """Log-probs under the parameters as they are, a slice of prompts at a time."""

    def one(groups: GroupBatch) -> Array:
        return score(trainable, frozen, groups, model, settings).logp

    return _sliced(one, groups, settings.rl.micro)


def reference_log_probs(
    reference: Flat,
    frozen: Flat,
    groups: GroupBatch,
    *,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
) -> Float[Array, "P G T"]:
    """Log-probs under the reference: `reference` in place of what trains, no adapters."""
    frozen = {path: leaf for path, leaf in frozen.items() if not is_adapter(path)}

    def one(groups: GroupBatch) -> Array:
        return score_responses(
            forward_params(reference, frozen, LoraConfig(), jnp.dtype(settings.compute)),
            model,
            groups,
            temperature=settings.rl.temperature,
            remat="none",
            chunk=settings.chunk,
        ).logp

    return _sliced(one, groups, settings.rl.micro)


def masked_log_probs(
    trainable: Flat,
    frozen: Flat,
    rows: tuple[GroupBatch, ImageArrays | None, UInt32[Array, " P"]],
    *,
    model: Qwen25VLConfig,
    settings: UpdateConfig,
) -> Float[Array, "P G T"]:
    """Log-probs behind blackened pages."""

    def one(rows: tuple) -> Array:
        return score(trainable, frozen, blackened(*rows, settings), model, settings).logp

    return _sliced(one, rows, settings.rl.micro)


def _sliced(one: Callable[[Any], Array], rows: Any, micro: int) -> Float[Array, "P G T"]:
    """`one` over slices of prompts, like those of the update."""
    P = jax.tree.leaves(rows)[0].shape[0]
    size = slice_size(P, micro)
    if size == P:
        return one(rows)
    cut = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]).swapaxes(0, 1), rows)
    logp = jax.lax.map(one, cut)
    return logp.swapaxes(0, 1).reshape(P, *logp.shape[2:])


def compute_params(trainable: Flat, frozen: Flat, *, settings: UpdateConfig) -> dict[str, Any]:
    """The model's nested parameters in the compute dtype, adapters merged: what the sampler computes
    with."""
    return merged_params(trainable, frozen, settings.lora, jnp.dtype(settings.compute))


def hold_reference(state: TrainState, shardings: TrainState, settings: UpdateConfig) -> Flat:
    """What the reference needs beside the state's frozen parameters: a copy, in the compute dtype and as
    sharded as training, of the parameters that train; nothing of adapters, which are left off."""
    own = {path: leaf for path, leaf in state.trainable.items() if not is_adapter(path)}
    places = {path: shardings.trainable[path] for path in own}
    dtype = jnp.dtype(settings.compute)
    return jax.jit(
        lambda tree: jax.tree.map(lambda a: jnp.copy(a).astype(dtype), tree), out_shardings=places
    )(own)


def compile_old_log_probs(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
):
    """`old_log_probs` under jit, with the shardings of the update."""
    return _compile(old_log_probs, model, settings, mesh, shardings.trainable, shardings.frozen)


def compile_masked_log_probs(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
):
    """`masked_log_probs` under jit, with the shardings of the update."""
    return _compile(masked_log_probs, model, settings, mesh, shardings.trainable, shardings.frozen)


def compile_reference_log_probs(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
):
    """`reference_log_probs` under jit, with the shardings of the update."""
    own = {path: one for path, one in shardings.trainable.items() if not is_adapter(path)}
    return _compile(reference_log_probs, model, settings, mesh, own, shardings.frozen)


def _compile(
    function: Callable[..., Any],
    model: Qwen25VLConfig,
    settings: UpdateConfig,
    mesh: Mesh,
    first: Any,
    frozen: Any,
):
    batch = meshes.batch_sharding(mesh)
    return jax.jit(
        meshes.traced_on(mesh, partial(function, model=model, settings=settings)),
        in_shardings=(first, frozen, batch),
        out_shardings=batch,
    )


def compile_params(
    settings: UpdateConfig, shardings: TrainState, layout: SamplingLayout | None = None
):
    """`compute_params` under jit, in the sampler's layout. Where training has that layout, whole stacks,
    no adapters and every parameter the compute dtype, nothing is copied (the arrays are then the state's
    own, which the next update gives away). `.cast` is the jitted copy."""
    same = layout is None or layout.same
    whole = merged_shardings(full_params(shardings.trainable, shardings.frozen))
    cast = jax.jit(
        partial(compute_params, settings=settings),
        in_shardings=(shardings.trainable, shardings.frozen),
        out_shardings=whole if same else layout.wide,
    )

    def params(state: TrainState) -> dict[str, Any]:
        leaves = [*state.trainable.values(), *state.frozen.values()]
        plain = not (settings.lora.rank or state.trainable.keys() & state.frozen)
        ready = all(leaf.dtype == jnp.dtype(settings.compute) for leaf in leaves)
        if same and plain and ready:
            return full_params(state.trainable, state.frozen)
        copy = cast(state.trainable, state.frozen)
        return copy if same else layout.take(copy)

    params.cast = cast
    return params
