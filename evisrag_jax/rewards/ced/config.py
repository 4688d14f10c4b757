"""The switches of CED and its presets.

    preset            reward of a right answer at margin m
    paper             clip(0.7 c g(m) + 0.3 tanh(yes/no margin) + 0.1 m, -1.25, 1)
    released          c g(m) + 0.1 m
    additive          c + 0.1 m
    correctness_only  c
    soft_shaping      0.25 + 0.75 max(0, base), base = 0.7 tanh(m / 0.2) + 0.3 tanh(yes/no margin), clipped

with c = 1 for right, -0.25 for wrong, 0 without gold, and g(m) = (1 + tanh(m / 0.2)) / 2. Source: CED
spec 1.1, 1.2, 1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from evisrag_jax.pages.regions import RULES

MARGINS = ("tanh_z", "raw", "tanh_raw")
GATES = ("tanh", "sigmoid", "hard", "none")
MODES = ("gated", "additive", "correctness_only", "soft_shaping")
NEUTRALISERS = ("mean", "mean_local", "zero", "noise", "pixel")


@dataclass(frozen=True)
class RegionConfig:
    """Which tokens are neutralised, and how.

    rule         boxes to tokens, see `pages.regions.box_tokens`
    neutraliser  mean: the mean of the region's ring; mean_local: each token the mean of its own ring;
                 zero; noise: normal with the standard deviation of the region's values; pixel: the ring's
                 mean colour, before the tower, which then runs once a region
    ring         width of the ring in merged tokens
    ring_excludes  the ring of a control leaves the evidence out, which would else be copied there
    controls     K
    max_iou, tries  of a control with the evidence, and how many places are drawn before single tokens are
    match_ink    controls on pages are as dark as the evidence, to a quarter: blank margins would make
                 every margin look good
    other_page   the last control lies on a page without evidence, where there is one
    """

    rule: str = "centre"
    neutraliser: str = "mean"
    ring: int = 2
    ring_excludes: bool = True
    controls: int = 3
    max_iou: float = 0.05
    tries: int = 24
    match_ink: bool = False
    other_page: bool = False

    def __post_init__(self) -> None:
        _among(self, rule=RULES, neutraliser=NEUTRALISERS)
        if self.ring < 1 or self.tries < 1 or self.controls < 0:
            raise ValueError(
                f"ring={self.ring} and tries={self.tries} must be at least 1, controls={self.controls} "
                "not negative"
            )
        if not 0 <= self.max_iou < 1:
            raise ValueError(f"max_iou={self.max_iou}; from 0 to below 1")


@dataclass(frozen=True)
class CedConfig:
    """How drops of support become a reward.

    mode         see the module
    margin       tanh_z: tanh((d_ev - mean) / (std + sigma_floor)) over the controls' drops; raw: d_ev -
                 mean; tanh_raw: its tanh
    drop_floor   drops below it (nats a token) are 0: they are rounding of the log-probs
    gate, tau_gate  g(m): tanh (1 + tanh(m/tau))/2; sigmoid of m/tau; hard m >= 0; none 1. tau 0 is hard
    gate_applies "all" answers, as published, or "correct_only": a wrong answer keeps its whole penalty
    alpha_resp, tau_resp, alpha_ans, tau_ans, eps_tie, clip  see the module; clip None for none
    right, wrong  values of c
    unparsable   reward of a response without an answer is at most this; None for no such penalty
    """

    mode: str = "gated"
    margin: str = "tanh_z"
    sigma_floor: float = 1e-6
    drop_floor: float = 1e-5
    gate: str = "tanh"
    tau_gate: float = 0.2
    gate_applies: str = "all"
    alpha_resp: float = 0.7
    tau_resp: float = 0.2
    alpha_ans: float = 0.3
    tau_ans: float = 1.0
    eps_tie: float = 0.1
    clip: tuple[float, float] | None = (-1.25, 1.0)
    right: float = 1.0
    wrong: float = -0.25
    unparsable: float | None = -0.75
    region: RegionConfig = field(default_factory=RegionConfig)

    def __post_init__(self) -> None:
        _among(
            self,
            mode=MODES,
            margin=MARGINS,
            gate=GATES,
            gate_applies=("all", "correct_only"),
        )
        for name in ("sigma_floor", "drop_floor", "tau_gate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; not negative")
        if not (self.tau_resp > 0 and self.tau_ans > 0):
            raise ValueError(f"tau_resp={self.tau_resp} and tau_ans={self.tau_ans}; positive")
        if self.margin == "tanh_z" and not self.sigma_floor:
            raise ValueError("sigma_floor=0 divides by 0 where the controls' drops are equal")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip={self.clip}; (low, high)")


def _among(config: Any, **choices: tuple[str, ...]) -> None:
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)!r}; one of {', '.join(allowed)}")


PRESETS: dict[str, Callable[[], CedConfig]] = {
    "paper": CedConfig,
    "released": lambda: CedConfig(alpha_resp=1.0, alpha_ans=0.0, clip=None, unparsable=None),
    "additive": lambda: CedConfig(mode="additive", clip=None),
    "correctness_only": lambda: CedConfig(mode="correctness_only", clip=None),
    "soft_shaping": lambda: CedConfig(mode="soft_shaping", unparsable=None),
}


def preset(name: str, **changes: Any) -> CedConfig:
    """The settings of a preset, with fields changed; ValueError that lists the names for another."""
    if name not in PRESETS:
        raise ValueError(f"CED preset {name!r}; one of {', '.join(PRESETS)}")
    return replace(PRESETS[name](), **changes)
