"""Responses from a model, each asked for once: a local checkpoint or a server, behind replies on disk.

    contexts ─► [ key of (model, settings, context, sample) on disk? ] ─ yes ─► trajectories
                                     └ no ─► teacher ─► on disk ─────────────────────┘

A key holds everything that a reply depends on, page contents included, so a run may be killed, resumed or
repeated, and no reply is paid for, or computed, twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evisrag_jax.construction.contexts import Context
from evisrag_jax.construction.filters import Drop, Trajectory
from evisrag_jax.construction.page_files import PageFiles
from evisrag_jax.methods.base import MethodError
from evisrag_jax.methods.one_call import OneCall
from evisrag_jax.pages.decode import PageError, load_page
from evisrag_jax.prompts.template import Template
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.host_random import text_hash
from evisrag_jax.runtime.remote import (
    BudgetExceeded,
    ChatClient,
    RemoteError,
    Reply,
    ServerConfig,
    image_part,
)
from evisrag_jax.runtime.request_cache import RequestCache, request_key

#: Reasons for which a context is not asked: a page that cannot be shown, a prompt that is too long.
REFUSED = ("unreadable_page", "too_long")

#: Under this name the replies on disk hold what the server's calls have cost so far.
SPENT = "spent"

OnReply = Callable[["Ask", Reply], None]
OnFailure = Callable[["Ask", str], None]


class ContextRefused(ValueError):
    """A context that a teacher cannot be asked; `drop` has the reason."""

    def __init__(self, drop: Drop):
        self.drop = drop
        super().__init__(f"{drop.reason}: {drop.detail}")


@dataclass(frozen=True)
class Ask:
    """One wanted response: to a context, the sample's number, and what the teacher prepared for it."""

    context: Context
    sample: int
    prepared: Any


@runtime_checkable
class Teacher(Protocol):
    """A model that answers contexts.

    identity: everything, as plain JSON values, that a reply depends on beside the context and the sample.
    max_tokens: the limit on a response.
    """

    identity: Mapping[str, Any]
    max_tokens: int

    def prepare(self, context: Context) -> Any:
        """What `answer` needs of a context. Raises ContextRefused."""

    def answer(self, asks: Sequence[Ask], on_reply: OnReply, on_failure: OnFailure) -> None:
        """Answers all, in any order; `on_reply` has put a reply on disk when it returns."""


class Sampler:
    """n responses a context from a teacher, through the replies on disk.

    Attributes:
        asked: responses that the teacher was asked for.  reused: responses found on disk.
    """

    def __init__(self, teacher: Teacher, samples: int, cache: RequestCache, pages: PageFiles):
        self.teacher, self.samples, self.cache, self.pages = teacher, samples, cache, pages
        self.asked = self.reused = 0

    def __call__(self, contexts: Sequence[Context]) -> list[list[Trajectory] | Drop]:
        """The responses to each context, in order of their samples, or why it was not asked."""
        results: list[list[Trajectory] | Drop] = []
        asks: list[Ask] = []
        places: dict[tuple[str, int], tuple[int, str]] = {}
        for context in contexts:
            try:
                keys = [self._key(context, sample) for sample in range(self.samples)]
                found = [self.cache.get(key) for key in keys]
                missing = [sample for sample, reply in enumerate(found) if reply is None]
                prepared = self.teacher.prepare(context) if missing else None
            except PageError as error:
                results.append(Drop("unreadable_page", str(error)))
                continue
            except ContextRefused as refused:
                results.append(refused.drop)
                continue
            for sample in missing:
                asks.append(Ask(context, sample, prepared))
                places[context.id, sample] = len(results), keys[sample]
            results.append(
                [
                    _trajectory(reply, sample) if reply else Trajectory("", sample=sample)
                    for sample, reply in enumerate(found)
                ]
            )
            self.reused += len(found) - len(missing)

        def on_reply(ask: Ask, reply: Reply) -> None:
            place, key = places[ask.context.id, ask.sample]
            told = {
                "text": reply.text,
                "tokens_in": reply.tokens_in,
                "tokens_out": reply.tokens_out,
            }
            self.cache.put(key, told)
            results[place][ask.sample] = _trajectory(told, ask.sample)

        def on_failure(ask: Ask, reason: str) -> None:
            place, _ = places[ask.context.id, ask.sample]
            results[place][ask.sample] = Trajectory("", sample=ask.sample, failure=reason)

        if asks:
            self.asked += len(asks)
            self.teacher.answer(asks, on_reply, on_failure)
        return results

    def _key(self, context: Context, sample: int) -> str:
        return request_key(
            {
                "teacher": self.teacher.identity,
                "context": context.id,
                "question": context.question.question,
                "pages": [self.pages.digest(page.path) for page in context.pages],
                "sample": sample,
            }
        )


def _trajectory(reply: Mapping[str, Any], sample: int) -> Trajectory:
    return Trajectory(reply["text"], reply["tokens_out"], sample)


class LocalTeacher:
    """A checkpoint in this process: EvidenceCoT prompts, the group engine's samples.

    A response depends on the context's id, the sample and `seed`, never on what else is asked.
    """

    def __init__(self, method: OneCall, engine: Engine, group: int, model: Mapping[str, Any]):
        """group: samples a context.  model: what names the weights (`fingerprint`) and their dtype."""
        self.method, self.engine, self.group = method, engine, group
        self.max_tokens = method.sampling.max_tokens
        self.identity = {
            "kind": "local",
            "model": dict(model),
            "template": method.template.text,
            "system": method.system,
            "images_first": method.images_first,
            "exif_transpose": method.exif_transpose,
            "budget": [method.budget.min_pixels, method.budget.max_pixels],
            "sampling": dataclasses.asdict(method.sampling),
            "seed": method.seed,
        }

    def prepare(self, context: Context) -> Any:
        """The engine's request."""
        try:
            return self.method.request(context.record(), self.engine)
        except MethodError as error:
            unreadable = isinstance(error.__cause__, PageError)
            reason = "unreadable_page" if unreadable else "too_long"
            raise ContextRefused(Drop(reason, error.reason)) from error

    def answer(self, asks: Sequence[Ask], on_reply: OnReply, on_failure: OnFailure) -> None:
        """All samples of every context asked for; each group is on disk as soon as it is done."""
        wanted: dict[str, list[Ask]] = {}
        for ask in asks:
            wanted.setdefault(ask.context.id, []).append(ask)
        groups = list(wanted.values())

        def on_group(index: int, completions: list[Completion]) -> None:
            for ask in groups[index]:
                done = completions[ask.sample]
                if done.finish == "error":
                    on_failure(ask, done.error or "no response")
                else:
                    prompt = len(ask.prepared.prompt.ids)
                    on_reply(ask, Reply(done.text, prompt, done.length, 0.0, False))

        requests = [group[0].prepared for group in groups]
        self.engine.generate(
            requests,
            self.method.sampling,
            group=self.group,
            seed=self.method.seed,
            on_group=on_group,
        )


class ServerTeacher:
    """A model behind an OpenAI-compatible server: the instruction, then the pages, in one user turn.

    The client keeps each reply in `cache` the moment it comes, and what was spent is kept there too, so that
    its cost limit holds for all starts of a run together.
    """

    def __init__(
        self,
        server: ServerConfig,
        cache: RequestCache,
        template: Template,
        sampling: SamplingConfig,
        *,
        system: str = "",
        images_first: bool = False,
        seed: int = 0,
    ):
        self.client, self.cache = ChatClient(server, cache), cache
        self.client.spent = (cache.get(SPENT) or {"cost": 0.0})["cost"]
        self.template, self.sampling = template, sampling
        self.system, self.images_first, self.seed = system, images_first, seed
        self.max_tokens = sampling.max_tokens
        self.identity = {
            "kind": "server",
            "base_url": server.base_url,
            "model": server.model,
            "template": template.text,
            "system": system,
            "images_first": images_first,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": seed,
        }

    def prepare(self, context: Context) -> list[dict[str, Any]]:
        """The messages, pages inside."""
        try:
            for page in context.pages:
                load_page(page.path)  # nothing is paid for a page that nobody can see
        except PageError as error:
            raise ContextRefused(Drop("unreadable_page", str(error))) from error
        text = [{"type": "text", "text": self.template.render(context.question.question)}]
        images = [image_part(page.path) for page in context.pages]
        content = images + text if self.images_first else text + images
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]

    def answer(self, asks: Sequence[Ask], on_reply: OnReply, on_failure: OnFailure) -> None:
        """As many calls at once as the server's settings allow.

        Raises:
            BudgetExceeded: the cost limit is reached; what was answered is on disk.
        """
        requests = [
            {
                "messages": ask.prepared,
                "temperature": self.sampling.temperature,
                "max_tokens": self.max_tokens,
                "seed": text_hash(f"{self.seed} {ask.context.id} {ask.sample}") >> 1,
            }
            for ask in asks
        ]

        def on_each(index: int, reply: Reply | RemoteError) -> None:
            self.cache.put(SPENT, {"cost": self.client.spent})
            if isinstance(reply, Reply):
                on_reply(asks[index], reply)
            else:
                on_failure(asks[index], str(reply))

        for reply in self.client.ask_many(requests, on_each):
            if isinstance(reply, BudgetExceeded):
                raise reply


def fingerprint(folder: Path) -> str:
    """A hash that another checkpoint in the same folder would change: of the names, sizes, and first and
    last 64 KiB of its files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(65536))
            file.seek(max(0, size - 65536))
            digest.update(file.read(65536))
    return digest.hexdigest()
