"""What an RL run is: frozen dataclasses, with the three named behaviours as presets.

RLConfig      the objective: sampling, rewards, advantages, loss, optimiser
RLRunConfig   one run of it: model, data, static shapes, mesh, how often what is written
"""

from __future__ import annotations

from dataclasses import dataclass, field

from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.models.remat import check_remat
from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.runtime.precision import parse_dtype
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import OptimConfig
from evisrag_jax.training.settings import MeshShape, ModelSource, PromptSource

ESTIMATORS = ("paper", "code", "grpo")
MAX_TRIES = 1000  # a step's rollouts are numbered below this in their random keys


class RLConfigError(ValueError):
    """Settings of an RL run that contradict each other; the message names the field."""


@dataclass(frozen=True)
class RLConfig:
    """RS-GRPO and plain GRPO as switches of one objective.

    prompts         P, prompts an update is made from
    group           G, responses sampled a prompt
    micro           prompts a slice of gradient accumulation on each device (memory only); 0 = all at once
    updates         optimiser steps a rollout; each takes P / updates prompts
    temperature, top_p  of sampling; log-probs are taken at the same temperature
    max_tokens      of a response, end token included
    estimator       "paper" (token advantages of the scopes, EVisRAG eq. 7-9), "code" (one z-score a
                    channel, released) or "grpo" (channels summed, one z-score, no scopes)
    align           "scope" or "index", of the paper's advantages
    scope_match     "char_offsets", or "token_ids" as released
    exact_zero      constant groups get exactly 0 (off: the release's rounding residue)
    mask_truncated  responses cut at max_tokens count in their group's baseline, but none of their
                    tokens is in the loss, neither in its sum nor in its weight
    reward, loss, filter, optim   see their classes; filter None keeps every group
    tries           rollouts at most to fill P kept groups; then the step trains on those it has
    """

    prompts: int = 32
    group: int = 8
    micro: int = 0
    updates: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1536
    estimator: str = "paper"
    align: str = "scope"
    scope_match: str = "char_offsets"
    exact_zero: bool = True
    mask_truncated: bool = False
    tries: int = 1
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    filter: FilterConfig | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.group < 2:
            raise RLConfigError(
                f"prompts={self.prompts} must be at least 1 and group={self.group} at least 2: an "
                "advantage compares the responses of one prompt"
            )
        if self.updates < 1 or self.prompts % self.updates:
            raise RLConfigError(f"updates={self.updates} must divide prompts={self.prompts}")
        rows = self.prompts // self.updates
        if self.micro < 0 or (self.micro and rows % self.micro):
            raise RLConfigError(f"micro={self.micro} must divide the {rows} prompts an update")
        if self.estimator not in ESTIMATORS:
            raise RLConfigError(f"estimator={self.estimator!r}; one of {', '.join(ESTIMATORS)}")
        if (self.estimator == "code") != (self.reward.mode == "code") and self.estimator != "grpo":
            raise RLConfigError(
                f"estimator={self.estimator!r} works on the channels of that reward mode, not on "
                f"those of reward.mode={self.reward.mode!r}"
            )
        if self.temperature <= 0:
            raise RLConfigError("temperature must be positive: greedy rollouts have no log-ratio")
        if self.top_p < 1:
            raise RLConfigError(
                f"top_p={self.top_p}: a filtered sampler and an unfiltered trainer disagree on "
                "every log-probability; use 1.0 in RL"
            )
        if self.loss.kl_coef:
            raise RLConfigError("loss.kl_coef needs a reference model, which this trainer has not")
        if not 1 <= self.tries <= MAX_TRIES:
            raise RLConfigError(f"tries={self.tries} must lie in 1..{MAX_TRIES}")
        if self.max_tokens < 1:
            raise RLConfigError(f"max_tokens={self.max_tokens} must be at least 1")


@dataclass(frozen=True)
class RLRunConfig:
    """One run; the fields of configs/rl.py.

    images, windows, tokens, prompt_length: the batch's static sizes (pages a prompt, windows and
    merged tokens a page, prompt tokens); P, G and T are those of `rl`.  steps: rollouts, 0 for
    `epochs` passes over the data.  lora: adapters; with a rank they train, `rl.optim.train` does not
    count, and rollouts come from merged weights.  slots: responses decoded at once by a process, 0 for
    all of its step; fewer take less memory and change no token.  rollout_tensor: devices that a sampling
    copy of the parameters is split over, 0 for as many as the mesh's tensor axis.  stuck_after: seconds
    without progress, compiles included, after which the job ends (exit code 75); 0 for never.  remat,
    chunk: see `update.UpdateConfig`.  save_every, log_every: in steps.  eval_every, eval_limit:
    validation on `data.validation`, in steps and questions (0 = all).  keep: checkpoints kept beside the
    best.  max_skipped, preempt_seconds: see `training.loop.fit`.  rollouts_every, rollout_rows: rollouts/
    keeps so many prompts of the first, of every so many-th and of the last step.  export: write
    RUN/model at the end, in export_dtype, and adapters as RUN/adapter.
    """

    model: ModelSource
    data: PromptSource
    rl: RLConfig
    images: int
    windows: int
    tokens: int
    prompt_length: int
    steps: int = 0
    epochs: float = 1.0
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshShape = field(default_factory=MeshShape)
    rollout_tensor: int = 0
    slots: int = 0
    stuck_after: int = 3600
    seed: int = 0
    remat: str = "full"
    chunk: int = 2048
    save_every: int = 20
    log_every: int = 1
    eval_every: int = 0
    eval_limit: int = 0
    keep: int = 2
    max_skipped: int = 10
    preempt_seconds: float = 300.0
    rollouts_every: int = 1
    rollout_rows: int = 4
    tensorboard: bool = True
    export: bool = True
    export_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = ("steps", "slots", "save_every", "eval_every", "eval_limit", "rollout_rows")
        for name in (*names, "rollout_tensor", "stuck_after", "max_skipped"):
            if getattr(self, name) < 0:
                raise RLConfigError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("chunk", "log_every", "keep", "rollouts_every"):
            if getattr(self, name) < 1:
                raise RLConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.preempt_seconds <= 0:
            raise RLConfigError(f"preempt_seconds={self.preempt_seconds} must be positive")
        if self.epochs <= 0:
            raise RLConfigError(f"epochs={self.epochs} must be positive")
        if self.eval_every and not self.data.validation:
            raise RLConfigError(
                f"eval_every={self.eval_every} needs data.validation, a file of held-out questions "
                "(eval_every=0 leaves validation out)"
            )
        parse_dtype(self.export_dtype, field="export_dtype")
        check_remat(self.remat)
        _ = self.bucket  # refuses sizes that no batch can have

    @property
    def bucket(self) -> Bucket:
        """The one shape of an update's batch."""
        return Bucket(
            prompts=self.rl.prompts,
            images=self.images,
            windows=self.windows,
            tokens=self.tokens,
            prompt_length=self.prompt_length,
            group=self.rl.group,
            response_length=self.rl.max_tokens,
        )


def preset(name: str, **changes) -> RLConfig:
    """`paper`, `code` or `strict` (EVisRAG spec 3.2), with fields changed.

    "code" is the release but for its NaN: a slice or a channel with nothing to train on adds 0.
    """
    code = name == "code"
    base = {
        "reward": RewardConfig(mode=name),
        "loss": PolicyLossConfig.code(nan_policy="safe_zero") if code else PolicyLossConfig.paper(),
        "estimator": "code" if code else "paper",
        "scope_match": "token_ids" if code else "char_offsets",
        "exact_zero": not code,
        "filter": FilterConfig(rule="mean_band") if code else None,
        "temperature": 1.0 if code else 1.2,
    }
    return RLConfig(**{**base, **changes})
