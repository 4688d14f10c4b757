"""From supports to margins, gates and rewards: numpy functions over any leading axes.

    support s = mean log-prob of the scored tokens;  drop d = s(page) - s(page with a region neutralised)
    margin m compares the evidence's drop with the controls';  gate g(m);  reward by `CedConfig.mode`

Source: CED spec 1.2, 1.5.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from evisrag_jax.rewards.ced.config import CedConfig


def support(
    logp: Float[np.ndarray, "*B T"], span: Bool[np.ndarray, "*B T"]
) -> Float[np.ndarray, "*B"]:
    """Mean log-prob (nats a token) of the span; 0 for an empty one."""
    total = np.where(span, logp, 0.0).sum(-1, dtype=np.float64)
    return np.asarray(total / np.maximum(span.sum(-1), 1))


def z_score(
    evidence: Float[np.ndarray, "*B"], controls: Float[np.ndarray, "*B K"], config: CedConfig
) -> Float[np.ndarray, "*B"]:
    """(d_ev - mean) / (std + sigma_floor) of the drops, population std; d_ev itself without controls."""
    evidence, controls = _floored(evidence, config), _floored(controls, config)
    if not controls.shape[-1]:
        return evidence
    return np.asarray((evidence - controls.mean(-1)) / (controls.std(-1) + config.sigma_floor))


def raw_gap(
    evidence: Float[np.ndarray, "*B"], controls: Float[np.ndarray, "*B K"], config: CedConfig
) -> Float[np.ndarray, "*B"]:
    """d_ev - mean of the controls' drops (nats a token)."""
    evidence, controls = _floored(evidence, config), _floored(controls, config)
    return np.asarray(evidence - (controls.mean(-1) if controls.shape[-1] else 0.0))


def margin(
    evidence: Float[np.ndarray, "*B"], controls: Float[np.ndarray, "*B K"], config: CedConfig
) -> Float[np.ndarray, "*B"]:
    """m of `config.margin` from the drops of the evidence and of its controls."""
    if config.margin == "tanh_z":
        return np.asarray(np.tanh(z_score(evidence, controls, config)))
    gap = raw_gap(evidence, controls, config)
    return np.asarray(np.tanh(gap)) if config.margin == "tanh_raw" else gap


def _floored(drop: np.ndarray, config: CedConfig) -> np.ndarray:
    drop = np.asarray(drop, np.float64)
    return np.where(np.abs(drop) < config.drop_floor, 0.0, drop)


def gate(m: Float[np.ndarray, "*B"], config: CedConfig) -> Float[np.ndarray, "*B"]:
    """g(m) in [0, 1]; a half at m = 0 for the soft forms, 1 there for the hard one."""
    m = np.asarray(m, np.float64)
    if config.gate == "none":
        return np.ones_like(m)
    if config.gate == "hard" or not config.tau_gate:
        return np.asarray(m >= 0, np.float64)
    slope = 1.0 if config.gate == "tanh" else 0.5
    return np.asarray(0.5 * (1 + np.tanh(slope * m / config.tau_gate)))


def ced_reward(
    right: Bool[np.ndarray, "*B"],
    m: Float[np.ndarray, "*B"],
    config: CedConfig,
    *,
    audited: Bool[np.ndarray, "*B"] | None = None,
    answer_margin: Float[np.ndarray, "*B"] | None = None,
    parsable: Bool[np.ndarray, "*B"] | None = None,
    gold: Bool[np.ndarray, "*B"] | None = None,
) -> Float[np.ndarray, "*B"]:
    """The reward of each response.

    Args:
        right: the answer is right.
        m: margins.
        audited: responses that have a margin and whose family is routed to it; others are paid c alone.
            Default all.
        answer_margin: δ_ans, the change of the yes/no log-odds towards the given answer; NaN or None
            where the answer is neither.
        parsable: the response has an answer. Default all.
        gold: there is a gold answer; c is 0 without. Default all.
    """
    right, m = np.asarray(right, bool), np.asarray(m, np.float64)
    shape = np.broadcast_shapes(right.shape, m.shape)
    everywhere = np.ones(shape, bool)
    audited = everywhere if audited is None else np.asarray(audited, bool)
    parsable = everywhere if parsable is None else np.asarray(parsable, bool)
    gold = everywhere if gold is None else np.asarray(gold, bool)
    plain = np.where(gold, np.where(right, config.right, config.wrong), 0.0)
    toward = np.zeros(shape) if answer_margin is None else np.nan_to_num(answer_margin)
    toward = config.alpha_ans * np.tanh(toward / config.tau_ans)
    if config.mode == "correctness_only":
        reward = plain
    elif config.mode == "additive":
        reward = plain + config.eps_tie * m
    elif config.mode == "gated":
        g = gate(m, config)
        if config.gate_applies == "correct_only":
            g = np.where(right, g, 1.0)
        reward = config.alpha_resp * plain * g + toward + config.eps_tie * m
    else:
        base = config.alpha_resp * np.tanh(m / config.tau_resp) + toward
        judged = np.where(right, 0.25 + 0.75 * np.maximum(0, base), -0.60 + 0.20 * base)
        reward = np.where(gold, judged, 0.25 * base)
        reward = np.where(parsable, reward, -1.00 + 0.10 * base)
    reward = np.where(audited, reward, plain)
    if config.clip is not None:
        reward = np.clip(reward, *config.clip)
    if config.unparsable is not None:
        reward = np.where(parsable, reward, np.minimum(reward, config.unparsable))
    return np.asarray(reward)
