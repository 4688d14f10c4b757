"""Recipes: named settings of the one objective (`config.RLConfig`).

    recipe             rewards                        advantages        loss
    paper              EVisRAG eq. 11-13              scopes, eq. 7-9   clip 0.2 / 0.28, token mean
    code               six channels, as released      one a channel     dual clip, K by micro-batch
    strict             as paper, read strictly        as paper          as paper
    grpo               answer + perception + format   one a response    clip 0.2, a mean a response, KL 0.001
    dapo               the same and soft overlong     one a response    clip-higher, token mean, band filter
    dr_grpo            as grpo                        undivided         sum over T, no KL
    gspo               as grpo                        one a response    sequence ratio
    rloo               as grpo                        leave-one-out     as grpo
    stepgrpo_r1vl      right, key steps, layout       one a response    as grpo, G 4, T 1.2
    stepgrpo_router    a group a step, its reward     one a response    as grpo
    perception_r1      IoU of boxes + format          one a response    as grpo, no thinking
    vlm_r1             IoU or mAP + format            one a response    as grpo, thinks first
    papo               as dapo, no filter             one a response    - γ KL to blackened pages, entropies
    vppo               as dapo                        shaped            the 40 % tokens that see most

Sources: EVisRAG spec 3.2, 14; baselines spec 3.1. Fields may be changed on top of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.config import RLConfig, RLConfigError
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.rl.masked import MaskedConfig


def preset(name: str, **changes: Any) -> RLConfig:
    """The settings of a recipe, with fields changed; RLConfigError that lists the names for another."""
    if name not in RECIPES:
        raise RLConfigError(f"recipe {name!r}; one of {', '.join(RECIPES)}")
    return replace(RECIPES[name](), **changes)


def _paper() -> RLConfig:
    return RLConfig(temperature=1.2)


def _code() -> RLConfig:
    """The release but for its NaN: a slice or a channel with nothing to train on adds 0."""
    return RLConfig(
        estimator="code",
        scope_match="token_ids",
        exact_zero=False,
        reward=RewardConfig(mode="code"),
        loss=PolicyLossConfig.code(nan_policy="safe_zero"),
        filter=FilterConfig(rule="mean_band", surplus="discard"),
    )


def _strict() -> RLConfig:
    return replace(_paper(), reward=RewardConfig(mode="strict"))


def _grpo(**changes: Any) -> RLConfig:
    loss = PolicyLossConfig(clip_high=0.2, average="sequence", kl_coef=0.001)
    return replace(RLConfig(estimator="grpo", loss=loss), **changes)


def _dapo(**changes: Any) -> RLConfig:
    base = RLConfig(
        estimator="grpo",
        reward=RewardConfig(length_penalty=True, overlong_min=0),
        loss=PolicyLossConfig(),
        filter=FilterConfig(rule="mean_band", metric="derivation", low=0.01, high=0.99),
    )
    return replace(base, **changes)


def _dr_grpo() -> RLConfig:
    return _grpo(scale=False, loss=PolicyLossConfig(clip_high=0.2, average="constant"))


def _gspo() -> RLConfig:
    loss = PolicyLossConfig(clip_low=3e-4, clip_high=4e-4, ratio="sequence", average="sequence")
    return _grpo(loss=loss)


def _stepgrpo_r1vl() -> RLConfig:
    return _grpo(reward=RewardConfig(kind="r1vl"), group=4, temperature=1.2)


def _perception_r1() -> RLConfig:
    return _grpo(reward=RewardConfig(kind="perception_r1", sections=("answer",)))


def _vlm_r1() -> RLConfig:
    return _grpo(reward=RewardConfig(kind="vlm_r1", sections=("think", "answer")))


def _papo() -> RLConfig:
    """DAPO's form of PAPO, 7B: γ 0.01, both entropies 0.03, 60 % of the patches black, no filter."""
    return _dapo(
        loss=PolicyLossConfig(entropy_coef=-0.03, entropy="sampled"),
        filter=FilterConfig(),
        masked=MaskedConfig(share=0.6, coef=0.01, entropy_coef=0.03, gradient=True),
    )


def _vppo() -> RLConfig:
    """7B: top 40 %, factors from 0.9, half of the patches black, entropy penalty 0.06."""
    return _dapo(
        loss=PolicyLossConfig(entropy_coef=-0.06),
        masked=MaskedConfig(share=0.5, top=0.4, factor_low=0.9),
    )


RECIPES: dict[str, Callable[[], RLConfig]] = {
    "paper": _paper,
    "code": _code,
    "strict": _strict,
    "grpo": _grpo,
    "dapo": _dapo,
    "dr_grpo": _dr_grpo,
    "gspo": _gspo,
    "rloo": lambda: _grpo(estimator="rloo"),
    "stepgrpo_r1vl": _stepgrpo_r1vl,
    "stepgrpo_router": lambda: _grpo(step_prompts="gold"),
    "perception_r1": _perception_r1,
    "vlm_r1": _vlm_r1,
    "papo": _papo,
    "vppo": _vppo,
}
