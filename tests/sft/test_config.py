"""The run's config: the packaged file fits it field by field, and impossible settings are refused."""

import dataclasses

import pytest

from evisrag_jax.cli.config import ConfigError, load_config, to_dataclass
from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.pages.plan import BUDGETS
from evisrag_jax.runtime.json_files import plain
from evisrag_jax.sft.config import DataSource, SFTConfig, SFTConfigError
from evisrag_jax.training.batching import Bucket
from evisrag_jax.training.optimiser import for_run, make_schedule
from evisrag_jax.training.settings import ModelSource

SMALL = Bucket(4, 1, 2, 6, 40, 1, 16)
LARGE = Bucket(4, 2, 4, 8, 80, 2, 32)


def config(**changes):
    fields = {"model": ModelSource("m"), "data": DataSource("d"), "buckets": (SMALL, LARGE)}
    return SFTConfig(**(fields | changes))


@pytest.mark.parametrize("arg", ["mini", "3b", "7b", "3b-paper", "7b-paper"])
def test_packaged_config_sets_every_field(arg):
    """Every field stands in the file, so that each can be set on the command line."""
    loaded, _ = load_config(f"sft.py:{arg}")
    made = to_dataclass(loaded, SFTConfig)
    assert plain(loaded).keys() == {f.name for f in dataclasses.fields(SFTConfig)}
    for name in ("optim", "lora"):
        assert plain(loaded[name]).keys() == plain(getattr(made, name)).keys()
    assert made.lora == LoraConfig()
    assert plain(made) == plain(loaded)


def test_published_values():
    """EVisRAG spec 8 (released script) and the paper's table 6."""
    released = to_dataclass(load_config("sft.py:7b")[0], SFTConfig)
    assert (released.optim.learning_rate, released.optim.schedule) == (5e-7, "cosine")
    assert (released.batch, released.optim.warmup_steps, released.epochs) == (64, 200, 1.0)
    assert released.optim.weight_decay == 0.0 and released.optim.clip_norm == 1.0
    assert released.optim.first_step_lr == "zero" and released.optim.moments == "float32"
    assert BUDGETS[released.data.budget].max_pixels == 3_920_000
    largest = released.largest
    assert largest.prompt_length + largest.response_length == 32000
    paper = to_dataclass(load_config("sft.py:7b-paper")[0], SFTConfig)
    assert (paper.batch, paper.optim.warmup_steps, paper.warmup_ratio) == (32, 0, 0.1)


def test_published_schedules():
    """Rates of a run of 1,000 updates: the released one warms up for 200 from exactly 0, the paper's for
    100, both fall by half a cosine to 0; the mini config's first update already learns."""
    rates = {}
    for arg in ("7b", "7b-paper", "mini"):
        made = to_dataclass(load_config(f"sft.py:{arg}")[0], SFTConfig)
        rates[arg] = make_schedule(for_run(made.optim, 1000, made.warmup_ratio))
    for arg, warmup in (("7b", 200), ("7b-paper", 100)):
        rate = rates[arg]
        assert float(rate(0)) == 0.0 and float(rate(warmup)) == pytest.approx(5e-7)
        assert float(rate(warmup // 2)) == pytest.approx(2.5e-7)
        assert float(rate((warmup + 1000) // 2)) == pytest.approx(2.5e-7, rel=1e-5)
        assert float(rate(1000)) == pytest.approx(0.0, abs=1e-13)
    assert float(rates["mini"](0)) == pytest.approx(3e-4)


def test_unknown_argument_is_refused():
    with pytest.raises(ConfigError, match="unknown argument '8b'"):
        load_config("sft.py:8b")


def test_prompts_replace_the_buckets_number():
    made = config(prompts=8)
    assert made.batch == 8 and {b.prompts for b in made.shapes} == {8}
    assert made.largest == dataclasses.replace(LARGE, prompts=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": ()}, "at least one"),
        ({"buckets": (SMALL, dataclasses.replace(LARGE, prompts=2))}, "same number of prompts"),
        ({"buckets": (SMALL, dataclasses.replace(LARGE, images=0))}, "at least as large"),
        ({"micro": 3}, "micro=3 does not divide the 4"),
        ({"epochs": 0.0}, "epochs=0.0"),
        ({"keep": 0}, "keep=0"),
        ({"eval_every": -1}, "eval_every=-1"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(SFTConfigError, match=message):
        config(**changes)


def test_words_are_checked():
    with pytest.raises(SFTConfigError, match="target='text'"):
        DataSource(target="text")
    with pytest.raises(ValueError, match="float16 is refused"):
        ModelSource(compute_dtype="float16")
    with pytest.raises(ValueError, match="export_dtype"):
        config(export_dtype="int8")
