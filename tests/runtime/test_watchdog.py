"""The watchdog: it speaks when nothing moves, and only then; one process needs no others."""

import threading
import time

import numpy as np

from evisrag_jax.runtime import processes, watchdog


def test_silence_ends_and_signs_of_life_do_not():
    ended = threading.Event()
    messages = []
    dog = watchdog.Watchdog(0.4, lambda message: (messages.append(message), ended.set()))
    for i in range(10):
        time.sleep(0.1)
        dog.beat(f"step {i}")
    assert not messages
    assert ended.wait(30)
    assert messages[0].startswith("process 0 of 1: no progress for 0.4 s after 'step 9'")
    dog.close()


def test_beats_reach_the_running_watchdog_only(monkeypatch):
    watchdog.beat("nobody listens")
    with watchdog.watching(0):
        watchdog.beat("still nobody")
    seen = []
    monkeypatch.setattr(watchdog.Watchdog, "beat", lambda self, place: seen.append(place))
    with watchdog.watching(600):
        watchdog.beat("heard")
    watchdog.beat("over")
    assert seen == ["heard"]


def test_one_process_agrees_with_itself():
    tree = {"a": np.arange(3), "b": None, "c": np.bool_(True)}
    told = processes.gather(tree)
    np.testing.assert_array_equal(told["a"], [[0, 1, 2]])
    assert told["b"] is None and told["c"].shape == (1,)
    assert processes.gather_json({"x": 1}) == [{"x": 1}]
    assert processes.any_process(True) and not processes.any_process(False)
    assert processes.from_primary(lambda: 7, "seven") == 7 and processes.is_primary()
    processes.barrier("alone")
    processes.publish("k", "v")
    assert processes.published("k") is None
    processes.leave(3)
