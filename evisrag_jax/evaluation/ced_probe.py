"""The CED probe: are evidence regions worth more to a response than other regions of the same size?

    questions ─G responses each─► spans ─┬─ evidence ─────────► drops, margin ─┐
                                         ├─ perturbed regions ─► …              ├─► rates, means, groups, rerank
                                         └─ blindfold: uniform pages ─► …       ┘

Nothing is trained. Source: CED spec 1.7.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from evisrag_jax.evaluation import proposals
from evisrag_jax.evaluation.metrics import answer_text, strict_scores
from evisrag_jax.evaluation.rerank import rerank
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.pages.patches import PagePatches
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.pages.regions import Grid
from evisrag_jax.rewards.ced.audit import Audit, audit_groups, evidence_grids
from evisrag_jax.rewards.ced.config import CedConfig, preset
from evisrag_jax.rewards.ced.controls import Ink
from evisrag_jax.rewards.ced.reward import ced_reward
from evisrag_jax.rewards.ced.spans import isolated_answer, relevant_tokens, scope_tokens
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.training.batching import Bucket, Prepared, make_group_batch

SCOPES = ("records", "evidence", "answer", "answer_alone", "full")
CONSTANT = 1e-8  # a group's std of plain rewards from which on it counts as not constant
ZERO_VARIANCE = 1e-4  # and of final rewards below which it teaches nothing
DIFFERENT = 1e-4  # difference of two rewards that counts
BLINDFOLD = "blindfold"


@dataclass(frozen=True)
class Probed:
    """A question with its responses.  ink: of its pages, where controls are matched by it
    (`rewards.ced.controls.draw_controls`)."""

    item: Prepared
    completions: list[Completion]
    ink: tuple[Ink, ...] | None = None


def scored_tokens(
    done: Completion, scope: str, pages: Sequence[int]
) -> tuple[list[int], np.ndarray]:
    """(ids to score, which of them count).

    records: lines of the pages with boxes.  evidence, answer: the text of the section.  answer_alone: the
    answer right behind the prompt.  full: all tokens.
    """
    ids = done.ids.tolist()
    if scope == "records":
        return ids, relevant_tokens(done.text, done.offsets, pages)
    if scope == "answer_alone":
        first, span = isolated_answer(done.text, done.offsets)
        return (ids[first:], span[first:]) if first < len(ids) else (ids, span)
    return ids, scope_tokens(done.text, done.offsets, scope)


def blank_page(page: PagePatches) -> PagePatches:
    """The page in its mean colour."""
    held = page.patches[page.mask].reshape(-1, 3, page.patches.shape[-1] // 3)
    colour = np.repeat(held.mean((0, 2)), held.shape[-1])
    patches = np.where(page.mask[..., None], colour, 0.0).astype(np.float32)
    return PagePatches(
        patches, page.mask, page.rowcol, page.merged_index, page.grid, page.size, "blank"
    )


def probe_batch(
    params: dict,
    model: Qwen25VLConfig,
    questions: Sequence[Probed],
    bucket: Bucket,
    layout: VisionLayout,
    config: CedConfig,
    scope: str,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """A row a response: identity, correctness, and the audit under each proposal.

    Args:
        questions: at most bucket.prompts, with evidence boxes.
        names: of `proposals.NAMES`, and "blindfold".
    """
    P, G, T = bucket.prompts, bucket.group, bucket.response_length
    spans, responses = np.zeros((P, G, T), bool), []
    for p, one in enumerate(questions):
        pages = [n for n, own in enumerate(one.item.record.boxes, 1) if own]
        group = [scored_tokens(done, scope, pages) for done in one.completions]
        for g, (ids, span) in enumerate(group):
            spans[p, g, : len(ids)] = span
        responses.append([ids for ids, _ in group])
    items = [one.item for one in questions]
    ids = [item.id for item in items]

    def audit(shown: Sequence[Prepared], names: Sequence[str]) -> dict[str, Audit]:
        batch = make_group_batch(shown, [bucket], responses=responses, layout=layout)
        found = {name: [_proposed(name, item, layout, config) for item in items] for name in names}
        ink = [one.ink for one in questions] if config.region.match_ink else None
        return audit_groups(
            params, model, batch, found, ids, spans, config, images=bucket.images, ink=ink
        )

    audits = audit(items, [name for name in names if name != BLINDFOLD])
    if BLINDFOLD in names:
        blank = [replace(item, pages=tuple(map(blank_page, item.pages))) for item in items]
        audits[BLINDFOLD] = audit(blank, ["evidence"])["evidence"]
    return [
        _row(one, p, g, spans[p, g], audits)
        for p, one in enumerate(questions)
        for g in range(len(one.completions))
    ]


def _proposed(
    name: str, item: Prepared, layout: VisionLayout, config: CedConfig
) -> tuple[Grid, ...]:
    """Tokens of a question's region under a perturbation; empty where that cannot be drawn."""
    sizes = [page.size for page in item.pages]
    boxes = proposals.propose(name, item.record.boxes, sizes, item.id)
    return evidence_grids(boxes, item.pages, layout, config.region.rule)


def _row(one: Probed, p: int, g: int, span: np.ndarray, audits: Mapping[str, Audit]) -> dict:
    done, record = one.completions[g], one.item.record
    answer = answer_text(done.text, given="")
    first = next(iter(audits.values()))
    return {
        "id": record.id,
        "family": record.family or "",
        "response": g,
        "text": done.text,
        "answer": answer,
        "right": bool(strict_scores(answer, record.answers)["em"]),
        "logp": _answer_logp(done),
        "tokens": int(span.sum()),
        "support": float(first.support[p, g]),
        "degenerate": bool(first.degenerate[p]),
        "proposals": {
            name: {
                "drop": float(audit.evidence[p, g]),
                "controls": audit.controls[p, g].tolist(),
                "z": float(audit.z[p, g]),
                "gap": float(audit.gap[p, g]),
                "m": float(audit.m[p, g]),
            }
            for name, audit in audits.items()
            if audit.audited[p, g]
        },
    }


def _answer_logp(done: Completion) -> float:
    """Mean log-prob (nats a token) of the answer as it was sampled; of the whole response without one."""
    own = scope_tokens(done.text, done.offsets, "answer")
    return float(done.logp[own if own.any() else slice(None)].mean()) if done.length else 0.0


def summarise_probe(rows: Sequence[Mapping[str, Any]], config: CedConfig) -> dict[str, Any]:
    """Rates and means a proposal and family, group statistics, and reranks by each reward."""
    families = sorted({row["family"] for row in rows})
    summary: dict[str, Any] = {
        "questions": len({row["id"] for row in rows}),
        "responses": len(rows),
        "audited": sum("evidence" in row["proposals"] for row in rows),
        "degenerate": sum(row["degenerate"] for row in rows),
        "accuracy": float(np.mean([row["right"] for row in rows])) if rows else None,
        "proposals": _by_proposal(rows),
        "families": {
            family: {"proposals": _by_proposal(own), "groups": group_statistics(own, config)}
            for family in families
            if (own := [row for row in rows if row["family"] == family])
        },
        "groups": group_statistics(rows, config),
    }
    return summary | {"rerank": _reranks(rows)}


def _by_proposal(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int]]:
    """Relevant > random rate (ties count as no) and means over responses; the standard error is over
    questions."""
    found: dict[str, list[tuple[str, Mapping[str, float]]]] = defaultdict(list)
    for row in rows:
        for name, audit in row["proposals"].items():
            found[name].append((row["id"], audit))
    out = {}
    for name, audits in found.items():
        by_question = defaultdict(list)
        for id, audit in audits:
            by_question[id].append(audit["m"])
        means = [float(np.mean(values)) for values in by_question.values()]
        error = float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else None
        out[name] = {
            "n": len(audits),
            "rate": float(np.mean([audit["gap"] > 0 for _, audit in audits])),
            "m": float(np.mean([audit["m"] for _, audit in audits])),
            "m_se": error,
            "z": float(np.mean([audit["z"] for _, audit in audits])),
            "gap": float(np.mean([audit["gap"] for _, audit in audits])),
            "drop": float(np.mean([audit["drop"] for _, audit in audits])),
        }
    return out


def _rewards(rows: Sequence[Mapping[str, Any]], config: CedConfig) -> np.ndarray:
    right = np.array([row["right"] for row in rows], bool)
    m = np.array([row["proposals"].get("evidence", {"m": 0.0})["m"] for row in rows], np.float64)
    audited = np.array(["evidence" in row["proposals"] for row in rows], bool)
    parsable = np.array([bool(row["answer"]) for row in rows], bool)
    return ced_reward(right, m, config, audited=audited, parsable=parsable)


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["id"]].append(row)
    return [group for group in groups.values() if len(group) > 1]


def group_statistics(
    rows: Sequence[Mapping[str, Any]], config: CedConfig
) -> dict[str, float | int | None]:
    """What a group-relative update would see: shares of groups whose rewards differ, and of those where two
    responses with one answer are paid differently; beside them the same of correctness alone."""
    groups = _groups(rows)
    out: dict[str, float | int | None] = {"groups": len(groups)}
    if not groups:
        return out
    for label, own in (("", config), ("correctness_", preset("correctness_only"))):
        stds, same = [], []
        for group in groups:
            reward = _rewards(group, own)
            stds.append(float(reward.std()))
            answers = defaultdict(list)
            for row, value in zip(group, reward, strict=True):
                answers[" ".join(row["answer"].lower().split())].append(value)
            same.append(any(np.ptp(values) > DIFFERENT for values in answers.values()))
        out |= {
            f"{label}non_constant": float(np.mean([std >= CONSTANT for std in stds])),
            f"{label}zero_variance": float(np.mean([std < ZERO_VARIANCE for std in stds])),
            f"{label}std": float(np.mean(stds)),
            f"{label}same_answer_different_reward": float(np.mean(same)),
        }
    return out


def _reranks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Offline rerank of each question's responses by the rewards of the presets."""
    groups = _groups(rows)
    if not groups or len({len(group) for group in groups}) > 1:
        return {}
    logp = np.array([[row["logp"] for row in group] for group in groups])
    right = np.array([[row["right"] for row in group] for group in groups])
    texts = [[" ".join(row["text"].split()) for row in group] for group in groups]
    out = {}
    for name in ("correctness_only", "additive", "released", "paper"):
        scores = np.stack([_rewards(group, preset(name)) for group in groups])
        done = asdict(rerank(scores, logp, right, texts))
        done.pop("chosen")
        out[name] = done
    return out
