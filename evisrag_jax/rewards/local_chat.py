"""A local checkpoint as a judge: text prompts through the rollout engine, greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evisrag_jax.prompts.chat import PromptTooLong, build_prompt
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Request
from evisrag_jax.rollout.sampling import SamplingConfig


@dataclass(frozen=True)
class LocalChat:
    """engine: with buckets for prompts without pages.  model: its name, part of a cached verdict's key.
    max_tokens: of a reply."""

    engine: Engine
    model: str
    max_tokens: int = 256

    @property
    def name(self) -> str:
        """See `judge.Judge`."""
        return f"local {self.model}"

    def __call__(
        self, prompts: Sequence[Any], on_reply: Callable[[int, str | Exception], None]
    ) -> None:
        """See `judge.Chat`. A prompt over every bucket is a failure of its own item."""
        engine, limit = self.engine, self.engine.buckets.max_length
        requests, places = [], []
        for index, text in enumerate(prompts):
            try:
                prompt = build_prompt(
                    engine.tokenizer, text, (), max_length=limit, name=f"judge-{index}"
                )
            except PromptTooLong as error:
                on_reply(index, error)
                continue
            requests.append(Request(f"judge-{index}", prompt))
            places.append(index)
        sampling = SamplingConfig(temperature=0.0, max_tokens=self.max_tokens)

        def told(place: int, completions: list) -> None:
            done = completions[0]
            failed = RuntimeError(done.error or "cut at max_tokens")
            on_reply(places[place], done.text if done.finish == "stop" else failed)

        engine.generate(requests, sampling, on_group=told)
