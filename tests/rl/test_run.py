"""Whole RL runs on a tiny model: files, exact resume, slices and devices, the sampler's gap, export."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.pages.plan import BUDGETS, processor_settings
from evisrag_jax.prompts.tokenizer import load_tokenizer
from evisrag_jax.rl.collect import Collector
from evisrag_jax.rl.config import RLConfigError
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.rl.passes import compile_old_log_probs
from evisrag_jax.rl.run import RLRun, train
from evisrag_jax.rl.trainer import host_batch
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.run_folder import RunFolder, RunFolderError
from evisrag_jax.training.batching import put_batch
from evisrag_jax.training.export import set_pixel_limits
from evisrag_jax.training.state import flatten, state_shardings, to_checkpoint
from tests.rl.tiny import code_config, few_devices, run_config, write_model  # noqa: F401  (a fixture)

# Groups whose mean reward is low are dropped, and a second rollout fills the batch.
FILTER = FilterConfig("both", low=-0.7, tries=2, train_on_partial=True)
FILTERED = code_config(filter=FILTER)
# Facts of a process, which a resumed run does not share: clock, compiles, what its caches found.
PROCESS = ("time", "compile", "cache")
AGAIN = """
import json, sys
from evisrag_jax.rl.run import train
from tests.rl import tiny
model, data, out, features = sys.argv[1:]
source = {"feature_cache_dir": features, "threads": 2}
train(tiny.run_config(model, data, steps=2, data=source, export=False), out)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten questions, one without evidence, one whose first page is cut."""
    folder = tmp_path_factory.mktemp("data")
    path = write_dataset(folder, 10, "train")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[3]["evidence"]
    page = folder / rows[7]["images"][0]
    page.write_bytes(page.read_bytes()[:150])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def guarded():
    """What an implicit transfer raised inside `collect`, once a step."""
    return []


@pytest.fixture(scope="module")
def straight(model, data, guarded, tmp_path_factory):
    """(folder, summary) of four steps."""
    out = tmp_path_factory.mktemp("straight")
    call = Collector.__call__

    def spy(self, params, step):
        try:
            jnp.add(np.ones(2, np.float32), 1.0)
        except Exception as error:
            guarded.append(str(error))
        return call(self, params, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "__call__", spy)
        return out, train(run_config(model, data, rl=FILTERED), out)


def metrics(folder):
    """Rows without wall-clock fields and compile counts."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(PROCESS)} for row in rows]


def saved_state(folder, config, step=None):
    with RunFolder(folder) as run_folder:
        run = RLRun(config, run_folder, resumed=True)
        template = to_checkpoint(run.state)
        return Checkpoints(run_folder.checkpoints, identity={}).restore(template, step)


def test_a_run_folder_holds_everything(straight, model, data):
    out, summary = straight
    names = {path.name for path in out.iterdir()}
    files = {
        "config.json",
        "versions.json",
        "sharding.txt",
        "metrics.jsonl",
        "timeline.jsonl",
        "alarms.jsonl",
        "summary.json",
    }
    assert files | {"rollouts", "rejected.jsonl", "checkpoints", "model"} == names
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["steps"] == 4 and summary["records"] == 9 and summary["mode"] == "code"
    versions = json.loads((out / "versions.json").read_text())
    assert versions["pixel_budget"]["max_pixels"] == 50176 and versions["devices"]
    assert [p.name for p in sorted((out / "rollouts").iterdir())] == [
        f"step_{k:06d}.jsonl" for k in range(1, 5)
    ]
    rows = [json.loads(line) for line in (out / "rollouts/step_000001.jsonl").open()]
    spread = [s["advantages"]["overlong"] for row in rows for s in row["samples"]]
    assert any(spread) and all(len(row["samples"]) == 4 for row in rows)
    assert len(rows) == metrics(out)[0]["filter/kept"]
    phases = {json.loads(line)["name"] for line in (out / "timeline.jsonl").open()}
    assert {"prefill", "decode", "reward", "prepare", "update", "write"} <= phases
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").open()]
    assert {(r["id"], r["stage"]) for r in rejected} == {
        ("train-0-000003", "read"),
        ("train-0-000007", "stream"),
    }


def test_metrics_have_the_agreed_names(straight):
    rows = metrics(straight[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    channels = ("accuracy", "evidence", "format", "overlong", "isObserve", "isThink", "overall")
    expected = {
        *(f"reward/{name}" for name in channels),
        *(f"scope/found_{tag}" for tag in ("observe", "evidence", "think", "answer")),
        *("loss/total", "loss/grad_norm", "loss/entropy", "loss/ppo_kl", "loss/clipfrac_higher"),
        *("rollout/length_mean", "rollout/clipped_ratio", "rollout/logp_gap_mean", "lr"),
        *("rollout/logp_gap_max", "rollout/trained_tokens", "filter/kept", "filter/rounds"),
        *("optim/skipped", "optim/skipped_in_a_row", "optim/empty", "data/seen", "data/skipped"),
    }
    for row in rows:
        assert expected <= row.keys() and "nonfinite" not in row
        assert row["rollout/logp_gap_max"] < 1e-4, "B51"
        assert row["loss/grad_norm"] > 0
    assert any(row["filter/rounds"] == 2 for row in rows), "the filter is put to work"
    timed = json.loads((straight[0] / "metrics.jsonl").open().readline())
    phases = ("prefill", "decode", "reward", "prepare", "update", "idle")
    assert {*(f"time/{p}" for p in phases), "time/step", "compile/seconds"} <= timed.keys()
    assert 0 <= timed["time/idle"] <= timed["time/step"] >= timed["time/update"] > 0


def test_each_page_is_prepared_and_encoded_once_a_run(straight):
    """24 pages of the eight good records and the cut one's; later steps only find them."""
    rows = map(json.loads, (straight[0] / "metrics.jsonl").read_text().splitlines())
    last = list(rows)[-1]
    assert last["cache/page_misses"] <= 25 and last["cache/feature_misses"] <= 24
    assert last["cache/feature_hits"] > 0 and last["cache/page_hits"] > 0
    assert 0 < last["cache/feature_mib"] <= 24 * 20 * 32 * 4 / 2**20


def test_b80_a_second_process_compiles_nothing(model, data, tmp_path):
    """The same command again beside the persistent cache: every program is loaded, steps 2 … n make none
    ready, features come from the disk, and all numbers are those of the first process, bitwise."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])}
    rows = []
    for name in "ab":
        args = [model, data, tmp_path / name, tmp_path / "features"]
        command = [sys.executable, "-c", AGAIN, *map(str, args)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    first, second = rows
    for row in second:
        assert row["compile/count"] == row["compile/cached"] == second[0]["compile/count"] > 0
        assert row["cache/feature_misses"] == 0 < row["cache/feature_disk_hits"]
    assert first[-1]["cache/feature_misses"] > 0 == first[-1]["cache/feature_disk_hits"]
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_the_second_step_compiles_nothing_and_transfers_are_explicit(straight, guarded):
    rows = map(json.loads, (straight[0] / "metrics.jsonl").read_text().splitlines())
    assert len({row["compile/count"] for row in rows}) == 1
    assert len(guarded) == 4 and all("Disallowed host-to-device transfer" in g for g in guarded)


def test_a_run_that_was_killed_ends_like_one_that_was_not(
    straight, model, data, tmp_path, monkeypatch
):
    """B73, B74 with dropped groups: 4 steps straight == 2, death in step 3, and 2 more in a fresh run
    object, with threads and without features in memory: parameters, moments, data position, metrics,
    rollouts, rejected rows and exported weights, all bitwise."""
    config = run_config(model, data, rl=FILTERED)
    other = run_config(model, data, rl=FILTERED, data={"threads": 2, "feature_cache_mb": 0})
    call = Collector.__call__

    def dying(self, params, step):
        if step == 3:
            raise RuntimeError("killed")
        return call(self, params, step)

    monkeypatch.setattr(Collector, "__call__", dying)
    with pytest.raises(RuntimeError, match="killed"):
        train(config, tmp_path)
    monkeypatch.setattr(Collector, "__call__", call)
    resumed = train(other, tmp_path)
    folders = (straight[0], tmp_path)
    assert metrics(tmp_path) == metrics(straight[0])
    a, b = (saved_state(folder, config) for folder in folders)
    assert a.step == b.step == 4 and a.extra == b.extra
    jax.tree.map(np.testing.assert_array_equal, a.state, b.state)
    for name in ("model/model.safetensors", "rollouts/step_000004.jsonl", "rejected.jsonl"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1, name
    differing = ("seconds", "compiles", "export")
    for key, value in straight[1].items():
        assert key in differing or resumed[key] == value, key


def test_the_export_is_the_trained_model(straight, model, data):
    """Weights of the last checkpoint, bitwise (float32), with tokenizer and processor of the start."""
    out = straight[0]
    params, _ = load_params(out / "model")
    config = run_config(model, data, rl=FILTERED)
    state = flatten(saved_state(out, config).state["params"])
    start = flatten(load_params(model)[0])
    for path, value in flatten(params).items():
        np.testing.assert_array_equal(value, state[path])
        assert np.array_equal(value, start[path]) == path.startswith("vision/"), path
    assert load_tokenizer(out / "model").get_vocab() == load_tokenizer(model).get_vocab()
    for name in ("preprocessor_config.json", "config.json", "generation_config.json"):
        assert (out / "model" / name).read_bytes() == (model / name).read_bytes()


def test_another_config_is_refused(straight, model, data):
    """What changes numbers is refused by name; what does not may change."""
    other = run_config(
        model, data, rl=code_config(filter=dataclasses.replace(FILTER, tries=3)), seed=5
    )
    with pytest.raises(RunFolderError, match=r"seed: 0 -> 5") as caught:
        train(other, straight[0])
    assert "rl.filter.tries: 2 -> 3" in str(caught.value)
    before = (straight[0] / "metrics.jsonl").read_bytes()
    again = run_config(model, data, rl=FILTERED, keep=1, rollouts_every=2, data={"ahead": 3})
    assert train(again, straight[0])["steps"] == 4
    assert (straight[0] / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(("micro", "devices", "slots"), [(1, 1, 3), (0, 4, 0)])
def test_slices_slots_and_devices_do_not_matter(
    straight, model, data, tmp_path, micro, devices, slots
):
    """Two steps with one prompt a slice and three responses at a time, or on four devices: the same
    responses and rewards, losses 1e-5, parameters after them 1e-5 relative."""
    rl = code_config(filter=FILTER, micro=micro)
    config = run_config(model, data, rl=rl, steps=2, devices=devices, slots=slots)
    train(config, tmp_path)
    for got, want in zip(metrics(tmp_path), metrics(straight[0]), strict=False):
        exact = [n for n in want if n.split("/")[0] in ("reward", "filter", "scope", "data")]
        assert {n: got[n] for n in exact} == {n: want[n] for n in exact}
        for name in ("loss/total", "loss/grad_norm", "loss/entropy"):
            assert got[name] == pytest.approx(want[name], rel=1e-5), name
    ours, whole = (saved_state(folder, config, step=2) for folder in (tmp_path, straight[0]))
    ours = flatten(ours.state["params"])
    for path, value in flatten(whole.state["params"]).items():
        assert np.linalg.norm(ours[path] - value) <= 1e-5 * np.linalg.norm(value), path


def test_several_updates_a_rollout(model, data, tmp_path):
    """Two updates of two prompts each: the state counts four, the second ratio has moved."""
    rl = code_config(updates=2)
    summary = train(run_config(model, data, rl=rl, steps=2), tmp_path)
    rows = metrics(tmp_path)
    assert summary["steps"] == 2 and all(row["loss/ppo_kl"] != 0 for row in rows)
    assert all(row["rollout/logp_gap_max"] < 1e-4 for row in rows)
    config = run_config(model, data, rl=rl, steps=2)
    assert int(saved_state(tmp_path, config).state["step"]) == 4


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_b51_sampler_and_trainer_agree(model, data, tmp_path, temperature):
    """B51: |ratio - 1| < 1e-4 for the first update, at the temperature of sampling and not at another;
    B43: what is trained on is what was sampled, also where its text would be encoded otherwise."""
    config = run_config(model, data, rl=code_config(temperature=temperature))
    with RunFolder(tmp_path) as folder:
        run = RLRun(config, folder)
        stream = run.stream()
        seen = []
        generate = run.engine.generate
        run.engine.generate = lambda *a, **k: seen.extend(generate(*a, **k)) or seen
        collect = Collector(run.engine, stream, run.rl, [config.bucket], list, seed=0)
        got = collect(run.pretrained.params, 1)
    batch = put_batch(host_batch(got), run.mesh)
    shardings = state_shardings(run.model, run.mesh, run.state)
    score = compile_old_log_probs(run.model, run.settings, run.mesh, shardings)
    logp = np.asarray(score(run.state.trainable, run.state.frozen, batch.groups))
    shown = np.arange(logp.shape[-1]) < got.groups.lengths[..., None]
    ratio = np.exp(logp - got.sampled)[shown]
    assert shown.sum() > 20 and np.abs(ratio - 1).max() < 1e-4
    for p, group in enumerate(seen):
        for g, done in enumerate(group):
            ids = got.groups.tokens[p, g, : got.groups.lengths[p, g]]
            np.testing.assert_array_equal(ids, done.ids)
    collect.close()
    stream.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 3}, r"mesh: 4 prompts a batch do not divide over 3 devices"),
        ({"data": {"template": "none.txt"}}, r"data\.template: template 'none\.txt': no such file"),
        ({"data": {"budget": "huge"}}, r"data\.budget: unknown pixel budget 'huge'"),
        ({"data": {"path": ""}}, r"model\.path and data\.path are needed"),
        ({"devices": 2, "slots": 3}, r"slots: slots=3 must be a positive multiple of 2 devices"),
    ],
)
def test_wrong_settings_are_named(model, data, tmp_path, changes, message):
    with pytest.raises(RLConfigError, match=message), RunFolder(tmp_path) as folder:
        RLRun(run_config(model, data, **changes), folder)


def test_a_set_without_gold_is_refused(model, data, tmp_path):
    row = json.loads(data.read_text().splitlines()[3])
    path = data.with_name("no_gold.jsonl")
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(RLConfigError, match="none of its 1 readable records has gold"):
        train(run_config(model, path), tmp_path)


def test_the_export_shows_pages_at_the_size_of_training(model, tmp_path):
    """B06: a run with another pixel budget than its start's writes that budget into the folder."""
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    own, layout = processor_settings(folder)
    before = (folder / "preprocessor_config.json").read_bytes()
    set_pixel_limits(folder, own)
    assert (folder / "preprocessor_config.json").read_bytes() == before
    set_pixel_limits(folder, BUDGETS["grpo"])
    assert processor_settings(folder) == (BUDGETS["grpo"], layout)


def test_a_resume_frees_every_reference_to_the_initial_parameters(straight, model, data):
    """Folder, engine and state share one copy, which is gone once the checkpoint is read."""
    config = run_config(model, data, rl=FILTERED)
    with RunFolder(straight[0]) as folder:
        run = RLRun(config, folder, resumed=True)
        params = jax.tree.leaves((run.pretrained.params, run.engine.params))
        with Checkpoints(folder.checkpoints, identity={}) as checkpoints:
            result = run.fit(checkpoints, None)
    assert result.restored == 4 and all(leaf.is_deleted() for leaf in params)
