"""What rewards say beside their mean: spread, groups without signal, values at the bounds, hollow responses.

metric                     of what was sampled, before filter and masks
reward/C_std               standard deviation over all responses
reward/C_flat              share of groups in which all responses have one value: no signal
reward/C_low, _high        share of responses at the channel's lowest, highest value
rollout/exact              share of answers equal to a gold one (strict); not where boxes are paid
rollout/soft_credit        mean answer channel (as a share of its bound) less `exact`: credit for answers
                           that are near, or that only look right
rollout/all_no_info        responses with evidence records that all say "no relevant information"
rollout/empty_sections     responses with a section that holds nothing
rollout/length_right, _wrong   mean length by `exact`
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int32, Integer, UInt8

from evisrag_jax.data.schema import Record
from evisrag_jax.prompts.sections import (
    INSUFFICIENT,
    NO_EVIDENCE,
    TAGS,
    evidence_records,
    parse_sections,
)
from evisrag_jax.rewards import text as matching
from evisrag_jax.rewards.evisrag import RewardConfig

ALL_NO_INFO, EMPTY, EXACT = 1, 2, 4  # bits of a response's flags
ANSWER_CHANNELS = ("derivation", "accuracy", "correct")


def flags(text: str, record: Record) -> int:
    """The bits of one response."""
    sections = parse_sections(text)
    found = 0
    if "evidence" in sections:
        lines = evidence_records(text)
        if lines and all(matching.exact(one.text, NO_EVIDENCE) for one in lines):
            found |= ALL_NO_INFO
    if any(not sections[tag].text.strip() for tag in TAGS if tag in sections):
        found |= EMPTY
    if "answer" in sections:
        golds = record.answers if record.is_sufficient else (INSUFFICIENT,)
        said = sections["answer"].text
        if any(matching.exact(said, gold) for gold in golds):
            found |= EXACT
    return found


def channel_metrics(
    rewards: Float[np.ndarray, "P G C"], valid: Bool[np.ndarray, "P G"], reward: RewardConfig
) -> dict[str, float]:
    """reward/… of every channel; responses that do not exist take no part."""
    if not valid.any():
        return {}
    shown = valid[..., None]
    high = np.where(shown, rewards, -np.inf).max(1)
    low = np.where(shown, rewards, np.inf).min(1)
    real = valid.any(1)
    out = {}
    for c, name in enumerate(reward.channels):
        values = rewards[..., c][valid].astype(np.float64)
        least, most = reward.bounds[name]
        out[f"reward/{name}_std"] = float(values.std())
        out[f"reward/{name}_flat"] = float((high[real, c] - low[real, c] <= 1e-6).mean())
        out[f"reward/{name}_low"] = float((values <= least + 1e-6).mean())
        out[f"reward/{name}_high"] = float((values >= most - 1e-6).mean())
    return out


def response_metrics(
    bits: UInt8[np.ndarray, "P G"],
    length: Int32[np.ndarray, "P G"],
    rewards: Float[np.ndarray, "P G C"],
    reward: RewardConfig,
) -> dict[str, float]:
    """rollout/… from the flags; a mean over nothing is left out."""
    exact = (bits & EXACT) > 0
    out = {
        "rollout/all_no_info": float(((bits & ALL_NO_INFO) > 0).mean()),
        "rollout/empty_sections": float(((bits & EMPTY) > 0).mean()),
    }
    if reward.reads_boxes:
        return out
    out["rollout/exact"] = float(exact.mean())
    for name, which in (("right", exact), ("wrong", ~exact)):
        if which.any():
            out[f"rollout/length_{name}"] = float(length[which].mean())
    answer = next((n for n in ANSWER_CHANNELS if n in reward.channels), None)
    if answer is not None:
        values = rewards[..., reward.channels.index(answer)].astype(np.float64)
        out["rollout/soft_credit"] = float(values.mean() / reward.bounds[answer][1] - exact.mean())
    return out


def token_runs(
    values: Float[np.ndarray, " T"],
    shown: Bool[np.ndarray, " T"],
    offsets: Integer[np.ndarray, "T 2"],
) -> list[list[int | float]]:
    """Neighbouring tokens of one value as [first character, end, value] (rounded to 4 digits); what is
    not shown has no run, and neither have tokens without characters."""
    runs: list[list[int | float]] = []
    for value, on, (start, end) in zip(values, shown, offsets, strict=True):
        if not on or end <= start:
            continue
        value = round(float(value), 4)
        if runs and runs[-1][2] == value and runs[-1][1] == int(start):
            runs[-1][1] = int(end)
        else:
            runs.append([int(start), int(end), value])
    return runs
