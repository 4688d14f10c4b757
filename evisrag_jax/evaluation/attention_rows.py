"""Rows of the attention probe: attention of sampled responses beside their counterfactual margins.

    questions, responses ─probe_attention─► ratios by scope ─┐
                         ─CED rows─► margin, correctness ────┴─► a row a response ─► summary

Source: evaluation spec 4.6, CED spec 1.9 (both probes should agree).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evisrag_jax.evaluation.attention_probe import probe_attention
from evisrag_jax.evaluation.attention_ratios import (
    ResponseAttention,
    ScopeAttention,
    attention_correlations,
    summarise_attention,
)
from evisrag_jax.evaluation.ced_probe import Probed
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.pages.regions import prompt_tokens
from evisrag_jax.prompts.sections import find_section
from evisrag_jax.prompts.spans import char_span_to_tokens
from evisrag_jax.rewards.ced.audit import evidence_grids
from evisrag_jax.training.batching import Bucket, make_group_batch

KEPT = ("id", "family", "response", "text", "answer", "right", "tokens")


def attention_batch(
    params: dict,
    model: Qwen25VLConfig,
    questions: Sequence[Probed],
    rows: Sequence[Mapping[str, Any]],
    bucket: Bucket,
    layout: VisionLayout,
    rule: str,
    *,
    sections: Sequence[str],
    row: str = "own",
    layers: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """A row a response: what `rows` (of `ced_probe.probe_batch`, the same responses in order) say of it, its
    margin (None where it is not audited), and its attention.

    rule: of boxes to tokens.  sections: scopes beside "all": tokens of a section with its tags.  row, layers:
    see `attention_probe.probe_attention`.
    """
    P, G, T = bucket.prompts, bucket.group, bucket.response_length
    boxes = np.zeros((P, bucket.prompt_length), bool)
    scopes = {name: np.zeros((P, G, T), bool) for name in ("all", *sections)}
    for p, one in enumerate(questions):
        grids = evidence_grids(one.item.record.boxes, one.item.pages, layout, rule)
        prompt = one.item.prompt
        own = prompt_tokens(grids, prompt.image_slot, prompt.image_token)
        boxes[p, : len(own)] = own
        for g, done in enumerate(one.completions):
            scopes["all"][p, g, : done.length] = True
            for name in sections:
                section = find_section(done.text, name)
                if section is not None:
                    span = char_span_to_tokens(done.offsets, section.start, section.end)
                    scopes[name][p, g, : done.length] = span
    batch = make_group_batch(
        [one.item for one in questions],
        [bucket],
        responses=[[done.ids.tolist() for done in one.completions] for one in questions],
        layout=layout,
    )
    ids = [one.item.id for one in questions]
    found = probe_attention(params, model, batch, boxes, scopes, ids=ids, layers=layers, row=row)
    known = {(one["id"], one["response"]): one for one in rows}
    out = []
    for attention in found:
        said = known[attention.id, attention.response]
        margin = said["proposals"].get("evidence", {}).get("m")
        told = {name: said[name] for name in KEPT} | {"margin": margin}
        out.append(told | {"attention": dataclasses.asdict(attention)})
    return out


def summarise_attention_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scopes with intervals over questions, and correlations with margin and correctness."""
    responses = [_read(row["attention"]) for row in rows]
    outcomes = {
        "margin": [row["margin"] for row in rows],
        "right": [row["right"] for row in rows],
    }
    scopes = summarise_attention(responses)
    links = attention_correlations(responses, outcomes)
    shares = [one.box_tokens / one.visual_tokens for one in responses if one.visual_tokens]
    return {
        "questions": len({row["id"] for row in rows}),
        "responses": len(rows),
        "accuracy": float(np.mean(outcomes["right"])) if rows else None,
        "box_share": float(np.mean(shares)) if shares else None,
        "scopes": {name: dataclasses.asdict(scope) for name, scope in scopes.items()},
        "correlations": {name: dataclasses.asdict(link) for name, link in links.items()},
    }


def _read(row: Mapping[str, Any]) -> ResponseAttention:
    """What `dataclasses.asdict` made of it."""
    scopes = {
        name: ScopeAttention(
            **{key: tuple(v) if isinstance(v, list) else v for key, v in scope.items()}
        )
        for name, scope in row["scopes"].items()
    }
    return ResponseAttention(**{**row, "scopes": scopes})
