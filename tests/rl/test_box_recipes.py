"""The recipes that pay boxes: their settings, what excludes what, and a run on a tiny model."""

import dataclasses
import json

import pytest

from evisrag_jax.cli.config import load_config, to_dataclass
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.prompts.template import load_template
from evisrag_jax.rewards.boxes import answer_region, parse_boxes
from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.config import RLConfig, RLConfigError, RLRunConfig
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.rl.recipes import preset
from evisrag_jax.rl.run import RLRun, train
from evisrag_jax.runtime.run_folder import RunFolder
from tests.rl.tiny import few_devices, run_config, write_model  # noqa: F401  (a fixture)

NAMES = ("perception_r1", "vlm_r1")


@pytest.mark.parametrize("name", NAMES)
def test_one_scalar_a_response_under_grpo(name):
    """Perception-R1 does not think, VLM-R1 does; the two channels are summed to one advantage."""
    rl = preset(name)
    assert rl == dataclasses.replace(preset("grpo"), reward=rl.reward)
    assert rl.reward.kind == name and rl.reward.channels == rl.reward.paid == ("match", "format")
    assert rl.reward.sections == {"vlm_r1": ("think", "answer")}.get(name, ("answer",))
    assert (rl.reward.units, rl.reward.task) == ("pixels", "")
    assert rl.reward.bounds == {"match": (0, 1), "format": (0, 1)}


@pytest.mark.parametrize("name", NAMES)
def test_configs_ask_for_what_is_paid(name):
    full = to_dataclass(load_config(f"rl.py:{name}")[0], RLRunConfig)
    assert not full.eval_every and full.rl.reward.units == "pixels"
    text = load_template(full.data.template).text
    for tag in ("think", "answer"):
        assert (f"<{tag}>" in text) == (tag in full.rl.reward.sections)
    assert '{"page": n, "bbox_2d": [x1, y1, x2, y2]}' in text and "[]" in text
    mini = to_dataclass(load_config(f"rl.py:mini-{name}")[0], RLRunConfig)
    assert mini.rl.reward == dataclasses.replace(
        preset(name).reward, units="cells", overlong_max=64, overlong_buffer=4, overlong_min=0
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "paper"}, "estimator='paper' works on the channels of that reward mode"),
        ({"step_prompts": "gold"}, "step_prompts needs an even number of prompts, reward.kind"),
        ({"filter": FilterConfig("both", metric="derivation")}, "overall or one of match, format"),
        ({"scoped": False}, "scoped=False is a switch of"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_contradictory_switches_are_refused(name, changes, message):
    with pytest.raises(RLConfigError, match=message):
        preset(name, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_every": 2, "data": {"validation": "held.jsonl"}}, "pays boxes"),
        ({"interference_every": 2}, "compares a perception and a derivation channel"),
    ],
)
def test_runs_that_would_measure_something_else_are_refused(tmp_path, changes, message):
    with pytest.raises(RLConfigError, match=message):
        run_config(tmp_path, tmp_path, rl=preset("vlm_r1", prompts=4), **changes)


def test_a_run_on_boxes(tmp_path):
    """One record has no boxes and one a box beside its page: both are refused by name, the others train,
    and what is written is judged as a list of boxes."""
    model = write_model(tmp_path / "model")
    path = write_dataset(tmp_path / "data", 6, "train")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[1]["boxes"]
    rows[4]["boxes"] = [[[0, 0, 9, 9]], [[200, 0, 5, 5]], []]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = RewardConfig(kind="perception_r1", sections=(), units="cells")
    sizes = {"prompts": 2, "group": 4, "max_tokens": 8}
    rl = RLConfig(estimator="grpo", reward=reward, **sizes)
    config = run_config(model, path, rl=rl, steps=3, export=False)
    out = tmp_path / "run"
    summary = train(config, out)
    assert summary["records"] == 5 and summary["steps"] == 3
    refused = {
        row["id"]: (row["stage"], row.get("kind", row["reason"]))
        for row in map(json.loads, (out / "rejected.jsonl").read_text().splitlines())
    }
    assert refused == {rows[1]["id"]: ("read", "no_gold"), rows[4]["id"]: ("stream", "box")}
    seen = 0
    for file in sorted((out / "rollouts").glob("*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            for sample in row["samples"]:
                readable = parse_boxes(answer_region(sample["text"]), (), "cells") is not None
                assert sample["rewards"]["format"] == readable
                seen += 1
    assert seen >= 8
    for row in rows:
        row.pop("boxes", None)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (
        pytest.raises(
            RLConfigError, match=f"has boxes to reward .record '{rows[0]['id']}': has no"
        ),
        RunFolder(tmp_path / "other") as folder,
    ):
        RLRun(config, folder)
