"""The step timeline: overlapping phases, idle time, and rows that the report reads."""

import itertools

import pytest

from evisrag_jax.reporting.timing import time_chart
from evisrag_jax.runtime import timeline as module
from evisrag_jax.runtime.json_files import read_jsonl
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.runtime.timeline import StepTimeline, uncovered


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds, …): what perf_counter says from now on."""

    def set_to(*times):
        values = itertools.chain(times, itertools.repeat(times[-1]))
        monkeypatch.setattr(module.time, "perf_counter", lambda: next(values))

    return set_to


def test_phases_and_idle_time_of_a_step(tmp_path, clock):
    """|idle 1| decode 4, reward 2 of it and 1 beyond |idle 1| update 2 |: 9 seconds."""
    with RunFolder(tmp_path) as run:
        run._start = 0.0
        timeline = StepTimeline(run)
        clock(1.0)
        timeline.start(7)
        timeline.add([("decode", 2.0, 4.0), ("decode", 4.0, 6.0), ("encode", 2.0, 2.0)])
        timeline.add([("reward", 4.0, 7.0)])
        clock(8.0, 10.0, 10.0)
        with timeline.phase("update"):
            pass
        assert timeline.finish() == {
            "time/decode": 4.0,
            "time/encode": 0.0,
            "time/reward": 3.0,
            "time/update": 2.0,
            "time/idle": 2.0,
        }
        clock(20.0)
        timeline.start(8)
        clock(20.0, 21.0, 21.5)
        with pytest.raises(RuntimeError), timeline.phase("update"):
            raise RuntimeError
        timeline.start(8)
    rows = read_jsonl(run.timeline)
    got = [(r["step"], r["name"], r["start"], r["seconds"]) for r in rows]
    assert got == [
        (7, "idle", 1.0, 1.0),
        (7, "decode", 2.0, 2.0),
        (7, "decode", 4.0, 2.0),
        (7, "reward", 4.0, 3.0),
        (7, "idle", 7.0, 1.0),
        (7, "update", 8.0, 2.0),
    ]
    phases = {p.name: (p.total, p.hidden) for p in time_chart(rows).phases}
    assert phases == {"decode": (4, 0), "reward": (1, 2), "update": (2, 0), "idle": (2, 0)}


def test_uncovered_parts():
    assert uncovered([(3.0, 4.0), (1.0, 2.0)], 0.0, 5.0) == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert uncovered([(0.0, 3.0), (1.0, 2.0)], 0.0, 3.0) == []
    assert uncovered([], 1.0, 2.0) == [(1.0, 2.0)]
