"""Timing in turn, reports and their JSON, with made-up times; no benchmark is run here."""

import argparse
import json

import bench_gpu
import bench_growth
import bench_rollout
import bench_step
import bench_update
import numpy as np
import pytest
from bench import growth, machine, timing
from bench.agreement import equal_tokens, gradient_errors
from bench.report import Report
from bench.shapes import SHAPES


def make_report(*columns, **times):
    versions = {"affinity": [0, 1], "threads": 2, "dtype": "float32", "packages": {"jax": "0"}}
    shapes = {"tiny": SHAPES["tiny"].sizes()}
    return Report("test", columns or ("side", "a"), shapes, versions, times=times)


def read(report, path):
    report.finish(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert {"ratios", "shapes", "versions", "times", "table"} <= set(content)
    assert all(len(row) == len(report.columns) for row in content["table"]["rows"])
    return content


def test_sides_take_turns():
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = timing.alternate(sides, 3, warmup=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}


def test_rollout_ratios(tmp_path):
    report = make_report(
        "side", "tokens/s", "median s", "least – most",
        **{
            "ours": [1.0, 2.0, 9.0],
            "transformers generate": [6.0, 5.0, 1.0],
            "ours, greedy": [1.0],
            "transformers generate, greedy": [4.0],
            bench_rollout.CACHED: [0.5],
        },
    )  # fmt: skip
    bench_rollout.fill(report, 100)
    content = read(report, tmp_path / "out.json")
    assert content["ratios"] == {"rollout_tokens_per_s": 2.5, "rollout_tokens_per_s_greedy": 4.0}
    assert content["table"]["rows"][0][:3] == ["ours", "50.000", "2.000"]
    assert len(content["table"]["rows"]) == 5
    assert content["times"]["ours"] == [1.0, 2.0, 9.0]


def test_update_ratios(tmp_path):
    report = make_report(*"abcdef", ours=[1.0, 2.0, 3.0], torch=[8.0, 8.0, 9.0])
    memory = {
        "ours": {"base": 100, "peak": 400, "rise": 300, "process": 500, "reset": True},
        "torch": {"base": 100, "peak": 1100, "rise": 1000, "process": 1000, "reset": False},
    }
    bench_update.fill(report, memory)
    content = read(report, tmp_path / "out.json")
    assert content["ratios"] == {
        "update_time": 4.0,
        "update_peak_memory": 0.3,
        "update_peak_memory_process": 0.5,
        "update_peak_memory_steps": pytest.approx(400 / 1100),
    }
    assert content["checks"]["memory"] == memory
    assert "cannot start a peak anew" in content["notes"][0]


def test_step_ratios(tmp_path):
    report = make_report(*"abcd", ours=[1.0, 1.0, 5.0], trl=[4.0, 5.0, 6.0])
    bench_step.fill(report, {"ours": [64, 63, 64], "trl": [64, 64, 64]}, [0, 0, 0])
    content = read(report, tmp_path / "out.json")
    assert content["ratios"] == {"step_time": 5.0, "compiles_after_first": 0.0}


def test_growth_exponents(tmp_path):
    points = [
        {"times": {"rollout": [float(g)], "update": [3.0 * g]}, "memory": 2**20 * g * g}
        for g in (1, 2, 4, 8)
    ]
    report = make_report(*"abcdef")
    bench_growth.fill(report, "group", (1, 2, 4, 8), points)
    ratios = read(report, tmp_path / "out.json")["ratios"]
    assert ratios["exponent/group/step"] == pytest.approx(1)
    assert ratios["exponent/group/memory"] == pytest.approx(2)
    assert ratios["step_g8_over_g1"] == 8


@pytest.mark.parametrize("axis", growth.AXES)
def test_growth_changes_one_size(axis):
    base = SHAPES["rag-cpu"]
    for value in growth.AXES[axis]:
        shape = growth.along(axis, value, base)
        assert getattr(shape, axis) == value
        assert shape.prompt > shape.pages * (shape.page_tokens + 2)
    same = growth.along("pages", base.pages, base)
    assert (same.prompt, same.pages) == (base.prompt, base.pages)


def test_two_sides_of_a_gpu_section(tmp_path):
    report = make_report(*"abcde")
    bench_gpu._in_turn(report, SHAPES["tiny"], {"x": [1.0], "y": [3.0]}, "tiny/y_over_x")
    content = read(report, tmp_path / "out.json")
    assert content["ratios"] == {"tiny/y_over_x": 3.0}
    assert content["times"] == {"tiny x": [1.0], "tiny y": [3.0]}


def test_utilisation_needs_a_known_peak():
    report = make_report("a")
    assert bench_gpu._mfu(report, "m", 10**12, 2.0, None) == "0.5 TFLOP/s" and not report.ratios
    assert "MFU 50.0 %" in bench_gpu._mfu(report, "m", 10**12, 2.0, (1e12, 1.0))
    assert report.ratios == {"m": 0.5}


def test_without_a_gpu_there_is_no_figure(monkeypatch, tmp_path, capsys):
    """The whole command on this machine: it says so, and writes empty ratios."""
    path = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["bench_gpu.py", "--json", str(path)])
    monkeypatch.setattr("evisrag_jax.runtime.compile_cache.enable_compile_cache", lambda: None)
    assert bench_gpu.main() == 0
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["ratios"] == {} and content["times"] == {}
    assert "no GPU here" in capsys.readouterr().out


def test_memory_of_a_run():
    """A rise is at least what the run touched, and is measured again from the next run's base."""
    held = []
    first = machine.memory_of(lambda: held.append(np.ones(64 * 2**17)))
    assert first["rise"] > 60 and first["process"] >= first["peak"]
    held.clear()
    second = machine.memory_of(lambda: None)
    if second["reset"]:
        assert second["rise"] < 30


def test_equal_tokens_stop_at_the_first_difference():
    ours = [np.array([1, 2, 3]), np.array([1, 9, 3])]
    assert equal_tokens(ours, np.array([[1, 2, 3], [1, 2, 3]])) == (4, 6)


def test_gradient_errors_are_by_tensor():
    """Equal gradients differ by 0; one changed layer is named; small tensors count against the whole."""
    import jax

    from evisrag_jax.models.qwen25vl.model import param_shapes
    from evisrag_jax.models.qwen25vl.tensors import entries
    from evisrag_jax.training.state import flatten

    shape, rng = SHAPES["tiny"], np.random.default_rng(0)
    ours = jax.tree.map(
        lambda a: rng.normal(size=a.shape).astype(np.float32), flatten(param_shapes(shape.config))
    )
    theirs = {}
    for entry in entries(shape.config):
        value = ours["/".join(entry.path)]
        theirs[entry.name] = np.array(
            entry.save(value if entry.layer is None else value[entry.layer])
        )
    errors = gradient_errors(shape, ours, theirs)
    assert set(errors) == set(theirs) and max(errors.values()) == 0
    theirs["model.layers.1.self_attn.k_proj.weight"] *= 1.01
    changed = gradient_errors(shape, ours, theirs)
    assert [name for name, e in changed.items() if e > 1e-3] == [
        "model.layers.1.self_attn.k_proj.weight"
    ]


def test_shapes_are_those_of_the_issue():
    shape = SHAPES["rag-cpu"]
    assert (shape.pages * shape.page_tokens, shape.prompt, shape.group, shape.response) == (
        *(768, 900, 8, 128),
    )
    long = SHAPES["rag-cpu-long"]
    assert (long.pages, long.page_tokens, long.prompt) == (5, 450, 2500)
    assert long.text == shape.text and long.vision == shape.vision


def test_help_teaches(capsys, monkeypatch):
    for script in (bench_rollout, bench_update, bench_step, bench_growth, bench_gpu):
        monkeypatch.setattr("sys.argv", [script.__name__, "--help"])
        with pytest.raises(SystemExit):
            script.main()
        text = capsys.readouterr().out
        assert "--json" in text and "JSON ratios" in text and "python tools/" in text


def test_options(monkeypatch):
    from bench.command import parser, shape_of

    args = parser("x").parse_args(["--shape", "rag-cpu-long", "--tiny"])
    assert isinstance(args, argparse.Namespace) and shape_of(args).name == "tiny"
    assert shape_of(parser("x").parse_args([])).name == "rag-cpu"
