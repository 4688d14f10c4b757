"""The client against a real local server: retries, limits, cost, and a cache that survives."""

import time

import pytest

from evisrag_jax.runtime.remote import (
    BudgetExceeded,
    ChatClient,
    RemoteError,
    Reply,
    ServerConfig,
    image_part,
)
from evisrag_jax.runtime.request_cache import RequestCache
from tests.fake_server import EMPTY, HANG, FakeServer

HELLO = [{"role": "user", "content": "hello"}]


def client(server, cache=None, **limits):
    waits: list[float] = []
    settings = {"timeout": 5.0, "attempts": 3, "deadline": 20.0} | limits
    config = ServerConfig(base_url=server.url, model="fake", **settings)
    made = ChatClient(config, cache, sleep=waits.append)
    made.waits = waits
    return made


def test_a_reply_and_its_cost():
    with FakeServer(["hi"]) as server:
        ask = client(server, price_in=2.0, price_out=10.0)
        got = ask.ask(HELLO, max_tokens=7, seed=3)
        assert (got.text, got.tokens_in, got.tokens_out, got.cached) == ("hi", 100, 10, False)
        assert got.cost == pytest.approx(3e-4)
        assert ask.spent == pytest.approx(3e-4) and ask.calls == 1
        sent = server.asked[0]
        assert sent["messages"] == HELLO and sent["max_tokens"] == 7 and sent["seed"] == 3
        assert sent["temperature"] == 0.0 and "base_url" not in sent


def test_429_waits_as_long_as_it_says():
    with FakeServer([(429, {"retry-after": "7"}), "hi"]) as server:
        ask = client(server)
        assert ask.ask(HELLO).text == "hi" and ask.waits == [7.0] and ask.calls == 2


def test_a_wait_beyond_the_deadline_is_not_begun():
    with FakeServer([(429, {"retry-after": "700"})]) as server:
        ask = client(server)
        with pytest.raises(
            RemoteError, match="status 429; waiting 700.0 s would pass the deadline"
        ):
            ask.ask(HELLO)
        assert ask.waits == []


@pytest.mark.parametrize(
    ("entry", "reason"), [(500, "status 500"), (EMPTY, ""), ("  ", "empty reply")]
)
def test_failures_that_may_pass_are_tried_again_and_end(entry, reason):
    with FakeServer([entry]) as server:
        ask = client(server)
        with pytest.raises(RemoteError, match=rf"model fake: .*{reason}.*\(3 tries\)"):
            ask.ask(HELLO)
        assert len(server.asked) == 3
        assert len(ask.waits) == 2 and 0.9 < ask.waits[1] / ask.waits[0] / 2 * 1.25 < 1.6


def test_failures_that_will_not_pass_end_at_once():
    with FakeServer([400]) as server:
        with pytest.raises(RemoteError, match="status 400"):
            client(server).ask(HELLO)
        assert len(server.asked) == 1


def test_a_hang_ends_with_the_timeout():
    with FakeServer([HANG, "hi"], hang=3.0) as server:
        begin = time.monotonic()
        assert client(server, timeout=0.3).ask(HELLO).text == "hi"
        assert time.monotonic() - begin < 2.5
    with (
        FakeServer([HANG], hang=1.0) as server,
        pytest.raises(RemoteError, match="no answer within"),
    ):
        client(server, timeout=0.2, attempts=2).ask(HELLO)


def test_nothing_is_paid_twice(tmp_path):
    with FakeServer(["hi"]) as server:
        with RequestCache(tmp_path / "requests.sqlite") as cache:
            assert not client(server, cache).ask(HELLO).cached
        with RequestCache(tmp_path / "requests.sqlite") as cache:
            ask = client(server, cache, price_in=1.0)
            again = ask.ask(HELLO)
            assert again.text == "hi" and again.cached and again.cost == 0 and ask.calls == 0
            assert len(cache) == 1
            assert not ask.ask(HELLO, temperature=0.5).cached, "another request"
            ask.forget(HELLO)
            assert not ask.ask(HELLO).cached
        assert len(server.asked) == 3


def test_the_cap_ends_a_run():
    with FakeServer(["hi"]) as server:
        ask = client(server, price_in=10_000.0, max_cost=1.5, concurrency=1)
        got = ask.ask_many([{"messages": HELLO, "seed": i} for i in range(5)])
        assert [isinstance(one, Reply) for one in got] == [True, True, False, False, False]
        assert all(isinstance(one, BudgetExceeded) for one in got[2:])
        assert "2.00 of server.max_cost=1.5 are spent" in str(got[2]) and len(server.asked) == 2


def test_many_requests_keep_their_order_and_their_failures():
    def script(body):
        number = int(body["messages"][0]["content"])
        time.sleep(0.02)
        return 400 if number == 2 else str(number)

    with FakeServer(script) as server:
        seen = {}
        requests = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(6)]
        got = client(server, concurrency=2).ask_many(requests, seen.__setitem__)
        assert [one.text if isinstance(one, Reply) else None for one in got] == [
            *("0", "1", None, "3", "4", "5"),
        ]
        assert seen == dict(enumerate(got)) and 1 <= server.most_busy <= 2


def test_pictures_travel_in_the_message(tmp_path):
    (tmp_path / "page.jpg").write_bytes(b"\xff\xd8data")
    part = image_part(tmp_path / "page.jpg")
    assert part["image_url"]["url"].startswith("data:image/jpeg;base64,/9hkYXRh")
    assert image_part(b"\x89PNG")["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout": 0.0}, "server.timeout=0.0 must be positive"),
        ({"attempts": 0}, "server.attempts=0"),
        ({"max_cost": 1.0}, "server.max_cost needs price_in or price_out"),
    ],
)
def test_bad_limits_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(base_url="x", model="y", **limits)
    with pytest.raises(ValueError, match="base_url and server.model are needed"):
        ChatClient(ServerConfig())
