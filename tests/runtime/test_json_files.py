"""JSON files: strict, atomic, and readable after a crash."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from evisrag_jax.runtime import json_files as j


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    name: tuple[str, ...]


def test_plain_values():
    value = {
        "a": np.float32(1.5),
        "b": np.arange(3),
        "c": jnp.ones((2, 1), jnp.bfloat16),
        "d": Point(float("nan"), ("x",)),
        "e": ConfigDict({"f": (1, 2)}),
        "g": Path("p/q"),
        "h": {3, 1},
        "i": [np.bool_(True), None, float("-inf")],
        4: np.int64(2),
    }
    assert j.plain(value) == {
        "a": 1.5,
        "b": [0, 1, 2],
        "c": [[1.0], [1.0]],
        "d": {"x": None, "name": ["x"]},
        "e": {"f": [1, 2]},
        "g": "p/q",
        "h": [1, 3],
        "i": [True, None, None],
        "4": 2,
    }
    assert type(j.plain(np.int64(2))) is int
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        j.plain({"x": object()})


def test_write_json_replaces_atomically_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "new" / "a.json"
    j.write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        j.write_json(path, {"x": object()})
    assert j.read_json(path) == {"x": 1}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    path.write_text("{")
    with pytest.raises(j.JsonFileError, match=r"a\.json: not JSON"):
        j.read_json(path)


def test_rows_keep_line_separators_inside_strings(tmp_path):
    rows = [{"t": "a\u2028b\nc\u0085"}, {"t": "\x0b\x0c\x1c"}]
    j.write_jsonl(tmp_path / "r.jsonl", rows)
    assert j.read_jsonl(tmp_path / "r.jsonl") == rows


def test_a_torn_last_line_is_skipped_and_dropped_when_appending(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3')
    assert j.read_jsonl(path) == [{"a": 1}, {"a": 2}]
    with j.JsonlWriter(path) as writer:
        writer.write({"a": 4})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 4}\n'
    with pytest.raises(j.JsonFileError, match="closed"):
        writer.write({"a": 5})


def test_a_broken_line_inside_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n{"a": 3}\n')
    with pytest.raises(j.JsonFileError, match=r"r\.jsonl: line 3 is not JSON"):
        j.read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(j.JsonFileError, match="line 1 is not an object"):
        j.read_jsonl(path)
    assert j.read_jsonl(tmp_path / "absent.jsonl") == []


def test_filter_rewrites_only_when_needed(tmp_path):
    path = tmp_path / "r.jsonl"
    j.write_jsonl(path, [{"a": n} for n in range(5)])
    before = path.stat().st_ino
    assert j.filter_jsonl(path, lambda row: True) == (5, 0)
    assert path.stat().st_ino == before
    assert j.filter_jsonl(path, lambda row: row["a"] < 2) == (2, 3)
    assert [row["a"] for row in j.read_jsonl(path)] == [0, 1]


def test_rows_written_before_a_kill_are_there(tmp_path):
    path = tmp_path / "r.jsonl"
    code = (
        "import sys, os, signal; from evisrag_jax.runtime.json_files import JsonlWriter\n"
        "w = JsonlWriter(sys.argv[1])\n"
        "for n in range(20): w.write({'n': n, 'pad': 'x' * 5000})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert [row["n"] for row in j.read_jsonl(path)] == list(range(20))
    assert all(json.loads(line) for line in path.read_text().splitlines())
