"""Where responses look: the share of their attention to the pages that falls on the evidence.

    a[t, j]   attention of response token t on prompt token j, mean over heads and over some layers
    B in V    visual tokens inside the evidence boxes, and all visual tokens
    rho       sum over t in scope, j in B of a[t, j]  /  the same over j in V
    lift      rho · |V| / |B|: 1 where attention ignores the boxes (rho alone grows with their area)

A teacher-forced pass returns two sums a layer, scope and response and no map: each block of rows is
contracted with B and V inside its layer, so memory is that of one block of one layer. The ratio is
the spec's attention ratio (4.6); the published idea (EVisRAG, section 5) gives no formula.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from evisrag_jax.evaluation.correlation import Correlation, correlate
from evisrag_jax.evaluation.statistics import RESAMPLES, Interval, bootstrap
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.batching import check_divides, put_batch
from evisrag_jax.training.forward import GroupBatch

#: Whose query is token t's row: that of t itself, or of the token before, whose state predicts t.
Row = Literal["own", "predicting"]

#: Why a response has no ratio in a scope, in the order in which it is checked.
NO_VISUAL, NO_BOXES, NO_TOKENS, NO_MASS = (
    "no_visual_tokens",
    "no_box_tokens",
    "empty_scope",
    "no_attention_on_pages",
)


@dataclass(frozen=True)
class ScopeAttention:
    """Attention of the tokens of one scope of one response; None where a ratio is undefined.

    tokens: response tokens in the scope.
    rho, lift: over the chosen layers.
    rho_by_layer: of every layer of the model.
    box_mass, visual_mass: of every layer, the share of a token's attention that B and V get: sums divided
        by `tokens`, 0 of an empty scope.
    undefined: why rho is None: NO_VISUAL, NO_BOXES, NO_TOKENS or NO_MASS (of 0 in float32); else None.
    """

    tokens: int
    rho: float | None
    lift: float | None
    rho_by_layer: tuple[float | None, ...]
    box_mass: tuple[float, ...]
    visual_mass: tuple[float, ...]
    undefined: str | None


@dataclass(frozen=True)
class ResponseAttention:
    """One response: the record's id, its place in the group, |V| and |B| of its prompt, and its scopes."""

    id: str
    response: int
    visual_tokens: int
    box_tokens: int
    scopes: dict[str, ScopeAttention]


@dataclass(frozen=True)
class ScopeSummary:
    """A scope over questions. rho, lift: means over each question's defined responses, then over questions,
    with intervals over questions; None when nothing is defined. undefined: responses by reason."""

    responses: int
    undefined: dict[str, int]
    rho: Interval | None
    lift: Interval | None
    rho_by_layer: tuple[float | None, ...]


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


def chosen_layers(depth: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers to average over, of `depth`; ValueError, naming them, for none, twins or unknown ones."""
    if layers is None:
        return tuple(range(depth // 2, depth))
    if not layers or len(set(layers)) < len(layers) or not all(0 <= n < depth for n in layers):
        raise ValueError(
            f"layers={tuple(layers)}: different ones from 0 to {depth - 1}, and at least one"
        )
    return tuple(layers)


def scope_attention(
    sums: Float[np.ndarray, "layers 2"],
    tokens: int,
    visual: int,
    boxes: int,
    layers: Sequence[int],
) -> ScopeAttention:
    """Ratios of one response's sums over B and V in one scope.

    tokens: in the scope.  visual, boxes: |V|, |B|.  layers: to average over.
    """
    sums = np.asarray(sums, np.float64)
    on_boxes, on_visual = sums[list(layers)].sum(0).tolist()
    reasons = {
        NO_VISUAL: visual == 0,
        NO_BOXES: boxes == 0,
        NO_TOKENS: tokens == 0,
        NO_MASS: on_visual == 0,
    }
    undefined = next((reason for reason, holds in reasons.items() if holds), None)
    rho = None if undefined else on_boxes / on_visual
    by_layer = tuple(
        b / v if undefined in (None, NO_MASS) and v else None for b, v in sums.tolist()
    )
    box_mass, visual_mass = (sums.T / max(tokens, 1)).tolist()
    return ScopeAttention(
        tokens=tokens,
        rho=rho,
        lift=None if rho is None else rho * visual / boxes,
        rho_by_layer=by_layer,
        box_mass=tuple(box_mass),
        visual_mass=tuple(visual_mass),
        undefined=undefined,
    )


def summarise_attention(
    responses: Sequence[ResponseAttention],
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, ScopeSummary]:
    """Each scope's means over questions, and how many responses have no ratio and why."""
    out = {}
    for name in responses[0].scopes if responses else ():
        of = [(one.id, one.scopes[name]) for one in responses]

        def interval(ratio: str, of=of) -> Interval | None:
            means = _question_means([(id, getattr(scope, ratio)) for id, scope in of])
            if not means:
                return None
            return bootstrap([means], resamples=resamples, level=level, seed=seed)

        layers = range(len(of[0][1].rho_by_layer))
        by_layer = [_question_means([(id, s.rho_by_layer[n]) for id, s in of]) for n in layers]
        out[name] = ScopeSummary(
            responses=len(of),
            undefined=dict(Counter(s.undefined for _, s in of if s.undefined)),
            rho=interval("rho"),
            lift=interval("lift"),
            rho_by_layer=tuple(float(np.mean([*m.values()])) if m else None for m in by_layer),
        )
    return out


def attention_correlations(
    responses: Sequence[ResponseAttention],
    outcomes: Mapping[str, Sequence[float | int | bool | None]],
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Correlation]:
    """Correlations of rho and lift with outcomes of the same responses, by "scope/ratio/outcome/kind".

    outcomes: by name (say, the counterfactual margin, and whether the answer is right) a value for each
    response, None where there is none. kinds are "pearson" and "spearman"; intervals resample questions.
    """
    ids = [one.id for one in responses]
    out = {}
    for scope in responses[0].scopes if responses else ():
        for ratio in ("rho", "lift"):
            x = [getattr(one.scopes[scope], ratio) for one in responses]
            for name, y in outcomes.items():
                for kind in ("pearson", "spearman"):
                    out[f"{scope}/{ratio}/{name}/{kind}"] = correlate(
                        x, y, ids, kind=kind, resamples=resamples, level=level, seed=seed
                    )
    return out


def _question_means(values: Sequence[tuple[str, float | None]]) -> dict[str, float]:
    by_question: dict[str, list[float]] = {}
    for id, value in values:
        if value is not None:
            by_question.setdefault(id, []).append(value)
    return {id: float(np.mean(own)) for id, own in by_question.items()}


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
