"""A client for OpenAI-compatible servers that bounds what a run can spend: time, tries, calls at once, cost.

    request ─ in the cache? ─► reply, free
            └─ send ─► 429, 5xx, timeout, connection lost: wait and try again, until attempts or deadline end
                    └► reply ─► on disk ─► returned

The `openai` package is needed only here (``pip install "evisrag-jax[server]"``); its own retries are off,
so that the rules below are the only ones.
"""

from __future__ import annotations

import base64
import mimetypes
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evisrag_jax.runtime.request_cache import RequestCache, request_key

WAITED_FOR = (408, 409, 429)  # statuses that a later try may not have; beside 5xx
FIRST_WAIT = 0.5  # seconds; doubles with every try


class RemoteError(RuntimeError):
    """A request that got no reply; names server, model and the last reason."""


class BudgetExceeded(RemoteError):
    """The cost cap is reached; what was paid for is in the cache."""


@dataclass(frozen=True)
class ServerConfig:
    """A server and its limits.

    base_url: ".../v1".  model: its name there.  key_env: environment variable that holds the key; a
    server that wants none gets "none".  timeout: seconds of one try.  attempts: tries at most.
    deadline: seconds a request may take in all, waits included.  concurrency: requests at once.
    price_in, price_out: per million tokens, for `max_cost`, the cap of a run (0: no cap).
    """

    base_url: str = ""
    model: str = ""
    key_env: str = "OPENAI_API_KEY"
    timeout: float = 60.0
    attempts: int = 4
    deadline: float = 300.0
    concurrency: int = 8
    price_in: float = 0.0
    price_out: float = 0.0
    max_cost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline"):
            if getattr(self, name) <= 0:
                raise ValueError(f"server.{name}={getattr(self, name)} must be positive")
        for name in ("attempts", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"server.{name}={getattr(self, name)} must be at least 1")
        for name in ("price_in", "price_out", "max_cost"):
            if getattr(self, name) < 0:
                raise ValueError(f"server.{name}={getattr(self, name)} must not be negative")
        if self.max_cost and not (self.price_in or self.price_out):
            raise ValueError("server.max_cost needs price_in or price_out: nothing has a cost")


@dataclass(frozen=True)
class Reply:
    """text: of the answer, never empty.  tokens_in, tokens_out: as the server counted.  cost: of this
    call, 0 from the cache."""

    text: str
    tokens_in: int
    tokens_out: int
    cost: float
    cached: bool


class ChatClient:
    """Asks one model of one server.

    Args:
        server: where, and the limits.
        cache: of replies; None keeps none.
        sleep: waits between tries (tests pass their own).

    Attributes:
        calls: tries that were sent.  spent: cost of this client's calls.
    """

    def __init__(
        self,
        server: ServerConfig,
        cache: RequestCache | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ):
        if not server.base_url or not server.model:
            raise ValueError("server.base_url and server.model are needed")
        try:
            import openai
        except ImportError as error:
            raise RemoteError(
                'a server needs the openai client: pip install "evisrag-jax[server]"'
            ) from error
        self.server, self.cache = server, cache
        self.calls, self.spent = 0, 0.0
        self._openai, self._sleep, self._lock = openai, sleep, threading.Lock()
        self._client = openai.OpenAI(
            base_url=server.base_url,
            api_key=os.environ.get(server.key_env) or "none",
            max_retries=0,
            timeout=server.timeout,
        )

    def request(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """What identifies a request, in the cache and to the server."""
        return {
            "base_url": self.server.base_url,
            "model": self.server.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }

    def ask(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Reply:
        """The reply to a chat; `settings` are temperature, max_tokens and seed.

        Raises RemoteError when no try got a usable reply, BudgetExceeded when the cap is reached.
        """
        request = self.request(messages, **settings)
        key = request_key(request)
        known = None if self.cache is None else self.cache.get(key)
        if known is not None:
            return Reply(known["text"], known["tokens_in"], known["tokens_out"], 0.0, True)
        reply = self._send(request)
        if self.cache is not None:
            told = {
                "text": reply.text,
                "tokens_in": reply.tokens_in,
                "tokens_out": reply.tokens_out,
            }
            self.cache.put(key, told)
        return reply

    def forget(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> None:
        """Drops a reply that turned out to be useless, so that it is asked for again."""
        if self.cache is not None:
            self.cache.drop(request_key(self.request(messages, **settings)))

    def ask_many(
        self,
        requests: Sequence[Mapping[str, Any]],
        on_reply: Callable[[int, Reply | RemoteError], None] | None = None,
    ) -> list[Reply | RemoteError]:
        """`ask` for each mapping of its arguments, at most `concurrency` at once, in order.

        Failures are returned in place of replies. After BudgetExceeded nothing new is sent.
        """
        results: list[Reply | RemoteError | None] = [None] * len(requests)

        def one(index: int) -> tuple[int, Reply | RemoteError]:
            try:
                return index, self.ask(**requests[index])
            except RemoteError as error:
                return index, error

        with ThreadPoolExecutor(self.server.concurrency, thread_name_prefix="server") as pool:
            for done in as_completed([pool.submit(one, i) for i in range(len(requests))]):
                index, result = done.result()
                results[index] = result
                if on_reply is not None:
                    on_reply(index, result)
        return results

    def _send(self, request: Mapping[str, Any]) -> Reply:
        server, begin = self.server, time.monotonic()
        reason, tries = "", 0
        while tries < server.attempts:
            left = server.deadline - (time.monotonic() - begin)
            if left <= 0:
                reason += f"; deadline of {server.deadline:g} s"
                break
            self._check_budget()
            with self._lock:
                self.calls += 1
            tries += 1
            try:
                return self._once(request, min(server.timeout, left))
            except _Again as error:
                reason = str(error)
                wait = FIRST_WAIT * 2 ** (tries - 1) * (1 + 0.25 * random.random())
                wait = max(wait, error.wait)
                if tries == server.attempts:
                    break
                if time.monotonic() - begin + wait > server.deadline:
                    reason += (
                        f"; waiting {wait:.1f} s would pass the deadline of {server.deadline:g} s"
                    )
                    break
                self._sleep(wait)
        raise RemoteError(f"{server.base_url}, model {server.model}: {reason} ({tries} tries)")

    def _once(self, request: Mapping[str, Any], timeout: float) -> Reply:
        api = self._openai
        sent = {k: v for k, v in request.items() if k != "base_url" and v is not None}
        try:
            done = self._client.chat.completions.create(**sent, timeout=timeout)
        except api.APITimeoutError as error:
            raise _Again(f"no answer within {timeout:g} s") from error
        except api.APIStatusError as error:
            told = f"status {error.status_code}"
            if error.status_code in WAITED_FOR or error.status_code >= 500:
                raise _Again(told, _retry_after(error.response.headers)) from error
            raise RemoteError(
                f"{self.server.base_url}, model {self.server.model}: {told}: {error.message}"
            ) from error
        except (api.APIConnectionError, api.APIResponseValidationError, ValueError) as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        choices = getattr(done, "choices", None)
        text = (choices[0].message.content or "") if choices else ""
        usage = getattr(done, "usage", None)
        tokens_in, tokens_out = (
            int(getattr(usage, name, 0) or 0) for name in ("prompt_tokens", "completion_tokens")
        )
        cost = (tokens_in * self.server.price_in + tokens_out * self.server.price_out) / 1e6
        with self._lock:
            self.spent += cost
        if not text.strip():
            raise _Again("an empty reply")
        return Reply(text, tokens_in, tokens_out, cost, False)

    def _check_budget(self) -> None:
        with self._lock:
            spent = self.spent
        if self.server.max_cost and spent >= self.server.max_cost:
            raise BudgetExceeded(
                f"{self.server.base_url}, model {self.server.model}: {spent:.2f} of server.max_cost="
                f"{self.server.max_cost:g} are spent; what was answered is in the cache"
            )


class _Again(Exception):
    """A failure that a later try may not have; wait: seconds the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0


def image_part(image: str | Path | bytes) -> dict[str, Any]:
    """A picture as a part of a message's content: a file, or the bytes of one."""
    if isinstance(image, bytes):
        data = image
        kind = "image/jpeg" if data[:2] == b"\xff\xd8" else "image/png"
    else:
        data = Path(image).read_bytes()
        kind = mimetypes.guess_type(str(image))[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}
