"""The arms: what they start from and which switches of the one objective they set.

    arm                     start     recipe                    what is paid, and where
    generic_dapo            generic   DAPO                      answer + format on every token
    evidence_dapo           evidence  DAPO                      perception + answer + format on every token
    evidence_stepgrpo       evidence  StepGRPO (R1-VL)          right + key steps + layout on every token
    stepgrpo_router         evidence  StepGRPO (R1-Router)      a group a step, each its own reward
    rs_grpo_paper           evidence  RS-GRPO, paper            each channel on its scope
    rs_grpo_code            evidence  RS-GRPO, released code    six channels, token-id scopes
    no_perception_reward    evidence  RS-GRPO without it        answer on think and answer, format everywhere
    no_scopes               evidence  RS-GRPO without scopes    mean of the channels on every token
    no_perception_stages    generic   RS-GRPO                   answer + format on think and answer

Apart from that all are equal: prompts, G, steps, sampling, optimiser, questions of a seed, clip 0.2 / 0.28
and token mean (the code arm has its own divisor and dual clip), no KL, and groups dropped by the recipe's
rule (DAPO: mean answer reward outside 0.01 .. 0.99; RS-GRPO, paper: no spread) without drawing others in
their place, so that every arm sees the same questions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evisrag_jax.cli.config import load_config, to_dataclass
from evisrag_jax.rl.config import RLRunConfig

BAND = {"rule": "mean_band", "metric": "derivation", "low": 0.01, "high": 0.99}
SPREAD = {"rule": "variance"}
COT = {"sections": ("think", "answer"), "unpaid": ("perception",)}


@dataclass(frozen=True)
class Arm:
    """title: in tables.  recipe: of configs/rl.py.  start: "evidence" or "generic".  reward, rl, loss,
    filter: fields set on top of the recipe."""

    title: str
    recipe: str
    start: str = "evidence"
    reward: dict[str, Any] = field(default_factory=dict)
    rl: dict[str, Any] = field(default_factory=dict)
    filter: dict[str, Any] = field(default_factory=dict)


ARMS = {
    "rs_grpo_paper": Arm("Evidence + RS-GRPO (paper)", "paper", filter=SPREAD),
    "generic_dapo": Arm("Generic CoT + DAPO", "dapo", "generic", reward=COT, filter=BAND),
    "evidence_dapo": Arm("Evidence + DAPO", "dapo", filter=BAND),
    "evidence_stepgrpo": Arm("Evidence + StepGRPO (R1-VL)", "stepgrpo_r1vl", filter=SPREAD),
    "rs_grpo_code": Arm("Evidence + RS-GRPO (code, token ids)", "code"),
    "no_perception_reward": Arm(
        "RS-GRPO without perception reward",
        "paper",
        reward={"unpaid": ("perception",)},
        filter=SPREAD,
    ),
    "no_scopes": Arm("RS-GRPO without scopes", "paper", rl={"scoped": False}, filter=SPREAD),
    "no_perception_stages": Arm(
        "RS-GRPO without the perception stages", "paper", "generic", reward=COT, filter=SPREAD
    ),
    "stepgrpo_router": Arm("Evidence + StepGRPO (R1-Router)", "stepgrpo_router"),
}


@dataclass(frozen=True)
class Budget:
    """What every arm has: steps of prompts x group responses, the learning rate, held-out questions, and
    steps of the generic family's start."""

    steps: int = 30
    prompts: int = 8
    group: int = 8
    rate: float = 2e-4
    questions: int = 400
    lessons: int = 600


def run_config(arm: Arm, budget: Budget, *, model: str, data: str, seed: int) -> RLRunConfig:
    """The RL run of an arm and seed."""
    config, _ = load_config(f"rl.py:mini-{arm.recipe}")
    with config.unlocked():
        config.model.path, config.data.path, config.seed = model, data, seed
        config.steps = config.save_every = budget.steps
        config.tensorboard, config.rollouts_every = False, budget.steps
        config.interference_every = 10
        rl = config.rl
        rl.prompts, rl.group, rl.optim.learning_rate = budget.prompts, budget.group, budget.rate
        if arm.recipe != "code":
            rl.loss.update(
                {"clip_low": 0.2, "clip_high": 0.28, "average": "token_batch", "kl_coef": 0.0}
            )
        rl.filter.update({"tries": 1, "train_on_partial": True, "surplus": "discard"})
        rl.filter.update(arm.filter)
        rl.reward.update(arm.reward)
        rl.update(arm.rl)
        if arm.recipe.startswith("stepgrpo_router"):
            config.prompt_length = 144  # the evidence stands in the second step's prompt
    return to_dataclass(config, RLRunConfig)


def cluster_command(name: str) -> str:
    """The `evisrag rl` command of an arm for a published checkpoint: the recipe at the sizes of
    configs/rl.py, with the arm's own fields; SFT is the checkpoint of the arm's prompt family."""
    arm = ARMS[name]
    template = "evidence_cot" if arm.start == "evidence" else "generic_cot"
    fields = {f"rl.reward.{k}": v for k, v in arm.reward.items()}
    fields |= {f"rl.{k}": v for k, v in arm.rl.items()}
    fields |= {f"rl.filter.{k}": v for k, v in arm.filter.items()}
    words = [
        f"--config.{k}={','.join(v) if isinstance(v, tuple) else v}" for k, v in fields.items()
    ]
    return " ".join(
        [
            f"evisrag rl --config=configs/rl.py:{arm.recipe} --model {arm.start}-sft-7b",
            f"--data train.jsonl --config.data.template={template}",
            *words,
            f"--out runs/{name}",
        ]
    )
