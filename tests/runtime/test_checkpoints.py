"""Checkpoints: bitwise round trips over device counts, retention, crashes, readable refusals."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from evisrag_jax.runtime.checkpoints import CheckpointError, CheckpointMismatch, Checkpoints
from evisrag_jax.runtime.mesh import make_mesh, replicated, shardings

AXES = {"layers": ("layers", "embed", "heads"), "norm": ("embed",)}
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
IDENTITY = {"model": {"depth": 3, "width": 8}}


def make_state(seed=0):
    """Values of every kind of bits, NaN payloads and denormals included."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (3, 8, 4), dtype=np.uint32)
    params = {
        "layers": jnp.asarray(bits.view(np.float32)),
        "norm": jnp.asarray(rng.integers(0, 2**16, 8, dtype=np.uint16)).view(jnp.bfloat16),
    }
    return {
        "params": params,
        "opt": TX.init(params),
        "step": jnp.int32(7),
        "key": jax.random.key(3),
    }


def place(state, mesh):
    whole = replicated(mesh)
    out = {name: jax.device_put(part, whole) for name, part in state.items()}
    out["params"] = jax.device_put(state["params"], shardings(AXES, state["params"], mesh))
    return out


def as_bits(tree):
    def bits(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes(), leaf.dtype, leaf.shape

    return jax.tree.map(bits, tree)


def template_of(state):
    def abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(abstract, state)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_round_trip_is_bitwise_on_other_device_counts(tmp_path, devices, recwarn):
    """Saved on 8 devices (fsdp 4 x tensor 2), restored on 1, 2 and 8."""
    state = make_state()
    saved = place(state, make_mesh(data=1, fsdp=4, tensor=2))
    with Checkpoints(tmp_path, identity=IDENTITY) as writer:
        writer.save(5, saved, {"data": {"position": 12}})
    mesh = make_mesh(1, -1, 1, devices=jax.devices()[:devices])
    template = template_of(place(state, mesh))
    reader = Checkpoints(tmp_path, identity=IDENTITY)
    got = reader.restore(template)
    assert got.step == 5 and got.extra == {"data": {"position": 12}}
    assert as_bits(got.state) == as_bits(state)
    assert jax.tree.map(lambda x: x.sharding, got.state) == jax.tree.map(
        lambda x: x.sharding, template
    )
    only = reader.restore_params(template["params"], 5)
    assert as_bits(only.state) == as_bits(state["params"])
    assert not [w for w in recwarn if "sharding" in str(w.message).lower()]


def test_arrays_may_be_donated_while_the_save_goes_on(tmp_path):
    """The background write sees the values of its step, not those of later, donating steps."""
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((512, 1024))
    with Checkpoints(tmp_path, identity={}, keep=20) as writer:
        for step in range(6):
            writer.save(step, {"params": {"x": x}})
            x = update(update(x))
    reader = Checkpoints(tmp_path, identity={})
    for step in range(6):
        got = reader.restore_params({"x": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}, step)
        np.testing.assert_array_equal(got.state["x"], np.full((512, 1024), 2.0 * step))


@pytest.mark.parametrize("best", ["max", "min"])
def test_keeps_the_latest_and_the_best(tmp_path, best):
    state = {"params": {"x": jnp.zeros(2)}}
    sign = 1 if best == "max" else -1
    metrics = {1: 0.1, 2: 0.9, 3: None, 4: 0.2, 5: float("nan"), 6: 0.3}
    with Checkpoints(tmp_path, identity={}, keep=2, best=best) as writer:
        for step, metric in metrics.items():
            writer.save(step, state, metric=None if metric is None else sign * metric)
    reader = Checkpoints(tmp_path, identity={}, best=best)
    assert reader.steps() == [2, 5, 6]
    assert reader.best_step() == 2 and reader.latest_step() == 6
    assert reader.metric(2) == sign * 0.9 and reader.metric(5) is None
    # The best survives a restart of the writer, too.
    with Checkpoints(tmp_path, identity={}, keep=1, best=best) as writer:
        writer.save(7, state, metric=sign * 0.4)
    assert reader.steps() == [2, 7]


def test_an_older_step_can_be_resumed(tmp_path):
    state = {"params": {"x": jnp.zeros(2)}}
    with Checkpoints(tmp_path, identity={}, keep=5) as writer:
        for step in (1, 2, 3):
            writer.save(step, state)
        writer.wait()
        with pytest.raises(CheckpointError, match="step 2 is there already"):
            writer.save(2, state)
        assert writer.discard_after(1) == [2, 3]
        assert writer.steps() == [1]
        writer.save(2, {"params": {"x": jnp.ones(2)}})
    got = Checkpoints(tmp_path, identity={}).restore_params({"x": jnp.zeros(2)})
    assert got.step == 2 and (got.state["x"] == 1).all()


def test_half_written_steps_are_ignored_and_block_nothing(tmp_path):
    state = {"params": {"x": jnp.zeros(2)}, "step": jnp.int32(1)}
    with Checkpoints(tmp_path, identity={}, keep=5) as writer:
        writer.save(1, state)
    (tmp_path / "20").mkdir()
    (tmp_path / "30.orbax-checkpoint-tmp-1" / "params").mkdir(parents=True)
    shutil.copytree(tmp_path / "1", tmp_path / "40")
    shutil.rmtree(tmp_path / "40" / "rest")
    shutil.copytree(tmp_path / "1", tmp_path / "50")
    (tmp_path / "50" / "_CHECKPOINT_METADATA").unlink()
    names = sorted(path.name for path in tmp_path.iterdir())
    reader = Checkpoints(tmp_path, identity={})
    assert reader.steps() == [1] and reader.restore(state).step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == names, "reading changed the folder"
    with Checkpoints(tmp_path, identity={}, keep=2) as writer:
        writer.save(20, state)
        writer.save(30, state)
    assert reader.steps() == [20, 30]
    assert (tmp_path / "incomplete-40-0").is_dir()


def test_b75_a_kill_while_saving_leaves_a_complete_step(tmp_path):
    """B75: SIGKILL at ten moments of the background save of step 20, keep=1: step 10 or 20 restores whole,
    and step 20 can be saved despite what the kill left."""
    code = (
        "import os, signal, sys, threading, jax.numpy as jnp\n"
        "from evisrag_jax.runtime.checkpoints import Checkpoints\n"
        "c = Checkpoints(sys.argv[1], identity={}, keep=1)\n"
        "if 10 not in c.steps(): c.save(10, {'params': {'x': jnp.full(2**20, 10.)}}); c.wait()\n"
        "threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), 9)).start()\n"
        "c.save(20, {'params': {'x': jnp.full(2**20, 20.)}}); c.wait()\n"
        "threading.Event().wait()"
    )

    def killed(number, delay):
        command = [sys.executable, "-c", code, str(tmp_path / str(number)), str(delay)]
        return subprocess.run(command, env=dict(os.environ), capture_output=True)

    rng = random.Random(0)
    delays = [0.0, *(rng.uniform(0, 0.12) for _ in range(9))]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(killed, range(10), delays))
    found = []
    for number, done in enumerate(ended):
        folder = tmp_path / str(number)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        with Checkpoints(folder, identity={}, keep=1) as again:
            got = again.restore_params({"x": jnp.zeros(2**20)})
            assert got.step in (10, 20) and (got.state["x"] == got.step).all()
            found.append(got.step)
            if got.step == 10:
                again.save(20, {"params": {"x": jnp.full(2**20, 20.0)}})
                again.wait()
                assert again.steps() == [20]
            # A kill after the commit leaves step 10 beside it, until the next save.
            assert again.latest_step() == 20
            again.save(30, {"params": {"x": jnp.full(2**20, 30.0)}})
            again.wait()
            assert again.steps() == [30]
    assert 10 in found, "no kill came before the commit"


def test_another_model_is_refused_with_the_differences(tmp_path):
    with Checkpoints(tmp_path, identity=IDENTITY) as writer:
        writer.save(1, {"params": {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, "n": jnp.int32(0)})
    other = Checkpoints(tmp_path, identity={"model": {"depth": 4, "width": 8}})
    with pytest.raises(
        CheckpointMismatch, match=r"another model or config.*\n  model\.depth: 3 ->"
    ):
        other.restore_params({"a": jnp.zeros((2, 3))})
    same = Checkpoints(tmp_path, identity=IDENTITY)
    with pytest.raises(CheckpointMismatch) as caught:
        same.restore_params({"a": jnp.zeros((2, 5)), "c": jnp.zeros(4, jnp.bfloat16)})
    message = str(caught.value)
    assert "params.a: 'float32[2, 3]' -> 'float32[2, 5]'" in message
    assert "params.b: 'float32[4]' -> (absent)" in message
    assert "params.c: (absent) -> 'bfloat16[4]'" in message
    with pytest.raises(CheckpointMismatch, match=r"n: 'int32\[\]' -> 'float32\[\]'"):
        same.restore({"params": {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, "n": jnp.float32(0)})


def test_absent_and_wrong_input_is_named(tmp_path):
    reader = Checkpoints(tmp_path / "none", identity={})
    assert reader.steps() == [] and reader.latest_step() is None and reader.best_step() is None
    with pytest.raises(CheckpointError, match="none: holds no complete checkpoint"):
        reader.restore_params({})
    with Checkpoints(tmp_path, identity={}) as writer:
        with pytest.raises(CheckpointError, match="state leaf step is a int, not an array"):
            writer.save(1, {"params": {"x": jnp.zeros(1)}, "step": 3})
        with pytest.raises(CheckpointError, match="no 'params'"):
            writer.save(1, {"x": jnp.zeros(1)})
        writer.save(1, {"params": {"x": jnp.zeros(1)}})
    with pytest.raises(CheckpointError, match=r"no complete step 4; there are \[1\]"):
        Checkpoints(tmp_path, identity={}).restore_params({"x": jnp.zeros(1)}, 4)
    facts = tmp_path / "1" / "extra" / "metadata"
    facts.write_text("{" * facts.stat().st_size)
    with pytest.raises(CheckpointError, match="metadata: cannot be read"):
        Checkpoints(tmp_path, identity={}).restore_params({"x": jnp.zeros(1)})
    with pytest.raises(CheckpointError, match="keep is 0"):
        Checkpoints(tmp_path, identity={}, keep=0)


def test_an_error_in_the_background_reaches_the_run(tmp_path, monkeypatch):
    state = {"params": {"x": jnp.zeros(2)}}
    writer = Checkpoints(tmp_path, identity={})
    writer.save(1, state)
    writer.wait()

    def full():
        raise OSError("No space left on device")

    monkeypatch.setattr(writer._manager, "check_for_errors", full)
    monkeypatch.setattr(writer._manager, "wait_until_finished", full)
    with pytest.raises(CheckpointError, match=r"step 2 not saved \(No space left"):
        writer.save(2, state)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: a save failed"):
        writer.close()


def test_extra_is_plain_json_on_disk(tmp_path):
    with Checkpoints(tmp_path, identity=IDENTITY) as writer:
        writer.save(3, {"params": {"x": jnp.zeros(1)}}, {"seen": np.int64(4)}, metric=0.5)
    facts = json.loads((tmp_path / "3" / "extra" / "metadata").read_text())
    assert facts == {"identity": IDENTITY, "metric": 0.5, "extra": {"seen": 4}}
