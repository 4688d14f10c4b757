"""RL settings: what is refused and why, the named behaviours, and the packaged configs."""

import dataclasses

import pytest

from evisrag_jax.cli.config import ConfigError, load_config, to_dataclass
from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.config import RLConfig, RLConfigError, RLRunConfig
from evisrag_jax.rl.recipes import RECIPES, preset
from evisrag_jax.runtime.json_files import plain
from evisrag_jax.runtime.precision import PrecisionError
from evisrag_jax.training.optimiser import make_schedule
from evisrag_jax.training.settings import ModelSource, PromptSource
from tests.rl.tiny import PAGES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 0}, "prompts=0 must be at least 1"),
        ({"group": 1}, "group=1 at least 2: an advantage compares"),
        ({"updates": 3}, "updates=3 must divide prompts=8"),
        ({"updates": 2, "micro": 8}, "micro=8 must divide the 4 prompts an update"),
        ({"micro": 3}, "micro=3 must divide the 8 prompts an update"),
        ({"estimator": "router"}, "estimator='router'; one of paper, code, grpo, rloo"),
        ({"estimator": "code"}, "not on those of reward.mode='paper'"),
        ({"reward": RewardConfig(mode="code")}, "not on those of reward.mode='code'"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"top_p": 0.95}, "a filtered sampler and an unfiltered trainer"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    """B51 for top_p: a filtered sampler cannot be trained on."""
    with pytest.raises(RLConfigError, match=message):
        RLConfig(**({"prompts": 8} | changes))


@pytest.mark.parametrize("mode", ["paper", "code", "strict"])
def test_plain_grpo_works_on_every_reward(mode):
    assert RLConfig(estimator="grpo", reward=RewardConfig(mode=mode)).reward.mode == mode


def run(**changes) -> RLRunConfig:
    fields = {"model": ModelSource("m"), "data": PromptSource("d"), "rl": RLConfig(), **PAGES}
    return RLRunConfig(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"eval_every": 5}, RLConfigError, "eval_every=5 needs data.validation"),
        ({"steps": -1}, RLConfigError, "steps=-1 must not be negative"),
        ({"rollouts_every": 0}, RLConfigError, "rollouts_every=0 must be at least 1"),
        ({"keep": 0}, RLConfigError, "keep=0 must be at least 1"),
        ({"epochs": 0.0}, RLConfigError, "epochs=0.0 must be positive"),
        ({"export_dtype": "fp16"}, PrecisionError, "export_dtype: float16 is refused"),
        ({"windows": 0}, ValueError, "images=3 needs windows and tokens"),
        ({"prompt_length": 0}, ValueError, "prompt_length=0"),
    ],
)
def test_runs_that_cannot_be_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        run(**changes)


def test_the_batch_has_the_sizes_of_the_run():
    got = run(rl=RLConfig(prompts=4, group=3, max_tokens=17)).bucket
    assert dataclasses.asdict(got) == {"prompts": 4, "group": 3, "response_length": 17, **PAGES}


def test_named_behaviours():
    """EVisRAG spec 3.2 and 5: what sets the three apart."""
    paper, code, strict = map(preset, ("paper", "code", "strict"))
    assert (paper.estimator, paper.scope_match, paper.temperature) == ("paper", "char_offsets", 1.2)
    assert paper.loss.dual_clip is None and not paper.filter.active and paper.exact_zero
    assert (paper.loss.clip_low, paper.loss.clip_high) == (0.2, 0.28)
    assert (code.estimator, code.scope_match, code.temperature) == ("code", "token_ids", 1.0)
    assert code.loss.dual_clip == 3.0 and code.loss.divisor_scope == "micro"
    assert code.loss.channel_divisor == "nonzero_count" and code.loss.nan_policy == "safe_zero"
    assert (code.filter.rule, code.filter.low, code.filter.high) == ("mean_band", 0.01, 6.9)
    assert not code.exact_zero and len(code.reward.channels) == 6
    assert strict == dataclasses.replace(paper, reward=RewardConfig(mode="strict"))
    assert preset("paper", group=16).group == 16
    with pytest.raises(ValueError, match="released"):
        preset("released")


@pytest.mark.parametrize("name", ["paper", "code", "strict"])
def test_packaged_configs_are_the_published_settings(name):
    """EVisRAG table 7 and spec 5-7: 32 prompts x 8, rate 1e-6; epochs and temperature by behaviour."""
    config, source = load_config(f"rl.py:{name}")
    assert source.endswith(f"rl.py:{name}")
    with pytest.raises(ConfigError, match=r"eval_every=10 needs data\.validation"):
        to_dataclass(config, RLRunConfig)
    config.data.validation = "held_out.jsonl"
    got = to_dataclass(config, RLRunConfig)
    want = preset(name, prompts=32, group=8, micro=1, max_tokens=1536, optim=got.rl.optim)
    assert got.rl == want and got.rl.optim.learning_rate == 1e-6
    assert got.rl.optim.first_step_lr == ("zero" if name == "code" else "base")
    rate = make_schedule(got.rl.optim)
    assert [float(rate(k)) for k in range(2)] == pytest.approx(
        [0.0 if name == "code" else 1e-6, 1e-6]
    )
    assert got.lora == LoraConfig() and plain(config)["lora"].keys() == plain(got.lora).keys()
    assert got.epochs == (16.0 if name == "code" else 4.0)
    assert got.data.budget == "grpo" and got.images * got.tokens < got.prompt_length


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_config_at_both_scales(name):
    """The full one is the recipe under one schedule; the mini one changes sizes and lengths alone."""
    config, _ = load_config(f"rl.py:{name}")
    config.data.validation = "held_out.jsonl"
    full = to_dataclass(config, RLRunConfig).rl
    assert full == preset(name, prompts=32, group=8, micro=1, max_tokens=1536, optim=full.optim)
    mini = to_dataclass(load_config(f"rl.py:mini-{name}")[0], RLRunConfig).rl
    for field in ("estimator", "scale", "loss", "filter", "masked", "step_prompts", "scope_match"):
        assert getattr(mini, field) == getattr(preset(name), field), field
    assert mini.reward.channels == preset(name).reward.channels
    assert (mini.prompts, mini.group, mini.max_tokens) == (16, 8, 64)


def test_the_mini_config_runs_anywhere():
    config, _ = load_config("rl.py:mini")
    got = to_dataclass(config, RLRunConfig)
    assert got.model.path == "mini-sft" and got.rl.estimator == "paper" and not got.eval_every
    with pytest.raises(
        ConfigError, match="rl.py:tiny is unknown; mini, or one of paper, code, strict, grpo"
    ):
        load_config("rl.py:tiny")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stepz", 3, r"config\.stepz: unknown field of RLRunConfig; did you mean 'steps'"),
        ("rl.reward.k", 3.0, r"config\.rl\.reward\.k: unknown field of RewardConfig"),
        ("rl.loss.average", "seq", r"config\.rl\.loss: average='seq'"),
        ("rl.group", 1, r"config\.rl: .*group=1"),
    ],
)
def test_fields_are_checked_by_name(field, value, message):
    config, _ = load_config("rl.py:mini")
    node, *path = config, *field.split(".")
    with config.unlocked():
        for name in path[:-1]:
            node = node[name]
        node[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        to_dataclass(config, RLRunConfig)
