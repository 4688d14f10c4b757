"""Ratios of attention on evidence boxes, from sums: rho and lift by scope and layer, over questions, and
with what they go together.

    sums over B and V, a layer --scope_attention--> rho, lift --summarise--> means with intervals
                                                        └-----correlations--> with margin, correctness

A ratio that nothing defines is None and is counted by its reason, never taken as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from evisrag_jax.evaluation.correlation import Correlation, correlate
from evisrag_jax.evaluation.statistics import RESAMPLES, Interval, bootstrap

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
