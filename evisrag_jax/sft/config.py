"""What an SFT run is: frozen dataclasses, whose fields are those of configs/sft.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.models.remat import check_remat
from evisrag_jax.runtime.precision import parse_dtype
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import OptimConfig
from evisrag_jax.training.settings import MeshShape, ModelSource, PromptSource

TARGETS = ("response", "answers")


class SFTConfigError(ValueError):
    """Settings of an SFT run that cannot be; the message names the field."""


@dataclass(frozen=True)
class DataSource(PromptSource):
    """Training records and how they become prompts and targets.

    target: "response" trains on the tagged response, "answers" on every gold answer as a group.
    """

    target: str = "response"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in TARGETS:
            raise SFTConfigError(f"data.target={self.target!r}; one of {', '.join(TARGETS)}")


@dataclass(frozen=True)
class SFTConfig:
    """One run.

    buckets: batch shapes; one of them is at least as large as every other in every size, and all
    have the same number of prompts, the global batch.  prompts: replaces that number where not 0.
    micro: prompts a slice of gradient accumulation on each device, 0 for all at once; never changes a
    result.
    steps: updates, 0 for `epochs` passes over the data.  warmup_ratio: share of the steps, where
    optim.warmup_steps is 0.  lora: adapters; with a rank they train and `optim.train` does not count.
    remat: what the backward pass computes again (`models.remat`).  chunk: response positions whose
    logits are held at once.  stuck_after: seconds without progress, compiles included, after which the
    job ends (exit code 75); 0 for never.  save_every, log_every, eval_every: in updates.  keep:
    checkpoints kept beside the best.  max_skipped, preempt_seconds: see `training.loop.fit`.  export:
    write RUN/model at the end, in export_dtype, and adapters as RUN/adapter.
    """

    model: ModelSource
    data: DataSource
    buckets: tuple[Bucket, ...]
    prompts: int = 0
    micro: int = 0
    steps: int = 0
    epochs: float = 1.0
    warmup_ratio: float = 0.0
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshShape = field(default_factory=MeshShape)
    stuck_after: int = 3600
    seed: int = 0
    remat: str = "full"
    chunk: int = 2048
    save_every: int = 100
    log_every: int = 1
    eval_every: int = 0
    keep: int = 2
    max_skipped: int = 10
    preempt_seconds: float = 300.0
    tensorboard: bool = True
    export: bool = True
    export_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.buckets:
            raise SFTConfigError("buckets: at least one batch shape is needed")
        if self.prompts < 0 or self.micro < 0 or self.steps < 0 or self.epochs <= 0:
            raise SFTConfigError(
                f"prompts={self.prompts}, micro={self.micro} and steps={self.steps} must not be "
                f"negative, epochs={self.epochs} must be positive"
            )
        if self.chunk < 1 or self.keep < 1 or self.log_every < 1:
            raise SFTConfigError(
                f"chunk={self.chunk}, keep={self.keep} and log_every={self.log_every} must be at "
                "least 1"
            )
        for name in ("save_every", "eval_every", "stuck_after", "max_skipped"):
            if getattr(self, name) < 0:
                raise SFTConfigError(f"{name}={getattr(self, name)} must not be negative")
        if self.preempt_seconds <= 0:
            raise SFTConfigError(f"preempt_seconds={self.preempt_seconds} must be positive")
        parse_dtype(self.export_dtype, field="export_dtype")
        check_remat(self.remat)
        if len({bucket.prompts for bucket in self.shapes}) > 1:
            raise SFTConfigError("buckets: all need the same number of prompts, the global batch")
        if self.largest not in self.shapes:
            raise SFTConfigError(
                "buckets: one must be at least as large as every other in every size, or some "
                f"batches would fit none; add {self.largest}"
            )
        if self.micro and self.batch % self.micro:
            raise SFTConfigError(f"micro={self.micro} does not divide the {self.batch} prompts")

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """The buckets with the run's number of prompts."""
        if not self.prompts:
            return self.buckets
        return tuple(dataclasses.replace(b, prompts=self.prompts) for b in self.buckets)

    @property
    def largest(self) -> Bucket:
        """The bucket that holds what any bucket holds."""
        names = [f.name for f in dataclasses.fields(Bucket)]
        return Bucket(**{name: max(getattr(b, name) for b in self.shapes) for name in names})

    @property
    def batch(self) -> int:
        """Prompts an update, P."""
        return self.shapes[0].prompts
