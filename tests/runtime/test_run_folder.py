"""Run folders and metric writers: layout, resume, and refusal of another run."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict
from tensorboardX.proto import event_pb2

from evisrag_jax.runtime.json_files import read_json, read_jsonl
from evisrag_jax.runtime.metrics import MetricError, MetricWriter
from evisrag_jax.runtime.run_folder import RunFolder, RunFolderError, difference


def tensorboard_scalars(folder):
    """(tag, step, value) of every event, by the record format: length, crc, data, crc."""
    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 16 + size
    return found


def test_layout_of_a_run(tmp_path):
    with RunFolder(tmp_path / "a" / "run") as run:
        run.start(ConfigDict({"lr": 1e-3, "seed": 0}), devices=["cpu:0"])
        run.reject(id="q1", reason="aspect", file="p.png")
        run.predict({"id": "q2", "answer": "5"})
        run.add_span("rollout", 3, 10.0, 12.5)
        run.write_rollouts(3, [{"step": 3, "id": "q2", "samples": []}])
        run.write_summary({"accuracy": 0.5})
    assert run.read_config() == {"lr": 1e-3, "seed": 0}
    facts = read_json(run.versions)
    assert facts["devices"] == ["cpu:0"] and facts["packages"]["jax"] == jax.__version__
    assert read_jsonl(run.rejected) == [{"id": "q1", "reason": "aspect", "file": "p.png"}]
    assert read_jsonl(run.predictions) == [{"id": "q2", "answer": "5"}]
    (row,) = read_jsonl(run.timeline)
    assert row.keys() == {"step", "name", "start", "seconds"} and row["seconds"] == 2.5
    assert run.rollout_steps() == [3] and run.rollout_path(3).name == "step_000003.jsonl"
    assert read_json(run.summary) == {"accuracy": 0.5}


def test_another_run_is_not_overwritten(tmp_path):
    run = RunFolder(tmp_path)
    run.start({"lr": 1.0, "opt": {"b1": 0.9}})
    run.start({"lr": 2.0, "opt": {"b1": 0.9}})  # no step yet: nothing is lost
    run.append(run.metrics, {"step": 0})
    with pytest.raises(RunFolderError, match="already holds a run"):
        run.start({"lr": 2.0})
    with pytest.raises(RunFolderError, match=r"lr: 2\.0 -> 3\.0\n  opt\.b2: \(absent\) -> 1"):
        run.start({"lr": 3.0, "opt": {"b1": 0.9, "b2": 1}}, resume=True)
    run.start({"lr": 2.0, "opt": {"b1": 0.5}}, resume=True, may_differ=["opt"])
    assert run.read_config()["opt"] == {"b1": 0.5}
    run.close()


def test_no_run_and_no_folder(tmp_path):
    with pytest.raises(RunFolderError, match=r"no config\.json"):
        RunFolder(tmp_path / "x").read_config()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "file")


def test_difference_names_fields():
    assert difference({"a": 1, "b": {"c": [1]}}, {"a": 1, "b": {"c": [1]}}) == []
    assert difference({"a": 1, "b": {"c": [1]}}, {"b": {"c": [2]}, "d": None}) == [
        "a: 1 -> (absent)",
        "b.c: [1] -> [2]",
        "d: (absent) -> None",
    ]


def test_truncate_forgets_later_steps_everywhere(tmp_path):
    with RunFolder(tmp_path) as run:
        run.reject(id="early", reason="aspect")
        for step in range(6):
            run.append(run.metrics, {"step": step})
            run.append(run.timeline, {"step": step, "name": "update"})
            run.reject(id=f"q{step}", reason="long", step=step)
            run.write_rollouts(step, [{"step": step}])
        run.truncate(3)
        run.append(run.metrics, {"step": 4, "again": 1})
        assert [row["step"] for row in run.read_metrics()] == [0, 1, 2, 3, 4]
        assert len(read_jsonl(run.timeline)) == 4
        assert [row["id"] for row in read_jsonl(run.rejected)] == ["early", "q0", "q1", "q2", "q3"]
        assert run.rollout_steps() == [0, 1, 2, 3]


def test_metrics_to_rows_and_tensorboard(tmp_path):
    loss = jnp.float32(0.5)
    with RunFolder(tmp_path) as run, MetricWriter(run) as writer:
        with jax.transfer_guard("disallow"):
            writer.write(1, {"loss/total": loss, "lr": 1e-3})
        writer.write(1, {"eval/accuracy": 0.25})
        writer.write(2, {"loss/total": float("nan"), "reward/overall": jnp.ones((1,))})
        rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 1, 2]
    assert rows[0]["loss/total"] == 0.5 and rows[0]["lr"] == 1e-3 and rows[0]["time"] >= 0
    assert rows[2]["loss/total"] is None and rows[2]["nonfinite"] == ["loss/total"]
    assert rows[2]["reward/overall"] == 1.0
    assert "NaN" not in run.metrics.read_text()
    events = tensorboard_scalars(run.tensorboard)
    assert ("loss/total", 1, 0.5) in events and ("eval/accuracy", 1, 0.25) in events


def test_metrics_resume_cuts_rows_and_goes_on(tmp_path):
    with RunFolder(tmp_path) as run:
        with MetricWriter(run) as writer:
            for step in range(1, 6):
                writer.write(step, {"loss/total": float(step)})
        before = run.read_metrics()[2]["time"]
        with MetricWriter(run, resume_step=3) as writer:
            row = writer.write(4, {"loss/total": 40.0})
        assert row["time"] >= before
        assert [row["loss/total"] for row in run.read_metrics()] == [1.0, 2.0, 3.0, 40.0]


def test_bad_metrics_are_refused_by_name(tmp_path):
    with RunFolder(tmp_path) as run, MetricWriter(run, tensorboard=False) as writer:
        writer.write(5, {})
        with pytest.raises(MetricError, match="step 4 after step 5"):
            writer.write(4, {})
        with pytest.raises(MetricError, match=r"loss/x: a metric is one number, not shape \(3,\)"):
            writer.write(6, {"loss/x": jnp.ones(3)})
        for name in ("step", "time", "a b", "/x", ""):
            with pytest.raises(MetricError, match="is not a metric's name"):
                writer.write(6, {name: 1.0})
        assert not run.tensorboard.exists()


def test_wandb_is_used_when_asked_for(tmp_path, monkeypatch):
    logged = []
    fake = types.ModuleType("wandb")
    run_object = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: logged.append("finished"),
    )
    fake.init = lambda **settings: logged.append(settings) or run_object
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with RunFolder(tmp_path) as run:
        run.start({"lr": 1})
        with MetricWriter(run, tensorboard=False, wandb={"project": "p"}) as writer:
            writer.write(1, {"lr": 2.0})
    assert logged == [
        {"dir": str(tmp_path), "config": {"lr": 1}, "project": "p"},
        (1, {"lr": 2.0}),
        "finished",
    ]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MetricError, match=r"pip install 'evisrag-jax\[wandb\]'"):
        MetricWriter(run, tensorboard=False, wandb={})


def test_run_folders_and_metrics_do_not_import_jax(tmp_path):
    code = (
        "import sys; from evisrag_jax.runtime.run_folder import RunFolder\n"
        "from evisrag_jax.runtime.metrics import MetricWriter\n"
        "run = RunFolder(sys.argv[1]); run.start({'a': 1})\n"
        "MetricWriter(run, tensorboard=False).write(0, {'x/y': 1.0}); run.close()\n"
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["x/y"] == 1.0
