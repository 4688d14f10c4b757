"""Whole SFT runs on a tiny model: they learn, resume to the bit, refuse bad records, and export."""

import json

import jax
import numpy as np
import pytest

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.prompts.tokenizer import load_tokenizer
from evisrag_jax.runtime.checkpoints import Checkpoints
from evisrag_jax.runtime.run_folder import RunFolder, RunFolderError
from evisrag_jax.sft import trainer
from evisrag_jax.sft.config import SFTConfigError
from evisrag_jax.sft.trainer import SFTRun, train
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import OptimConfig
from evisrag_jax.training.settings import MeshShape
from evisrag_jax.training.state import flatten, to_checkpoint
from tests.sft.tiny import BUCKET, make_config, make_pages, make_record, write_rows

WORLD = Bucket(
    prompts=4, images=3, windows=6, tokens=20, prompt_length=160, group=1, response_length=96
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Eight records: two pages, one, none; one question has two responses."""
    folder = tmp_path_factory.mktemp("rows")
    pages = make_pages(folder)
    images = (pages, pages[:1], [], pages[1:])
    records = [
        make_record(f"r{i}", 8 + 4 * i, images[i % 4], seed=i if i < 7 else 3) for i in range(8)
    ]
    return write_rows(folder / "train.jsonl", records)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """A mesh of one device unless a test's config asks for more."""
    make_mesh = trainer.meshes.make_mesh

    def mesh(data, fsdp, tensor):
        count = data * max(fsdp, 1) * tensor
        return make_mesh(data, max(fsdp, 1), tensor, devices=jax.devices()[:count])

    monkeypatch.setattr(trainer.meshes, "make_mesh", mesh)


def metrics(folder):
    """Rows without what is a fact of the process: clock, compiles, caches."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {
            k: v
            for k, v in json.loads(line).items()
            if not k.startswith(("time", "compile", "cache"))
        }
        for line in lines
    ]


def saved_state(folder, config):
    with RunFolder(folder) as run_folder:
        run = SFTRun(config, run_folder, resumed=True)
        template = to_checkpoint(run.state)
        return Checkpoints(run_folder.checkpoints, identity={}).restore(template)


def test_run_that_was_killed_ends_like_one_that_was_not(
    folder, reference, rows, tmp_path, monkeypatch
):
    """4 steps straight == 2, death in step 3, and 2 more with threads and without features in memory:
    parameters, moments, data position, metric rows and exported weights, all bitwise (B73 and B74 for
    SFT)."""
    config = make_config(folder, rows, export_dtype="float32")
    other = make_config(
        folder, rows, export_dtype="float32", data={"threads": 2, "feature_cache_mb": 0}
    )
    straight = train(config, tmp_path / "a")

    step = SFTRun.step

    def dying(self, state, data, k):
        if k == 3:
            raise RuntimeError("killed")
        return step(self, state, data, k)

    monkeypatch.setattr(SFTRun, "step", dying)
    with pytest.raises(RuntimeError, match="killed"):
        train(config, tmp_path / "b")
    monkeypatch.setattr(SFTRun, "step", step)
    resumed = train(other, tmp_path / "b")

    a, b = (saved_state(tmp_path / name, config) for name in "ab")
    assert a.step == b.step == 4 and a.extra == b.extra
    jax.tree.map(np.testing.assert_array_equal, a.state, b.state)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    files = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    timing = ("seconds", "compiles", "export")
    assert {k: v for k, v in straight.items() if k not in timing} == {
        k: v for k, v in resumed.items() if k not in timing
    }


def test_a_frozen_tower_encodes_a_page_once_a_run(folder, reference, rows, tmp_path):
    """Two pages in all: two features, whatever the number of steps; phases of each step are timed. With
    the tower trained there is no cache, and it moves; losses of the first step agree (1e-5)."""
    train(make_config(folder, rows, export=False), tmp_path / "frozen")
    lines = (tmp_path / "frozen" / "metrics.jsonl").read_text().splitlines()
    frozen = [json.loads(line) for line in lines]
    assert [row["cache/feature_misses"] for row in frozen] == [2.0] * 4
    assert frozen[-1]["cache/page_misses"] == 2 and frozen[-1]["cache/feature_hits"] > 8
    names = {json.loads(line)["name"] for line in (tmp_path / "frozen" / "timeline.jsonl").open()}
    assert {"prepare", "update"} <= names and "time/idle" in frozen[0]
    optim = OptimConfig(learning_rate=1e-3, warmup_steps=3, freeze="")
    config = make_config(folder, rows, optim=optim, export=False)
    train(config, tmp_path / "trained")
    lines = (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in lines]
    assert not any(name.startswith("cache/feature") for name in trained[0])
    assert trained[0]["loss/total"] == pytest.approx(frozen[0]["loss/total"], rel=1e-5)
    after = flatten(saved_state(tmp_path / "trained", config).state["params"])
    before = flatten(load_params(folder)[0])
    moved = [path for path in before if not np.array_equal(after[path], before[path])]
    assert any(path.startswith("vision/") for path in moved)


def test_run_of_another_config_is_refused(folder, reference, rows, tmp_path):
    """What changes numbers is refused with its name; what does not, like threads, may change."""
    config = make_config(folder, rows, steps=1, export=False)
    train(config, tmp_path)
    with pytest.raises(RunFolderError, match="seed: 0 -> 1"):
        train(make_config(folder, rows, steps=1, export=False, seed=1), tmp_path)
    again = make_config(folder, rows, steps=1, export=False, data={"threads": 1})
    assert train(again, tmp_path)["steps"] == 1


def test_bad_records_are_refused_by_name_and_the_run_goes_on(folder, reference, tmp_path):
    """B12, B15, B42: a cut page, a long prompt, a long and an empty response, a broken row."""
    pages = make_pages(tmp_path)
    cut = tmp_path / "cut.png"
    cut.write_bytes((tmp_path / "page0.png").read_bytes()[:200])
    good = [make_record(f"good{i}", 12, pages, seed=i) for i in range(4)]
    bad = [
        make_record("cut", 12, [str(cut)], seed=5),
        make_record("long", 41, pages, seed=6),
        make_record("many", 12, [*pages, pages[0]], seed=7),
    ]
    data = write_rows(tmp_path / "train.jsonl", [*good, *bad])
    empty = {"id": "empty", "question": "what", "images": [], "answers": ["1"]}
    with data.open("a") as file:
        file.write(json.dumps({**empty, "is_sufficient": True}) + "\n")
        file.write('{"id": "broken"}\n')
    config = make_config(folder, data, steps=2, export=False)
    with pytest.warns(UserWarning, match="refused and skipped"):
        summary = train(config, tmp_path / "run")
    assert summary["steps"] == 2 and summary["records"] == 7
    rejected = [
        json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    ]
    reasons = {row["id"]: row["reason"] for row in rejected}
    assert reasons == {
        **{"empty": "no_response", "broken": "field", "cut": "broken"},
        **{"long": "response_too_long", "many": "too_large"},
    }
    assert summary["skipped"] == len(rejected) - 2
    assert all(row["id"] in row["detail"] for row in rejected)
    assert all(row["batch/records"] == 4.0 for row in metrics(tmp_path / "run"))


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("images", ["text", "mixed"])
def test_rows_without_pages_train(folder, reference, tmp_path, devices, images):
    """B18: only text rows, or text rows beside a two-page row; 2 steps on 1 and on 4 devices."""
    pages = make_pages(tmp_path)
    records = [make_record(f"t{i}", 10 + i, [], seed=i) for i in range(4)]
    if images == "mixed":
        records[1] = make_record("two", 12, pages, seed=1)
    config = make_config(
        folder,
        write_rows(tmp_path / "d.jsonl", records),
        steps=2,
        mesh=MeshShape(data=devices),
        export=False,
    )
    train(config, tmp_path / "run")
    losses = [row["loss/total"] for row in metrics(tmp_path / "run")]
    assert len(losses) == 2 and np.all(np.isfinite(losses)) and losses[1] < losses[0]


def test_learns_generated_pages_and_exports_them(folder, reference, tmp_path):
    """Overfits eight questions about generated pages: held-out loss on the same questions falls below
    two thirds; the exported bf16 folder is the trained weights and keeps the tokenizer."""
    data = write_dataset(tmp_path, 8, "train")
    config = make_config(
        folder,
        data,
        steps=12,
        buckets=(WORLD,),
        optim=OptimConfig(learning_rate=1e-2, weight_decay=0.0),
        data={"validation": str(data)},
        save_every=0,
    )
    summary = train(config, tmp_path / "run")
    assert summary["eval_loss_last"] < 0.67 * summary["eval_loss_first"]
    assert summary["responses"] == 8 and summary["skipped"] == 0 and summary["steps"] == 12
    state = flatten(saved_state(tmp_path / "run", config).state["params"])
    exported, _ = load_params(tmp_path / "run" / "model")
    for path, value in flatten(exported).items():
        np.testing.assert_array_equal(value, np.asarray(state[path].astype("bfloat16"), np.float32))
    assert (
        load_tokenizer(tmp_path / "run" / "model").get_vocab() == load_tokenizer(folder).get_vocab()
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_every_shape_is_compiled_before_the_second_step(folder, reference, rows, tmp_path):
    """Two buckets: both compile in step 1, the largest first, and nothing after; empty warm-up rows
    leave the result as it is."""
    wide = Bucket(4, 2, 2, 6, 64, 2, 48)
    config = make_config(folder, rows, steps=3, buckets=(BUCKET, wide), export=False)
    train(config, tmp_path / "two")
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    counts = [json.loads(line)["compile/count"] for line in lines]
    assert counts[0] == counts[2] and counts[0] >= 2
    train(make_config(folder, rows, steps=3, export=False), tmp_path / "one")
    for two, one in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert two["loss/total"] == pytest.approx(one["loss/total"], rel=1e-5)
        assert two["lr"] == one["lr"]


def test_missing_inputs_are_named(folder, reference, rows, tmp_path):
    with pytest.raises(SFTConfigError, match="model.path and data.path"):
        train(make_config("", rows), tmp_path / "a")
    only = write_rows(tmp_path / "only.jsonl", [])
    only.write_text(
        '{"id": "x", "question": "q", "images": [], "answers": ["1"], "is_sufficient": true}\n'
    )
    with pytest.raises(SFTConfigError, match="none of its 1 readable records has a response"):
        train(make_config(folder, only), tmp_path / "b")
    # A start that failed leaves no run behind: the corrected command works in the same folder.
    assert train(make_config(folder, rows, steps=1, export=False), tmp_path / "b")["steps"] == 1
