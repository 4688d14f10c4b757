"""What an RL run is: frozen dataclasses. `rl.recipes` names settings of the objective.

RLConfig      the objective: sampling, rewards, advantages, loss, optimiser
RLRunConfig   one run of it: model, data, static shapes, mesh, how often what is written
"""

from __future__ import annotations

from dataclasses import dataclass, field

from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.models.remat import check_remat
from evisrag_jax.rewards.evisrag import BOX_CHANNELS, RewardConfig
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.rl.masked import MaskedConfig
from evisrag_jax.runtime.precision import parse_dtype
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import OptimConfig
from evisrag_jax.training.settings import MeshShape, ModelSource, PromptSource

ESTIMATORS = ("paper", "code", "grpo", "rloo")
STEP_PROMPTS = ("none", "gold", "sampled")


class RLConfigError(ValueError):
    """Settings of an RL run that contradict each other; the message names the field."""


@dataclass(frozen=True)
class RLConfig:
    """One objective; the recipes of `rl.recipes` are settings of it.

    prompts         P, prompts an update is made from
    group           G, responses sampled a prompt
    micro           prompts a slice of gradient accumulation on each device (memory only); 0 = all at once
    updates         optimiser steps a rollout; each takes P / updates prompts
    temperature, top_p  of sampling; log-probs are taken at the same temperature
    max_tokens      of a response, end token included
    estimator       "paper" (token advantages of the scopes, EVisRAG eq. 7-9), "code" (one z-score a
                    channel, released), "grpo" (channels summed, one z-score, no scopes) or "rloo"
                    (channels summed, less the mean of the group's other responses)
    align           "scope" or "index", of the paper's advantages
    scoped          paper: off gives every token the mean of all channels
    scale           advantages are divided by the group's standard deviation (off: Dr.GRPO)
    scope_match     "char_offsets", or "token_ids" as released
    exact_zero      constant groups get exactly 0 (off: the release's rounding residue)
    mask_truncated  responses cut at max_tokens count in their group's baseline, but none of their
                    tokens is in the loss, neither in its sum nor in its weight
    step_prompts    StepGRPO as R1-Router has it: every record is two prompts with a group each, one whose
                    responses end with the evidence and are paid for it, and one that goes on behind the
                    evidence and is paid for the answer. The evidence there is "gold", or "sampled": a
                    response of the first group. "none" is one prompt a record
    reward, loss, filter, masked, optim   see their classes
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
    scoped: bool = True
    scale: bool = True
    scope_match: str = "char_offsets"
    exact_zero: bool = True
    mask_truncated: bool = False
    step_prompts: str = "none"
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    masked: MaskedConfig = field(default_factory=MaskedConfig)
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
        for name, choices in (
            ("estimator", ESTIMATORS),
            ("align", ("scope", "index")),
            ("scope_match", ("char_offsets", "token_ids")),
            ("step_prompts", STEP_PROMPTS),
        ):
            if getattr(self, name) not in choices:
                raise RLConfigError(f"{name}={getattr(self, name)!r}; one of {', '.join(choices)}")
        if self.temperature <= 0:
            raise RLConfigError("temperature must be positive: greedy rollouts have no log-ratio")
        if self.top_p < 1:
            raise RLConfigError(
                f"top_p={self.top_p}: a filtered sampler and an unfiltered trainer disagree on "
                "every log-probability; use 1.0 in RL"
            )
        if self.max_tokens < 1:
            raise RLConfigError(f"max_tokens={self.max_tokens} must be at least 1")
        self._check_objective()

    def _check_objective(self) -> None:
        """Switches that exclude each other."""
        scoped = self.estimator in ("paper", "code")
        own = self.reward.kind == "evisrag" and (self.reward.mode == "code") == (
            self.estimator == "code"
        )
        if scoped and not own:
            raise RLConfigError(
                f"estimator={self.estimator!r} works on the channels of that reward mode, not on "
                f"those of reward.mode={self.reward.mode!r}, reward.kind={self.reward.kind!r}"
            )
        if self.estimator != "paper" and not self.scoped:
            raise RLConfigError(
                "scoped=False is a switch of estimator='paper'; the others set theirs"
            )
        if not self.scale and self.estimator == "rloo":
            raise RLConfigError("scale=False: rloo never divides by a standard deviation")
        if self.scope_match == "token_ids" and not scoped:
            raise RLConfigError(f"scope_match: estimator={self.estimator!r} has no scopes")
        loss = self.loss
        if loss.kl_placement == "channels" and loss.kl_coef and self.estimator != "code":
            raise RLConfigError("loss.kl_placement='channels' needs estimator='code'")
        late = loss.channel_divisor == "nonzero_count" and loss.divisor_scope == "global"
        in_loss = loss.kl_coef and loss.kl_placement == "response"
        if late and (in_loss or loss.entropy_coef or self.masked.coef or self.masked.entropy_coef):
            raise RLConfigError(
                "loss.channel_divisor='nonzero_count' over the whole batch is known after its last slice "
                "only; with a penalty in the loss use 'none', 'n_channels' or divisor_scope='micro'"
            )
        if self.masked.gradient and self.masked.focused:
            raise RLConfigError(
                "masked.gradient: masked.top and masked.factor_low choose tokens before the update and need "
                "a masked pass without a gradient"
            )
        metric = self.filter.metric
        if metric != "overall" and metric not in self.reward.paid:
            raise RLConfigError(
                f"filter.metric={metric!r}; overall or one of {', '.join(self.reward.paid)}"
            )
        if self.step_prompts != "none":
            if self.prompts % 2 or self.reward.kind != "evisrag" or self.estimator != "grpo":
                raise RLConfigError(
                    "step_prompts needs an even number of prompts, reward.kind='evisrag' and "
                    "estimator='grpo': each group is paid one step's reward"
                )
            if self.filter.active:
                raise RLConfigError("step_prompts with a filter would part a record's two groups")

    @property
    def needs_old(self) -> bool:
        """Whether log-probs before the update are taken in a pass of their own."""
        in_reward = bool(self.loss.kl_coef) and self.loss.kl_placement == "reward"
        return self.updates > 1 or in_reward or self.masked.focused

    @property
    def records(self) -> int:
        """Records that a rollout draws."""
        return self.prompts if self.step_prompts == "none" else self.prompts // 2


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
    keeps so many prompts of the first, of every so many-th and of the last step.  interference_every:
    steps between two measurements of the angle between the gradients of the perception and the derivation
    channel, 0 for none; each costs two backward passes.  export: write RUN/model at the end, in
    export_dtype, and adapters as RUN/adapter.
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
    interference_every: int = 0
    tensorboard: bool = True
    export: bool = True
    export_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = ("steps", "slots", "save_every", "eval_every", "eval_limit", "rollout_rows")
        for name in (*names, "rollout_tensor", "stuck_after", "max_skipped", "interference_every"):
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
        reward = self.rl.reward
        if self.eval_every and reward.reads_boxes:
            raise RLConfigError(
                f"eval_every={self.eval_every}: validation reads answers as text, but "
                f"rl.reward.kind={reward.kind!r} pays boxes"
            )
        if self.interference_every and reward.channels == BOX_CHANNELS:
            raise RLConfigError(
                f"interference_every={self.interference_every} compares a perception and a derivation "
                f"channel; rl.reward.kind={reward.kind!r} has {', '.join(reward.channels)}"
            )
        if self.rl.masked.active and not self.images:
            raise RLConfigError(f"rl.masked.share={self.rl.masked.share} needs pages, but images=0")
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
