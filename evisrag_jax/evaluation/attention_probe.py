"""Where responses look: the share of their attention to the pages that falls on the evidence.

    a[t, j]   attention of response token t on prompt token j, mean over heads and over some layers
    B in V    visual tokens inside the evidence boxes, and all visual tokens
    rho       sum over t in scope, j in B of a[t, j]  /  the same over j in V
    lift      rho · |V| / |B|: 1 where attention ignores the boxes (rho alone grows with their area)

A teacher-forced pass returns two sums a layer, scope and response and no map: each block of rows is
contracted with B and V inside its layer, so memory is that of one block of one layer. The formulas are
this project's (evaluation spec 4.6); EVisRAG's paper has the idea and no formula.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32

from evisrag_jax.evaluation.attention_ratios import (
    ResponseAttention,
    chosen_layers,
    scope_attention,
)
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.batching import check_divides, put_batch
from evisrag_jax.training.forward import GroupBatch

#: Whose query is token t's row: that of t itself, or of the token before, whose state predicts t.
Row = Literal["own", "predicting"]


def visual_tokens(prompt: Any) -> Bool[np.ndarray, "P L"]:
    """V of host prompts (model.PromptInputs): the positions that take an image feature."""
    index = np.asarray(prompt.image_index)
    return (index >= 0) & (np.arange(index.shape[1]) < np.asarray(prompt.lengths)[:, None])


def attention_sums(
    params: dict,
    config: Qwen25VLConfig,
    batch: GroupBatch,
    key_sets: Bool[Array, "P sets L"],
    scopes: Bool[Array, "scopes P G T"],
    *,
    row: Row = "own",
) -> Float32[Array, "scopes P G layers sets"]:
    """Attention mass, mean over heads, summed over the tokens of each scope. Pure, for jit.

    key_sets: sets of prompt positions.  scopes: sets of response tokens; no padding may be among them.

    row "own" feeds the response itself: row t is the query at t, which has read t. "predicting" feeds the
    prompt's last token and the response without its own last, so that row t is the query whose state
    predicts t; the prompt's last token is then no key of the prompt but the response's first.

        prompt p0 p1 p2, response a0 a1      own         p0 p1 p2 | a0 a1
                                             predicting  p0 p1 | p2 a0
    """
    features = batch.features
    if features is None and batch.images is not None:
        features = model.encode_images(params, config, batch.images)
    prompt = batch.prompt
    _, prefix = model.prefill(params, config, prompt, features)
    tokens, lengths, start = batch.tokens, prompt.lengths, prompt.next_position
    if row == "predicting":
        lengths = jnp.maximum(lengths - 1, 0)
        last = jnp.take_along_axis(prompt.tokens, lengths[:, None], axis=1)
        # A prompt ends in text (the assistant's header), whose three positions are equal.
        start = jnp.take_along_axis(prompt.positions[:, 0], lengths[:, None], axis=1)[:, 0]
        last = jnp.broadcast_to(last[:, None], (*tokens.shape[:2], 1))
        tokens = jnp.concatenate([last, tokens[..., :-1]], axis=-1)
    positions = jnp.broadcast_to(start[:, None, None] + jnp.arange(tokens.shape[-1]), tokens.shape)
    mass = model.attention_mass(params, config, tokens, positions, lengths, prefix, key_sets)
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("npgts,cpgt->cpgns", mass, scopes.astype(mass.dtype), precision=highest)


@functools.cache
def compile_sums(config: Qwen25VLConfig, mesh: Mesh, row: Row = "own"):
    """`attention_sums` under jit: prompts over the mesh's batch axes, the sums on every device."""
    params = meshes.shardings(model.logical_axes(config), model.param_shapes(config), mesh)
    batch = meshes.batch_sharding(mesh)
    scopes = NamedSharding(mesh, PartitionSpec(None, meshes.BATCH_AXES))

    def sums(params, batch, key_sets, scopes):
        return attention_sums(params, config, batch, key_sets, scopes, row=row)

    return jax.jit(
        meshes.traced_on(mesh, sums),
        in_shardings=(params, batch, batch, scopes),
        out_shardings=meshes.replicated(mesh),
    )


def probe_attention(
    params: dict,
    config: Qwen25VLConfig,
    batch: GroupBatch,
    boxes: Bool[np.ndarray, "P L"],
    scopes: Mapping[str, Bool[np.ndarray, "P G T"]],
    *,
    ids: Sequence[str],
    layers: Sequence[int] | None = None,
    row: Row = "own",
    mesh: Mesh | None = None,
) -> list[ResponseAttention]:
    """Attention of given responses to their pages, one entry a response.

    Args:
      params: on the mesh, in the dtype to compute in (attention is softmaxed in float32), adapters merged.
      batch: a host batch (`training.batching.make_group_batch`).
      boxes: B, a subset of the visual tokens.
      scopes: response tokens by name; none may be padding.
      ids: the records' ids, in the order of the batch; rows and responses of length 0 are padding.
      layers: to average over; by default the last half (of 3, layers 1 and 2).
      row: see `attention_sums`.
      mesh: of this process's devices; by default the first device alone.

    Raises:
      ValueError: masks of another shape, tokens of B that are not visual, scopes over padding, layers that
        the model lacks, or responses in a row without an id.
    """
    chosen = chosen_layers(config.text.layers, layers)
    _check_masks(batch, boxes, scopes, ids)
    mesh = meshes.make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
    check_divides(len(batch.tokens), mesh)
    visual = visual_tokens(batch.prompt)
    key_sets = np.stack([boxes, visual], axis=1)
    masks = np.stack([np.asarray(mask) for mask in scopes.values()])
    program = compile_sums(config, mesh, row)
    over_scopes = NamedSharding(mesh, PartitionSpec(None, meshes.BATCH_AXES))
    on_device = put_batch((batch, key_sets), mesh)
    sums = jax.device_get(program(params, *on_device, jax.device_put(masks, over_scopes)))
    tokens = masks.sum(-1)
    found = []
    for p, g in np.argwhere(np.asarray(batch.lengths) > 0).tolist():
        sizes = int(visual[p].sum()), int(boxes[p].sum())
        of_scopes = {
            name: scope_attention(sums[c, p, g], int(tokens[c, p, g]), *sizes, chosen)
            for c, name in enumerate(scopes)
        }
        found.append(ResponseAttention(ids[p], g, *sizes, of_scopes))
    return found


def _check_masks(
    batch: GroupBatch,
    boxes: np.ndarray,
    scopes: Mapping[str, np.ndarray],
    ids: Sequence[str],
) -> None:
    lengths = np.asarray(batch.lengths)
    if not scopes:
        raise ValueError("no scope to probe: give at least one mask of response tokens")
    if len(ids) > len(lengths) or lengths[len(ids) :].any():
        raise ValueError(f"{len(ids)} ids for a batch whose responses are in {len(lengths)} rows")
    shapes = {"boxes": (boxes, batch.prompt.tokens.shape)}
    shapes |= {f"scope {name!r}": (mask, batch.tokens.shape) for name, mask in scopes.items()}
    for name, (mask, shape) in shapes.items():
        if np.shape(mask) != shape or np.asarray(mask).dtype != bool:
            raise ValueError(
                f"{name}: {np.asarray(mask).dtype}{np.shape(mask)}, but the batch takes bool{shape}"
            )
    outside = boxes & ~visual_tokens(batch.prompt)
    if outside.any():
        p = int(np.argmax(outside.any(1)))
        name = ids[p] if p < len(ids) else f"in row {p}"
        raise ValueError(
            f"record {name}: {int(outside[p].sum())} positions of its boxes are no visual tokens "
            f"(the first is {int(np.argmax(outside[p]))})"
        )
    padding = np.arange(batch.tokens.shape[-1]) >= lengths[..., None]
    for name, mask in scopes.items():
        behind = (np.asarray(mask) & padding).any(-1)
        if behind.any():
            p, g = (int(i) for i in np.argwhere(behind)[0])
            record = ids[p] if p < len(ids) else f"in row {p}"
            raise ValueError(
                f"record {record}, response {g}: scope {name!r} goes beyond its "
                f"{int(lengths[p, g])} tokens"
            )
