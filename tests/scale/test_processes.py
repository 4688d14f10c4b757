"""Jobs of two processes with four devices each, over loopback: what one process does, they do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.rl.run import RLRun
from evisrag_jax.rl.run import train as train_rl
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.processes import Job, ProcessError, find_job, first_host
from evisrag_jax.runtime.run_folder import RunFolder
from evisrag_jax.runtime.watchdog import EXIT_STUCK
from evisrag_jax.sft import trainer
from evisrag_jax.sft.trainer import train as train_sft
from evisrag_jax.training.state import flatten, to_checkpoint
from tests.rl.tiny import few_devices  # noqa: F401  (a fixture)
from tests.scale import jobs

ROOT = Path(__file__).parents[2]
# Facts of a process or of the order in which numbers are added up.
UNLIKE = ("time", "compile", "cache", "rollout/logp_gap", "batch")


def launch(work: str, folder: Path, count: int = 2, devices: int = 4) -> tuple[int, str]:
    """Exit code and output of a job of `count` processes."""
    command = [sys.executable, ROOT / "tools/launch_local.py", "-n", count, "--devices", devices]
    command += ["--", sys.executable, "-m", "tests.scale.worker", work, folder]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(word) for word in command], env=env, capture_output=True, text=True, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """rl-1 and sft-1 by this process on one device, rl-2 and sft-2 by two with eight in all."""
    folder = tmp_path_factory.mktemp("job")
    jobs.write_inputs(folder)
    train_rl(jobs.rl_config(folder, 1), folder / "rl-1")
    train_sft(jobs.sft_config(folder, 1), folder / "sft-1")
    code, output = launch("train", folder)
    assert code == 0, output
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def texts(row: dict) -> tuple[str, ...]:
    return tuple(sample["text"] for sample in row["samples"])


def params_of(folder: Path, step: int) -> dict[str, np.ndarray]:
    saved = json.loads((folder / "checkpoints" / str(step) / "extra" / "metadata").read_text())
    config = jobs.rl_config(folder.parent, 1)
    with RunFolder(folder, writes=False) as run_folder:
        run = RLRun(config, run_folder, resumed=True)
        reader = Checkpoints(run_folder.checkpoints, identity=saved["identity"])
        return flatten(reader.restore_params(to_checkpoint(run.state)["params"], step).state)


def check_metrics(got: Path, want: Path) -> None:
    """Counts and rewards exactly, losses 1e-5."""
    got, want = rows(got / "metrics.jsonl"), rows(want / "metrics.jsonl")
    assert [row["step"] for row in got] == [row["step"] for row in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name.startswith(UNLIKE):
                continue
            exact = name.startswith(("reward", "filter", "scope", "data", "rollout", "eval/tokens"))
            close = pytest.approx(value, rel=1e-5, abs=1e-7)
            assert ours[name] == (value if exact else close), (ours["step"], name)


@pytest.mark.slow
def test_two_processes_train_as_one_does(folder):
    """RL with a filter that drops groups, SFT in two shapes with validation: the same draws, responses,
    rewards and counts; losses 1e-5, parameters after three updates 1e-5 relative."""
    check_metrics(folder / "rl-2", folder / "rl-1")
    check_metrics(folder / "sft-2", folder / "sft-1")
    for name in ("rl", "sft"):
        got, want = (flatten(load_params(folder / f"{name}-{n}" / "model")[0]) for n in (2, 1))
        for path, value in want.items():
            assert np.linalg.norm(got[path] - value) <= 1e-5 * np.linalg.norm(value), path
    told = json.loads((folder / "moved.json").read_text())
    assert sum(one["moved"] for one in told) > 0, "no group changed its process: nothing was tested"
    assert any(row["filter/rounds"] == 2 for row in rows(folder / "rl-1" / "metrics.jsonl"))


@pytest.mark.slow
def test_process_0_writes_and_samples_the_rows_of_one_process(folder):
    """Rollout rows are process 0's own, as a single process has them; records refused by process 1 stand in
    its own file; everything else is written once."""
    for step in (1, 2, 3):
        path = f"rollouts/step_{step:06d}.jsonl"
        # Two rollouts of a step may draw one record twice.
        whole = {(row["id"], texts(row)): row for row in rows(folder / "rl-1" / path)}
        own = rows(folder / "rl-2" / path)
        assert 0 < len(own) < jobs.PROMPTS
        for row in own:
            theirs = whole[row["id"], texts(row)]["samples"]
            for got, want in zip(row["samples"], theirs, strict=True):
                assert got["advantages"] == pytest.approx(want["advantages"], rel=1e-5, abs=1e-6)
    refused = {
        (row["id"], row.get("position"))
        for path in (folder / "rl-2").glob("rejected*.jsonl")
        for row in rows(path)
    }
    assert refused == {
        (row["id"], row.get("position")) for row in rows(folder / "rl-1" / "rejected.jsonl")
    }
    assert {path.name for path in (folder / "rl-2").iterdir()} - {"rejected-1.jsonl"} == {
        path.name for path in (folder / "rl-1").iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes(folder, before):
    """One process's run killed after step 1 is ended by two, and the other way: as the uninterrupted run
    (metrics 1e-5, parameters 1e-6 of the other side's straight run)."""
    out = folder / "resumed"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / f"rl-{before}", out)
    for step in (2, 3):
        shutil.rmtree(out / "checkpoints" / str(step))
    shutil.rmtree(out / "model")
    if before == 1:
        code, output = launch("go_on", folder)
        assert code == 0, output
    else:
        train_rl(jobs.rl_config(folder, 1), out)
    check_metrics(out, folder / "rl-1")
    got, want = params_of(out, 3), params_of(folder / "rl-1", 3)
    for path, value in want.items():
        assert np.linalg.norm(got[path] - value) <= 1e-6 * np.linalg.norm(value), path


@pytest.mark.parametrize(
    ("work", "watcher"),
    [("asleep", (1, "rollout 1", 0, "update")), ("stopped", (0, "update", 1, "rollout 1"))],
)
def test_a_stuck_peer_ends_the_job(tmp_path, work, watcher):
    """Exit code 75 within the limit; the message names the step, the last place, and where the peer is.
    Whoever has been silent longest speaks, or the peer of one that cannot."""
    code, output = launch(work, tmp_path, devices=1)
    me, mine, peer, theirs = watcher
    assert code == EXIT_STUCK, output
    assert f"process {me} of 2: no progress for 4 s after 'step 7: {mine}'" in output
    assert f"process {peer} was last at 'step 7: {theirs}'" in output


def test_a_missing_peer_is_named_by_the_barrier(tmp_path):
    code, output = launch("late", tmp_path, devices=1)
    assert code == 3 and "ProcessError: barrier 'step 3': not all processes came" in output


def test_what_fails_in_process_0_is_told_to_all(tmp_path):
    code, output = launch("refused", tmp_path, devices=1)
    assert code == 3
    assert "[0] ValueError: the folder is of another run" in output
    assert "[1] ProcessError: process 0: the folder is of another run" in output


SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (SLURM, Job("gpu07:61444", 16, 9, (1,))),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)"}, Job("gpu07:61444", 16, 9, None)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (OMPI, Job(f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 4, 3, (1,))),
    ],
)
def test_the_job_is_found_in_the_environment(environ, expected):
    assert find_job(environ=environ) == expected


def test_flags_win_over_the_environment_and_belong_together():
    assert find_job("a:1", 2, 1, environ=SLURM) == Job("a:1", 2, 1)
    assert find_job("a:1", 1, 0, environ=SLURM) is None
    with pytest.raises(ProcessError, match="belong together"):
        find_job("a:1", environ={})
    with pytest.raises(ProcessError, match="process 2 of 2 does not exist"):
        find_job("a:1", 2, 2, environ={})
    with pytest.raises(ProcessError, match="HOST:PORT"):
        find_job("a", 2, 0, environ={})
    with pytest.raises(ProcessError, match="give --coordinator"):
        find_job(environ={**OMPI, "OMPI_MCA_orte_hnp_uri": ""})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("node1,host2", "node1"), ("n[001-015],h2", "n001"), ("n[7,9]", "n7")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.fixture(autouse=True)
def one_device_for_sft(monkeypatch):
    """SFT meshes take as many of this process's eight devices as their sizes say."""
    import jax

    make_mesh = trainer.meshes.make_mesh

    def mesh(data, fsdp, tensor, devices=None):
        return make_mesh(data, fsdp, tensor, devices or jax.devices()[: data * fsdp * tensor])

    monkeypatch.setattr(trainer.meshes, "make_mesh", mesh)
