"""The two teachers: what they ask, what they refuse, and that a server is never paid twice."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from evisrag_jax.construction.config import ConstructionConfig, FilterConfig
from evisrag_jax.construction.contexts import ContextConfig, make_contexts
from evisrag_jax.construction.difficulty import DifficultyConfig
from evisrag_jax.construction.filters import Drop
from evisrag_jax.construction.page_files import PageFiles
from evisrag_jax.construction.pipeline import Source, construct
from evisrag_jax.construction.sources import Page
from evisrag_jax.construction.splits import SplitConfig
from evisrag_jax.construction.teacher import (
    ContextRefused,
    LocalTeacher,
    Sampler,
    ServerTeacher,
    fingerprint,
)
from evisrag_jax.methods.base import MethodError
from evisrag_jax.methods.one_call import OneCall
from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.plan import BUDGETS
from evisrag_jax.prompts.template import Template
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.remote import BudgetExceeded, ServerConfig
from evisrag_jax.runtime.request_cache import RequestCache
from tests.construction.made import draw_pages, question, tagged
from tests.fake_server import FakeServer

TEMPLATE = Template("t", "Look. Question: {question}")
SAMPLING = SamplingConfig(temperature=0.7, max_tokens=64)


@pytest.fixture
def cache(tmp_path):
    with RequestCache(tmp_path / "requests.sqlite") as cache:
        yield cache


@pytest.fixture
def context(tmp_path):
    """Two pages on disk, the second relevant."""
    draw_pages(tmp_path / "raw", "ab")
    pages = tuple(Page(str(tmp_path / "raw" / f"{letter}.png"), letter) for letter in "ab")
    raw = question(retrieved="", relevant="")
    raw = type(raw)(**{**vars(raw), "retrieved": pages, "relevant": pages[1:]})
    return make_contexts(raw, ContextConfig(ks=(2,)))[0]


def server_teacher(url, cache, **changes):
    limits = {"price_in": 1.0, "price_out": 1.0, "concurrency": 2, "attempts": 1} | changes
    server = ServerConfig(base_url=url, model="m", **limits)
    return ServerTeacher(server, cache, TEMPLATE, SAMPLING, system="be brief", seed=3)


def test_a_server_is_asked_with_the_pages_in_one_turn(tmp_path, cache, context):
    with FakeServer([tagged([None, "x"], "42")]) as server:
        teacher = server_teacher(server.url, cache)
        (found,) = Sampler(teacher, 2, cache, PageFiles(tmp_path))([context])
        asked = server.asked
    assert [t.text for t in found] == [tagged([None, "x"], "42")] * 2
    assert [(t.sample, t.tokens) for t in found] == [(0, 10), (1, 10)]
    assert all((body["temperature"], body["max_tokens"]) == (0.7, 64) for body in asked)
    assert len({body["seed"] for body in asked}) == 2
    system, user = asked[0]["messages"]
    assert system == {"role": "system", "content": "be brief"}
    text, first, second = user["content"]
    assert text == {"type": "text", "text": "Look. Question: what is q?"}
    assert first["image_url"]["url"].startswith("data:image/png;base64,") and first != second


def test_a_server_is_never_paid_twice(tmp_path, cache, context):
    """Found by key; and what came in when the run died before it had noted it, by the client's own."""
    pages = PageFiles(tmp_path)
    with FakeServer(["one", "two"]) as server:
        teacher = server_teacher(server.url, cache, concurrency=1)
        teacher.answer = lambda asks, on_reply, on_failure: ServerTeacher.answer(
            teacher, asks, lambda ask, reply: None, on_failure
        )
        Sampler(teacher, 2, cache, pages)([context])  # nothing noted
        fresh = Sampler(server_teacher(server.url, cache), 2, cache, pages)
        (found,) = fresh([context])
        assert [t.text for t in found] == ["one", "two"] and fresh.asked == 2
        again = Sampler(server_teacher(server.url, cache), 2, cache, pages)
        assert again([context]) == [found] and (again.asked, again.reused) == (0, 2)
        assert len(server.asked) == 2


def test_a_failed_call_is_no_reply_and_is_tried_again(tmp_path, cache, context):
    with FakeServer([500, "right"]) as server:
        teacher = server_teacher(server.url, cache, concurrency=1)
        sampler = Sampler(teacher, 1, cache, PageFiles(tmp_path))
        (first,) = sampler([context])
        (second,) = sampler([context])
    assert "status 500" in first[0].failure and second[0].failure is None
    assert second[0].text == "right"


def test_the_cost_limit_holds_over_all_starts(tmp_path, cache, context):
    """110 tokens at 1 a million: the third call would start beyond 0.0002."""
    pages = PageFiles(tmp_path)
    with FakeServer(["text"]) as server:
        for _ in range(3):
            teacher = server_teacher(server.url, cache, concurrency=1, max_cost=0.0002)
            with pytest.raises(BudgetExceeded, match=r"max_cost=0\.0002"):
                Sampler(teacher, 5, cache, pages)([context])
            assert len(server.asked) == 2
        more = server_teacher(server.url, cache, max_cost=1.0)
        (found,) = Sampler(more, 5, cache, pages)([context])
        assert len(found) == len(server.asked) == 5
        assert more.client.spent == pytest.approx(5 * 110e-6, abs=1e-12)


def test_pages_that_nobody_can_see_cost_nothing(tmp_path, cache, context):
    page = context.pages[1].path
    sampler = Sampler(server_teacher("http://none/v1", cache), 1, cache, PageFiles(tmp_path))
    with Path(page).open("r+b") as file:
        file.truncate(40)
    (cut,) = sampler([context])
    assert isinstance(cut, Drop) and cut.reason == "unreadable_page" and "b.png" in cut.detail
    gone = PageFiles(tmp_path)
    (tmp_path / "raw" / "b.png").unlink()
    (missing,) = Sampler(sampler.teacher, 1, cache, gone)([context])
    assert missing.reason == "unreadable_page" and "No such file" in missing.detail


class StubMethod(OneCall):
    """EvidenceCoT whose requests hold only an id and a prompt's length."""

    def request(self, record, engine, pages=None):
        return SimpleNamespace(id=record.id, prompt=SimpleNamespace(ids=[0] * 7))


class StubEngine(Engine):
    """Finishes the last request first; the second of a group's completions failed where `broken`."""

    def __init__(self, broken=False):
        self.broken, self.calls = broken, []

    def generate(self, requests, sampling, *, group, seed, on_group):
        self.calls.append(([r.id for r in requests], group, seed))
        for index in reversed(range(len(requests))):
            done = []
            for sample in range(group):
                failed = self.broken and sample == 1
                done.append(
                    Completion(
                        ids=np.zeros(4, np.int32),
                        logp=np.zeros(4, np.float32),
                        text=f"{requests[index].id} {sample}",
                        offsets=np.zeros((4, 2), np.int32),
                        finish="error" if failed else "stop",
                        length=4,
                        error="not finite" if failed else None,
                    )
                )
            on_group(index, done)


def local(engine=None, error=None, model="w"):
    method = StubMethod(TEMPLATE, BUDGETS["mini"], sampling=SAMPLING, seed=5)
    if error is not None:

        def refuse(*_):
            raise error

        object.__setattr__(method, "request", refuse)  # the settings are frozen
    return LocalTeacher(method, engine or StubEngine(), 2, {"files": model})


def test_a_local_model_answers_in_groups(tmp_path, cache, context):
    engine = StubEngine()
    other = type(context)(**{**vars(context), "id": "other"})
    sampler = Sampler(local(engine), 2, cache, PageFiles(tmp_path))
    found = sampler([context, other])
    assert [[t.text for t in one] for one in found] == [
        ["q-top2 0", "q-top2 1"],
        ["other 0", "other 1"],
    ]
    assert engine.calls == [(["q-top2", "other"], 2, 5)]
    assert sampler([context, other]) == found and len(engine.calls) == 1
    assert cache.get(sampler._key(context, 1))["tokens_in"] == 7
    Sampler(local(engine, model="new"), 2, cache, PageFiles(tmp_path))([context])
    assert len(engine.calls) == 2  # other weights, other replies


def test_a_local_failure_is_no_reply(tmp_path, cache, context):
    engine = StubEngine(broken=True)
    sampler = Sampler(local(engine), 2, cache, PageFiles(tmp_path))
    (found,) = sampler([context])
    assert [t.failure for t in found] == [None, "not finite"]
    sampler([context])
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    ("cause", "reason"), [(PageError("b.png", "cut"), "unreadable_page"), (None, "too_long")]
)
def test_what_a_local_model_cannot_take(tmp_path, cache, context, cause, reason):
    error = MethodError("q-top2", "too much")
    error.__cause__ = cause
    with pytest.raises(ContextRefused, match=f"{reason}: too much"):
        local(error=error).prepare(context)
    (drop,) = Sampler(local(error=error), 2, cache, PageFiles(tmp_path))([context])
    assert drop == Drop(reason, "too much")


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(bytes(200_000))
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    data = bytearray(200_000)
    data[-1] = 1
    (tmp_path / "m.safetensors").write_bytes(data)
    assert fingerprint(tmp_path) != first


def test_the_whole_way_with_a_server(tmp_path):
    """Four questions, a server that is right about even ones; a second run sends nothing."""
    draw_pages(tmp_path / "raw", [f"d{i}" for i in range(4)])
    rows = [
        {
            "id": f"q{i}",
            "question": f"number {i}",
            "answers": [str(i)],
            "retrieved": [f"d{i}.png"],
            "relevant": [f"d{i}.png"],
        }
        for i in range(4)
    ]
    raw = tmp_path / "raw" / "raw.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def reply(body):
        number = int(body["messages"][-1]["content"][0]["text"].split()[-1])
        return tagged([f"it says {number}"], number if number % 2 == 0 else "7")

    config = ConstructionConfig(
        contexts=ContextConfig(ks=(1,)),
        filters=FilterConfig(samples=2),
        split=SplitConfig(tolerance=1.0),
        difficulty=DifficultyConfig(samples=0),
    )

    def run():
        return construct(
            Source(str(raw)),
            tmp_path / "run",
            config,
            make_teacher=lambda cache: server_teacher(server.url, cache),
        )

    with FakeServer(reply) as server:
        summary = run()
        assert Counter(summary["dropped"]["filters"]) == {"wrong_answer": 4, "duplicate": 2}
        assert summary["sets"]["sft"] + summary["sets"]["grpo"] == 2
        assert summary["responses"]["cost"] == pytest.approx(8 * 110e-6, abs=1e-12)
        again = run()
        assert len(server.asked) == 8 and again["responses"]["teacher/asked"] == 0
    assert {k: v for k, v in again.items() if k != "responses"} == {
        k: v for k, v in summary.items() if k != "responses"
    }
