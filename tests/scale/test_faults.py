"""What a run survives: a full disk, damaged checkpoints, being asked to stop, gradients that are not
finite, dead workers; and that a resume holds one state."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from evisrag_jax.cli.main import main
from evisrag_jax.runtime import checkpoints as stores
from evisrag_jax.runtime.checkpoint_files import Listed, damage
from evisrag_jax.runtime.checkpoints import CheckpointError, Checkpoints
from evisrag_jax.runtime.run_folder import RunFolder, RunFolderError
from evisrag_jax.sft.trainer import train
from evisrag_jax.training.loop import NonFiniteError
from evisrag_jax.training.optimiser import OptimConfig, make_optimiser, skipped_updates
from evisrag_jax.training.pretrained import ModelError, find_model
from evisrag_jax.training.stopping import Preempted
from tests.rl.tiny import few_devices, write_model  # noqa: F401  (a fixture)
from tests.sft.tiny import make_config, make_pages, make_record, write_rows
from tests.training.test_loop import go, rows, same, step_fn, toy_state

ROOT = str(Path(__file__).parents[2])
TINY = {"params": {"x": jnp.zeros(64)}}

# A toy run in a process of its own: argv are its folder and Python that is run before it.
TOY = """
import os, resource, signal, sys, time
import jax
from pathlib import Path
from tests.training.test_loop import go, step_fn
folder = Path(sys.argv[1])
settings = {"save_every": 1}
def step(state, data, k):
    return step_fn(state, data, k)
exec(sys.argv[2])
print(go(folder, 6, step=step, **settings).step)
"""


def toy_process(folder, code):
    env = dict(os.environ, PYTHONPATH=ROOT, JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", TOY, str(folder), code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    pages = make_pages(folder)
    return write_rows(
        folder / "train.jsonl", [make_record(f"r{i}", 8 + 4 * i, pages, seed=i) for i in range(8)]
    )


# Disks.


def test_a_disk_that_is_full_ends_the_run_with_the_path_and_loses_no_checkpoint(tmp_path):
    """No file may grow beyond 64 bytes from the save of step 3 on: the run names the folder, step 2 is
    whole, and with room again the run goes on from there to the same end."""
    code = (
        "def step(state, data, k):\n"
        "    if k == 3:\n"
        "        store = folder / 'checkpoints'\n"
        "        while not (store / '2').is_dir(): time.sleep(0.01)\n"
        "        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "        import evisrag_jax.runtime.checkpoints as c\n"
        "        save = c.Checkpoints.save\n"
        "        def full(self, *a, **k):\n"
        "            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))\n"
        "            save(self, *a, **k)\n"
        "        c.Checkpoints.save = full\n"
        "    return step_fn(state, data, k)\n"
    )
    done = toy_process(tmp_path / "run", code)
    assert done.returncode == 1 and "CheckpointError" in done.stderr, done.stderr[-2000:]
    assert str(tmp_path / "run" / "checkpoints") in done.stderr.splitlines()[-1]
    store = Checkpoints(tmp_path / "run" / "checkpoints", identity={})
    assert store.latest_step() == 2
    result = go(tmp_path / "run", 6, save_every=1)
    assert result.restored == 2
    same(result.state, go(tmp_path / "straight", 6).state)
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")


def test_a_write_that_fails_in_the_background_ends_the_next_step_with_the_path(
    tmp_path, monkeypatch
):
    """B75: the disk refuses the end of the save of step 2 while step 3 runs."""
    finalize = Listed.finalize
    seen = []

    async def refusing(self):
        if Path(self.get_final()).name == "2":
            seen.append(self)
            raise OSError(28, "No space left on device", str(self.get()))
        await finalize(self)

    def patient(state, data, k):
        if k == 3:  # the save is in the background
            while not seen or store._manager.is_saving_in_progress():
                pass
        return step_fn(state, data, k)

    monkeypatch.setattr(Listed, "finalize", refusing)
    opened = Checkpoints._open

    def spy(self):
        nonlocal store
        store = self
        return opened(self)

    store = None
    monkeypatch.setattr(Checkpoints, "_open", spy)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*No space left on device"):
        go(tmp_path, 6, step=patient, save_every=1)
    assert rows(tmp_path)[-1]["step"] == 2
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "checkpoints", identity={}).steps() == [1]
    assert go(tmp_path, 6, save_every=1).restored == 1


def test_a_disk_without_room_is_refused_with_numbers_before_anything_is_written(
    tmp_path, monkeypatch
):
    full = type("Usage", (), {"free": 30})()
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(CheckpointError, match="checkpoints: a checkpoint needs .* has 3e-08 GB"):
        go(tmp_path, 3)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "metrics.jsonl").exists()


# Damaged folders.


def save_steps(folder, *steps, keep=5):
    with Checkpoints(folder, identity={}, keep=keep) as store:
        for step in steps:
            store.save(step, {"params": {"x": jnp.full(64, float(step))}})


def arrays(folder):
    """The files of a step that hold array data."""
    return [p for p in (folder / "params").rglob("d/*") if p.is_file() and p.stat().st_size]


def test_a_truncated_checkpoint_is_passed_over_with_its_file_named(tmp_path):
    save_steps(tmp_path, 1, 2)
    cut = arrays(tmp_path / "2")[0]
    cut.write_bytes(cut.read_bytes()[:-1])
    store = Checkpoints(tmp_path, identity={})
    assert store.latest_step() == 1 and str(cut) in store.damaged()[2]
    assert float(store.restore_latest(TINY).state["params"]["x"][0]) == 1.0


def test_a_checkpoint_that_cannot_be_read_is_set_aside_and_the_one_before_it_is_read(
    tmp_path, caplog
):
    """Its files have their sizes and other bytes."""
    save_steps(tmp_path, 1, 2)
    for path in arrays(tmp_path / "2"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    store = Checkpoints(tmp_path, identity={})
    assert store.latest_step() == 2
    got = store.restore_latest(TINY)
    assert got.step == 1 and float(got.state["params"]["x"][0]) == 1.0
    assert "going on from step 1" in caplog.text and (tmp_path / "unreadable-2-0").is_dir()
    save_steps(tmp_path, 2, 3)
    assert store.steps() == [1, 2, 3]


def test_a_single_checkpoint_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    save_steps(tmp_path, 1)
    for path in arrays(tmp_path / "1"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/1/params: cannot be read"):
        Checkpoints(tmp_path, identity={}).restore_latest(TINY)


def test_a_run_whose_every_checkpoint_is_damaged_is_not_begun_anew(tmp_path):
    """That would drop its metrics without a word."""
    go(tmp_path, 2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "checkpoints" / "2" / "extra" / "metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole \(step 2: .*is missing"):
        go(tmp_path, 4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_run_goes_on_from_an_older_step_once_the_later_ones_are_removed(tmp_path):
    straight = go(tmp_path, 6)
    before = rows(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    again = go(tmp_path, 6)
    assert again.restored == 4 and rows(tmp_path) == before
    same(again.state, straight.state)


def test_what_a_later_checkpoint_has_made_useless_is_deleted(tmp_path):
    """A delete that was cut short, and folders set aside before; a damaged newer step stays."""
    save_steps(tmp_path, 1, 2, 3, 4)
    arrays(tmp_path / "1")[0].unlink()
    arrays(tmp_path / "4")[0].unlink()
    (tmp_path / "incomplete-2-0").mkdir()
    save_steps(tmp_path, 5)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"2", "3", "5", "incomplete-4-0"}
    save_steps(tmp_path, 6)
    assert not (tmp_path / "incomplete-4-0").exists()
    assert damage(tmp_path / "6") is None


# Stopping.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preemption_saves_after_the_running_step(tmp_path, number):
    """The signal comes in step 3: it ends, is saved, and the next start goes on from it exactly."""

    def asked(state, data, k):
        if k == 3:
            os.kill(os.getpid(), number)
        return step_fn(state, data, k)

    before = signal.getsignal(number)
    with pytest.raises(Preempted, match="preempted after step 3; run the same command"):
        go(tmp_path / "a", 5, step=asked, save_every=100)
    assert signal.getsignal(number) is before
    result = go(tmp_path / "a", 5, save_every=100)
    assert result.restored == 3
    same(result.state, go(tmp_path / "straight", 5).state)
    assert rows(tmp_path / "a") == rows(tmp_path / "straight")


def test_a_step_beyond_the_bound_ends_the_process_with_its_name(tmp_path):
    code = (
        "settings['preempt_seconds'] = 0.2\n"
        "def step(state, data, k):\n"
        "    if k == 3:\n"
        "        while not (folder / 'checkpoints' / '2').is_dir(): time.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(600)\n"
        "    return step_fn(state, data, k)\n"
    )
    done = toy_process(tmp_path, code)
    assert done.returncode == 1
    assert "preempted, but step 3 and its save took more than 0.2 s" in done.stderr
    assert Checkpoints(tmp_path / "checkpoints", identity={}).latest_step() == 2


def test_sigterm_to_the_command_exits_0_and_the_same_command_goes_on(
    model, data, tmp_path, monkeypatch, capsys
):
    """`evisrag sft` says where it stopped, claims no finished run, and finishes when started again."""
    from evisrag_jax.cli import sft
    from evisrag_jax.sft import trainer

    config = make_config(model, data, export=False)
    monkeypatch.setattr(
        sft, "run", lambda argv: train(config, tmp_path) and 0
    )  # the command without its flags
    step = trainer.SFTRun.step

    def asked(self, state, stream, k):
        if k == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, state, stream, k)

    monkeypatch.setattr(trainer.SFTRun, "step", asked)
    assert main(["sft"]) == 0
    said = capsys.readouterr()
    assert said.out == "evisrag sft: preempted after step 2; run the same command to go on\n"
    assert not (tmp_path / "summary.json").exists()
    monkeypatch.setattr(trainer.SFTRun, "step", step)
    assert main(["sft"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4


def test_sigterm_outside_the_steps_exits_0_too(model, data, tmp_path, monkeypatch, capsys):
    """While the model is read there is nothing to save, and while it is exported everything has been."""
    from evisrag_jax.cli import sft
    from evisrag_jax.sft import trainer

    def asked(*args, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did not end the command")

    before = signal.getsignal(signal.SIGTERM)
    config = make_config(model, data, steps=1)
    monkeypatch.setattr(sft, "run", lambda argv: train(config, tmp_path) and 0)
    for name in ("load_pretrained", "export"):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, asked)
            assert main(["sft"]) == 0
        assert "run the same command to go on" in capsys.readouterr().out
        assert not (tmp_path / "summary.json").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    assert main(["sft"]) == 0 and (tmp_path / "model" / "config.json").exists()


# Gradients that are not finite.


TX = make_optimiser(OptimConfig(learning_rate=1e-2))


@jax.jit
def guarded_update(state, bad):
    grads = jax.tree.map(lambda w: jnp.where(bad, jnp.nan, w), state.trainable)
    updates, opt_state = TX.update(grads, state.opt_state, state.trainable)
    trainable = optax.apply_updates(state.trainable, updates)
    state = state._replace(step=state.step + 1, trainable=trainable, opt_state=opt_state)
    return state, skipped_updates(opt_state)


def test_skipped_updates_in_a_row_end_the_run_with_the_last_checkpoint(tmp_path, monkeypatch):
    """Poisoned gradients at 3 and 5 to 8: the limit of 3 is met at step 7, also by a run that died and went
    on between them; a limit of 5 never; the parameters are those that the good steps alone make."""

    def fresh():
        state = toy_state()
        return state._replace(opt_state=TX.init(state.trainable))

    def poisoned(state, data, k):
        next(data)
        return guarded_update(state, jax.device_put(k in {3, 5, 6, 7, 8}))

    def dying(state, data, k):
        if k == 7:
            raise RuntimeError("killed")
        return poisoned(state, data, k)

    monkeypatch.setattr("tests.training.test_loop.toy_state", fresh)
    with pytest.raises(RuntimeError, match="killed"):
        go(tmp_path / "a", 9, step=dying, max_skipped=3)
    with pytest.raises(NonFiniteError) as caught:
        go(tmp_path / "a", 9, step=poisoned, max_skipped=3)
    message = str(caught.value)
    assert message.startswith("step 7: the gradients of the last 3 updates were not finite")
    assert str(tmp_path / "a" / "checkpoints" / "6") in message
    result = go(tmp_path / "b", 9, step=poisoned, max_skipped=5)
    assert rows(tmp_path / "b")[-1]["optim/skipped"] == 5
    state = fresh()
    for _ in range(4):
        state, _ = guarded_update(state, jax.device_put(False))
    same(result.state.trainable, state.trainable)


# Memory.


def test_a_resume_does_not_hold_two_states(tmp_path, monkeypatch):
    """The initial state's buffers are gone before the first array is read."""
    go(tmp_path, 2)
    first = toy_state()
    monkeypatch.setattr("tests.training.test_loop.toy_state", lambda: first)
    read = Checkpoints.restore

    def checked(self, template, step=None):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(template))
        return read(self, template, step)

    monkeypatch.setattr(Checkpoints, "restore", checked)
    result = go(tmp_path, 4)
    assert (result.restored, result.step) == (2, 4)


PARAMS_ONLY = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np
from evisrag_jax.runtime.checkpoints import Checkpoints
shapes = {str(i): jax.ShapeDtypeStruct((4, 2**20), jnp.float32) for i in range(12)}
size = 12 * 4 * 2**22
few = {"0": jax.ShapeDtypeStruct((8,), jnp.float32)}
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if sys.argv[2] == "save":
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.random(s.shape, np.float32)) for name, s in shapes.items()}
    with Checkpoints(sys.argv[1], identity={}) as store:
        store.save(1, {"params": params, "moments": {n: -a for n, a in params.items()}})
    with Checkpoints(sys.argv[1] + "/few", identity={}) as store:
        store.save(1, {"params": {"0": jnp.zeros(8)}})
else:
    Checkpoints(sys.argv[1] + "/few", identity={}).restore_params(few)  # loads the libraries
    store = Checkpoints(sys.argv[1], identity={})
    before, peak, over = resident(), 0, threading.Event()
    def watch():
        global peak
        while not over.wait(0.001):
            peak = max(peak, resident())
    threading.Thread(target=watch, daemon=True).start()
    jax.block_until_ready(store.restore_params(shapes).state)
    over.set()
    print((peak - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_b78_parameters_alone_take_their_own_memory(tmp_path):
    """B78: 200 MB of parameters in 12 arrays, with as many moments beside them; the process grows by less
    than 1.3 times the parameters (2 of 12 arrays are being read at a time: 1.17)."""
    for what in ("save", "load"):
        env = dict(os.environ, PYTHONPATH=ROOT, JAX_PLATFORMS="cpu", XLA_FLAGS="")
        # glibc gives freed arrays of less than 32 MB back to the system only at a fixed threshold.
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
        command = [sys.executable, "-c", PARAMS_ONLY, str(tmp_path), what]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.3


# Loaders.


def test_b81_workers_are_threads_and_nothing_forks(model, data, tmp_path):
    """B81: two and four workers after jax has started, the same numbers as without any."""
    forks, losses = [], []
    os.register_at_fork(before=lambda: forks.append(1))
    assert jax.devices()
    for threads in (0, 2, 4):
        folder = tmp_path / str(threads)
        train(make_config(model, data, export=False, data={"threads": threads}), folder)
        losses.append([row["loss/total"] for row in rows(folder)])
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 4 and not forks


def test_a_broken_worker_ends_the_command_with_its_record(
    model, data, tmp_path, monkeypatch, capsys
):
    from evisrag_jax.cli import sft
    from evisrag_jax.sft import trainer

    prepare = trainer.prepare

    def refusing(record, **settings):
        if record.id == "r5":
            raise PermissionError(13, "Permission denied", "page5.png")
        return prepare(record, **settings)

    monkeypatch.setattr(trainer, "prepare", refusing)
    config = make_config(model, data, export=False, data={"threads": 2})
    monkeypatch.setattr(sft, "run", lambda argv: train(config, tmp_path))
    assert main(["sft"]) == 1
    assert capsys.readouterr().err == (
        "evisrag sft: error: page5.png: Permission denied (while preparing record 'r5')\n"
    )


# Wrong use.


def test_runs_checkpoints_and_models_are_not_mistaken_for_each_other(model, data, tmp_path):
    """B74: `--model` starts from weights, `--out` goes on with a run; each refuses what the other takes."""
    run = tmp_path / "run"
    config = make_config(model, data, steps=1)
    train(config, run)
    for folder in (run, run / "checkpoints" / "1", run / "checkpoints" / "1" / "params"):
        with pytest.raises(ModelError, match=rf"with --out {run}; .* give {run / 'model'}"):
            find_model(folder)
    assert find_model(run / "model") == run / "model"
    exported = (run / "model" / "config.json").read_bytes()
    for folder, message in (
        (run / "model", "is a model folder"),
        (run / "checkpoints" / "1", "lies in a checkpoint"),
        (run / "checkpoints" / "1" / "params", "lies in a checkpoint"),
    ):
        with pytest.raises(RunFolderError, match=message):
            train(config, folder)
    assert (run / "model" / "config.json").read_bytes() == exported
    other = make_config(run / "model", data, steps=1)
    with pytest.raises(RunFolderError, match=rf"model.path: '{model}' -> '{run / 'model'}'"):
        train(other, run)


def test_a_folder_with_a_checkpoint_and_no_rows_holds_a_run(tmp_path):
    """With rows written more seldom than checkpoints, a run killed between them is resumed and not begun
    anew: what it had rejected stays."""
    go(tmp_path, 2, log_every=1)
    (tmp_path / "metrics.jsonl").unlink()
    with RunFolder(tmp_path) as run:
        assert run.has_steps
        with pytest.raises(RunFolderError, match="already holds a run"):
            run.start({"a": 1})
    assert not RunFolder(tmp_path / "new").has_steps


def test_the_last_validation_is_in_the_last_checkpoint(tmp_path, monkeypatch):
    """A kill between the two would otherwise end a run without it: here the validation dies once."""
    scores = iter([RuntimeError("killed"), 0.5])

    def validate(state, k):
        score = next(scores) if k == 4 else 0.0
        if isinstance(score, Exception):
            raise score
        return {"eval/score": score}

    settings = {"validate": validate, "eval_every": 3, "save_every": 2}
    with pytest.raises(RuntimeError, match="killed"):
        go(tmp_path, 4, **settings)
    result = go(tmp_path, 4, **settings)
    assert result.restored == 2 and result.validation["eval/score"] == 0.5
    assert [r["step"] for r in rows(tmp_path) if "eval/score" in r] == [0, 3, 4]


def test_files_a_kill_left_half_written_are_cleared(tmp_path):
    go(tmp_path, 2)
    with RunFolder(tmp_path) as run:
        run.write_rollouts(1, [{"step": 1}])
    left = [tmp_path / ".config.json.77.partial", run.rollouts / ".step_000002.jsonl.77.partial"]
    for path in left:
        path.write_text("{")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    go(tmp_path, 3)
    assert not any(path.exists() for path in left)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
