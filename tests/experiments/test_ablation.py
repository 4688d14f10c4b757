"""The ablation: arms differ by what they say, results follow from predictions, a run in small."""

import dataclasses
import json
from pathlib import Path

import pytest

from evisrag_jax.data.sources import read_records
from evisrag_jax.runtime.json_files import plain
from experiments.ablation import report, run
from experiments.ablation.arms import ARMS, Budget, cluster_command, run_config
from experiments.ablation.data import test_set as write_test_set

RESULTS = Path(report.__file__).parent / "results"


def config(name):
    model = "start" if ARMS[name].start == "evidence" else "generic"
    return run_config(ARMS[name], Budget(), model=model, data="train.jsonl", seed=3)


@pytest.mark.parametrize("name", ARMS)
def test_arms_share_everything_but_what_they_are_about(name):
    """Data, P, G, steps, rate, sampling, clip; no KL; nothing drawn in place of dropped groups."""
    one, base = config(name), config("rs_grpo_paper")
    for field in ("steps", "seed", "data", "images", "tokens", "lora", "mesh"):
        assert getattr(one, field) == getattr(base, field), field
    for field in ("prompts", "group", "temperature", "max_tokens", "optim", "updates"):
        assert getattr(one.rl, field) == getattr(base.rl, field), field
    assert (one.rl.loss.clip_low, one.rl.loss.clip_high, one.rl.loss.kl_coef) == (0.2, 0.28, 0.0)
    if one.rl.filter.active:
        assert one.rl.filter.tries == 1 and one.rl.filter.train_on_partial
    assert (one.model.path == "generic") == (ARMS[name].start == "generic")
    assert "evisrag rl --config=configs/rl.py:" in cluster_command(name)


def test_what_sets_the_arms_apart():
    arms = {name: config(name).rl for name in ARMS}
    dapo = arms["evidence_dapo"]
    assert dapo.estimator == "grpo" and dapo.filter.metric == "derivation"
    assert dapo.reward.channels == ("perception", "derivation", "format", "overlong")
    assert arms["generic_dapo"].reward.sections == ("think", "answer")
    assert "perception" not in arms["generic_dapo"].reward.paid
    assert (
        arms["rs_grpo_code"].estimator == "code" and arms["rs_grpo_code"].scope_match == "token_ids"
    )
    scopes = dataclasses.replace(arms["rs_grpo_paper"], scoped=False)
    assert arms["no_scopes"] == scopes
    unpaid = dataclasses.replace(arms["rs_grpo_paper"].reward, unpaid=("perception",))
    assert arms["no_perception_reward"].reward == unpaid
    assert arms["stepgrpo_router"].step_prompts == "gold"
    assert arms["evidence_stepgrpo"].reward.kind == "r1vl"


def test_a_config_hash_knows_settings_and_no_places():
    here = run.describe(config("no_scopes"))
    there = dataclasses.replace(config("no_scopes"), data=dataclasses.replace(
        config("no_scopes").data, path="/elsewhere/train.jsonl"))  # fmt: skip
    assert run.config_hash(here) == run.config_hash(run.describe(there))
    assert run.config_hash(here) != run.config_hash(run.describe(config("rs_grpo_paper")))
    assert json.loads(json.dumps(plain(here))) == here


def test_the_committed_result_follows_from_the_kept_predictions(tmp_path):
    """Every mean of results.json, from the predictions and freshly generated questions; hashes are those
    of the configs as they are now."""
    told = json.loads((RESULTS / "results.json").read_text())
    kept = run.results(RESULTS)
    assert {one["arm"] for one in kept} == set(ARMS) == set(told["arms"])
    records = read_records(write_test_set(tmp_path, told["questions"]))
    for one in kept:
        scores = report.scores_of(
            RESULTS / f"{one['arm']}-{one['seed']}.jsonl.gz", records, one["arm"]
        )
        arm = told["arms"][one["arm"]]
        place = arm["seeds"].index(one["seed"])
        for metric in ("accuracy", "f1", "format_rate", "refusal"):
            values = scores[metric].values()
            assert arm[metric]["by_seed"][place] == pytest.approx(sum(values) / len(values)), metric
        assert one["config_hash"] == arm["config_hashes"][place] == run.config_hash(one["config"])
    assert min(len(arm["seeds"]) for arm in told["arms"].values()) >= 5
    assert all(0 <= d["accuracy"]["p_not_better"] <= 1 for d in told["differences"].values())
    for name in ("table.md", "accuracy.png", "curves.png"):
        assert (RESULTS / name).stat().st_size > 500
