"""Audits of groups of responses: from records with evidence boxes to drops and margins.

    record, pages ─evidence_grids─► tokens of the evidence ─draw_controls─► K controls
    G responses, their scored spans ─intervention_logps─► supports ─► Audit (drops, z, m)

A prompt without evidence boxes, and a response without a scored token, is not audited: m = 0, and
`audited` says so. Source: CED spec 1.2, 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Bool, Float

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.pages.patches import PagePatches
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.pages.regions import Grid, box_tokens
from evisrag_jax.rewards.ced import reward
from evisrag_jax.rewards.ced.config import CedConfig
from evisrag_jax.rewards.ced.controls import Ink, draw_controls
from evisrag_jax.rewards.ced.neutralise import NOTHING, Region, make_regions
from evisrag_jax.rewards.ced.scoring import intervention_logps
from evisrag_jax.runtime.host_random import text_hash
from evisrag_jax.training.forward import GroupBatch

Boxes = Sequence[Sequence[Sequence[float | int]]]  # of each image, [x, y, w, h] in original pixels


@dataclass(frozen=True, eq=False)
class Audit:
    """What the interventions did to P groups of G responses, in nats a token.

    support: with the pages as they are.  evidence, controls: drops.  z, gap, m: see `reward`, 0 where
    not audited.  audited: there is a region and a scored token.  degenerate: controls smaller than the
    evidence, which is over half of a page.
    """

    support: Float[np.ndarray, "P G"]
    evidence: Float[np.ndarray, "P G"]
    controls: Float[np.ndarray, "P G K"]
    z: Float[np.ndarray, "P G"]
    gap: Float[np.ndarray, "P G"]
    m: Float[np.ndarray, "P G"]
    audited: Bool[np.ndarray, "P G"]
    degenerate: Bool[np.ndarray, " P"]


def evidence_grids(
    boxes: Boxes | None, pages: Sequence[PagePatches], layout: VisionLayout, rule: str = "centre"
) -> tuple[Grid, ...]:
    """Tokens of the evidence on each page; empty where a page, or the record, has no boxes."""
    own = [()] * len(pages) if boxes is None else boxes
    return tuple(
        box_tokens(one, page.size, page.grid, rule=rule, merge=layout.merge)
        for one, page in zip(own, pages, strict=True)
    )


def audit_groups(
    params: dict,
    model: Qwen25VLConfig,
    batch: GroupBatch,
    proposals: Mapping[str, Sequence[tuple[Grid, ...]]],
    ids: Sequence[str],
    spans: Bool[np.ndarray, "P G T"],
    config: CedConfig,
    *,
    images: int,
    ink: Sequence[Sequence[Ink]] | None = None,
    seed: int = 0,
) -> dict[str, Audit]:
    """Audits the first len(ids) prompts of a batch, by proposed region; what they share is computed once.

    Args:
        params: in the compute dtype, on the devices of the batch.
        batch: P prompts, padding rows included.
        proposals: by name, the tokens of each prompt's region; an empty one is not audited.
        ids: of the samples: controls and noise depend on them.
        spans: tokens whose mean log-prob is the support.
        images: pages a prompt in the batch's arrays.
        ink: of each prompt's pages, for controls of the same darkness (`controls.draw_controls`).
    """
    P, options = batch.tokens.shape[0], config.region
    block = (
        1 + options.controls
    )  # every prompt has as many, so the program does not depend on the data
    regions, degenerate = [[NOTHING] for _ in ids], {}
    for name, evidence in proposals.items():
        degenerate[name] = np.zeros(P, bool)
        for p, (own, sample) in enumerate(zip(evidence, ids, strict=True)):
            dark = None if ink is None else ink[p]
            controls = draw_controls(own, sample, options, seed=seed, ink=dark)
            spared = own if options.ring_excludes else None
            drawn = [Region(own), *(Region(one, spared) for one in controls.regions)]
            regions[p] += [*drawn, *[NOTHING] * (block - len(drawn))]
            degenerate[name][p] = controls.degenerate
    regions += [[] for _ in range(P - len(ids))]
    if batch.features is not None:
        tokens = batch.features.shape[1] // images
    else:
        tokens = batch.images.merged_index.shape[-1]
    arrays = make_regions(regions, images, tokens, options)
    salts = np.zeros(P, np.uint32)
    salts[: len(ids)] = [text_hash(f"{seed} {name}") for name in ids]
    logp = intervention_logps(params, model, batch, arrays, salts, neutraliser=options.neutraliser)
    held = np.stack([reward.support(one, spans) for one in np.asarray(jax.device_get(logp))])
    out = {}
    for number, name in enumerate(proposals):
        first = 1 + number * block
        audited = arrays.inside[:, first].any((-2, -1))[:, None] & spans.any(-1)
        drops = np.where(audited, held[0] - held[first : first + block], 0.0)
        evidence, controls = drops[0], np.moveaxis(drops[1:], 0, -1)
        out[name] = Audit(
            support=held[0],
            evidence=evidence,
            controls=controls,
            z=reward.z_score(evidence, controls, config),
            gap=reward.raw_gap(evidence, controls, config),
            m=reward.margin(evidence, controls, config),
            audited=audited,
            degenerate=degenerate[name],
        )
    return out
