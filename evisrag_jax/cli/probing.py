"""What all probes share: a set with evidence boxes, a model, one batch shape, and G responses a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evisrag_jax.cli.eval import EvalData
from evisrag_jax.cli.session import (
    Answering,
    Model,
    SessionError,
    make_engine,
    make_method,
)
from evisrag_jax.data.schema import Record
from evisrag_jax.evaluation.ced_probe import SCOPES, Probed
from evisrag_jax.pages.decode import load_page
from evisrag_jax.pages.ink import token_ink
from evisrag_jax.rewards.ced.config import CedConfig
from evisrag_jax.rollout.buckets import bucket_table
from evisrag_jax.rollout.requests import Request
from evisrag_jax.training.batching import Bucket, Prepared


@dataclass(frozen=True)
class ProbeConfig:
    """What is asked, and how support is scored.

    prompts, pages, windows, tokens, prompt_length: the one shape of a batch (pages a prompt, windows and
    merged tokens a page).  group: responses a question.  scope: what is scored, see
    `evaluation.ced_probe.scored_tokens`.  ced: interventions and margins.
    """

    model: Model
    data: EvalData
    prompts: int
    pages: int
    windows: int
    tokens: int
    prompt_length: int
    method: Answering = field(default_factory=Answering)
    group: int = 6
    scope: str = "records"
    ced: CedConfig = field(default_factory=CedConfig)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise SessionError(f"scope={self.scope!r}; one of {', '.join(SCOPES)}")
        if self.group < 1:
            raise SessionError(f"group={self.group} must be at least 1")

    @property
    def bucket(self) -> Bucket:
        """The shape of the scored batches."""
        return Bucket(
            prompts=self.prompts,
            images=self.pages,
            windows=self.windows,
            tokens=self.tokens,
            prompt_length=self.prompt_length,
            group=self.group,
            response_length=self.method.sampling.max_tokens,
        )


def with_boxes(records: Sequence[Record], source: str) -> list[Record]:
    """The records with evidence boxes; SessionError when there are none."""
    chosen = [record for record in records if record.boxes and any(record.boxes)]
    if not chosen:
        raise SessionError(f"{source}: none of its {len(records)} questions has evidence boxes")
    return chosen


def asker(config: ProbeConfig, pretrained: Any) -> Callable[[Sequence[Record]], list[Probed]]:
    """records → their prompts and sampled responses."""
    sampling = config.method.sampling
    table = bucket_table(
        prompts=(config.prompts,),
        pages=((config.pages, config.windows, config.tokens),),
        lengths=(config.prompt_length,),
        responses=(sampling.max_tokens,),
    )
    engine, method = make_engine(pretrained, table), make_method(config.method, pretrained)

    def ask(records: Sequence[Record]) -> list[Probed]:
        requests = [method.request(record, engine) for record in records]
        done = engine.generate(requests, sampling, group=config.group, seed=config.method.seed)
        return [
            Probed(
                Prepared(r.id, r.prompt, tuple(r.pages), None, record), list(group), ink(r, record)
            )
            for r, record, group in zip(requests, records, done, strict=True)
        ]

    def ink(request: Request, record: Record) -> tuple[np.ndarray, ...] | None:
        if not config.ced.region.match_ink:
            return None
        paths = record.images[: len(request.pages)]
        return tuple(
            token_ink(
                np.asarray(
                    load_page(path, exif_transpose=config.method.exif_transpose).convert("L")
                ),
                page.grid,
                merge=pretrained.layout.merge,
            )
            for path, page in zip(paths, request.pages, strict=True)
        )

    return ask
