"""AdamW against torch's own, what is decayed and trained, and updates that must not happen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from evisrag_jax.models.lora import LoraConfig
from evisrag_jax.training.optimiser import (
    OptimConfig,
    OptimError,
    decays,
    for_adapters,
    for_run,
    gradient_norms,
    is_trainable,
    learning_rate,
    make_optimiser,
    make_schedule,
    skipped_updates,
    trainable_paths,
)

PATHS = ("text/embed/embedding", "text/layers/q/kernel", "text/layers/q/bias", "text/norm/scale")


def parameters(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = ((5, 4), (2, 4, 3), (2, 3), (4,))
    return {p: rng.normal(size=s).astype(dtype) for p, s in zip(PATHS, shapes, strict=True)}


def run(config, params, gradients):
    tx = make_optimiser(config)
    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params)
    for grads in gradients:
        updates, state = jax.jit(tx.update)(jax.tree.map(jnp.asarray, grads), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("first", ["zero", "base"])
def test_equals_torch_adamw_with_clipping_and_warmup(first):
    """Five updates against torch.optim.AdamW and clip_grad_norm_, relative 1e-5."""
    config = OptimConfig(
        learning_rate=1e-2, warmup_steps=3, first_step_lr=first, weight_decay=0.1, clip_norm=1.0
    )
    start = parameters()
    gradients = [parameters(seed) for seed in range(1, 6)]
    ours, _ = run(config, start, gradients)

    tensors = {p: torch.nn.Parameter(torch.tensor(a)) for p, a in start.items()}
    groups = [
        {"params": [tensors[p] for p in PATHS[:2]], "weight_decay": 0.1},
        {"params": [tensors[p] for p in PATHS[2:]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8)
    for k, grads in enumerate(gradients):
        factor = min(1.0, (k + (first == "base")) / 3)
        for group in reference.param_groups:
            group["lr"] = 1e-2 * factor
        for p in PATHS:
            tensors[p].grad = torch.tensor(grads[p])
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        reference.step()
    for p in PATHS:
        np.testing.assert_allclose(ours[p], tensors[p].detach().numpy(), rtol=1e-5, atol=1e-7)


def test_moments_are_float32_for_bfloat16_parameters():
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), parameters())
    out, state = run(OptimConfig(learning_rate=1e-2), params, [parameters(1)])
    assert {a.dtype.name for a in out.values()} == {"bfloat16"}
    floats = [a for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert len(floats) == 2 * len(PATHS) and {a.dtype.name for a in floats} == {"float32"}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_update_with_a_gradient_that_is_not_finite_is_left_out_and_counted(bad):
    """B29, B52: parameters and moments stay; the next normal update equals the one of a fresh run
    (constant rate), bitwise."""
    config = OptimConfig(learning_rate=1e-2)
    broken = parameters(1)
    broken[PATHS[1]][0, 0, 0] = bad
    params, state = run(config, parameters(), [broken])
    for p, a in parameters().items():
        np.testing.assert_array_equal(params[p], a)
    assert {k: int(v) for k, v in skipped_updates(state).items()} == {
        "optim/skipped": 1,
        "optim/empty": 0,
        "optim/skipped_in_a_row": 1,
    }
    after, _ = run(config, parameters(), [broken, parameters(2)])
    fresh, _ = run(config, parameters(), [parameters(2)])
    jax.tree.map(np.testing.assert_array_equal, after, fresh)


def test_zero_gradient_is_no_update():
    """B52: with nothing to train on, neither momentum nor weight decay moves a parameter."""
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1)
    zero = jax.tree.map(np.zeros_like, parameters())
    before, _ = run(config, parameters(), [parameters(1)])
    after, state = run(config, parameters(), [parameters(1), zero])
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(skipped_updates(state)["optim/empty"]) == 1


def test_rate_goes_on_over_a_skipped_update():
    """The released trainer's schedule advances although the update is left out (EVisRAG spec 7)."""
    config = OptimConfig(learning_rate=1e-2, warmup_steps=2, first_step_lr="zero")
    broken = jax.tree.map(lambda a: np.full_like(a, np.nan), parameters())
    after, _ = run(config, parameters(), [broken, parameters(2)])
    # Without the first call the second would have rate 0 and move nothing.
    assert any(np.any(after[p] != a) for p, a in parameters().items())


def test_cosine_ends_at_total_steps():
    rate = make_schedule(OptimConfig(learning_rate=2.0, schedule="cosine", total_steps=10))
    assert float(rate(0)) == pytest.approx(2.0)
    assert float(rate(5)) == pytest.approx(1.0, abs=1e-6)
    assert float(rate(10)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("train", "freeze", "chosen"),
    [
        (".*", "^vision", ("text/a/kernel", "text/b/bias")),
        (".*", "", ("vision/m/kernel", "text/a/kernel", "text/b/bias")),
        ("kernel$", "^vision", ("text/a/kernel",)),
        ("^vision/m|^text", "bias", ("vision/m/kernel", "text/a/kernel")),
    ],
)
def test_choice_of_parameters_by_path(train, freeze, chosen):
    config = OptimConfig(train=train, freeze=freeze)
    paths = ("vision/m/kernel", "text/a/kernel", "text/b/bias")
    assert trainable_paths(paths, config) == chosen
    assert [is_trainable(p, config) for p in paths] == [p in chosen for p in paths]


def test_nothing_to_train_is_refused():
    with pytest.raises(OptimError, match="nothing trains.*nowhere"):
        trainable_paths(PATHS, OptimConfig(train="nowhere"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "linear"),
        ("learning_rate", -1.0),
        ("b1", 1.0),
        ("first_step_lr", "half"),
        ("freeze", "("),
        ("warmup_steps", -1),
        ("moments", "float16"),
        ("last_layers", -1),
    ],
)
def test_bad_settings_are_refused_by_name(field, value):
    with pytest.raises(OptimError, match=field.split("_")[0]):
        dataclasses.replace(OptimConfig(), **{field: value})


def test_open_settings_are_filled_in_from_the_run():
    """The paper's warm-up is a share of the run (0.1), the release's a number of steps (200)."""
    open_ = OptimConfig(schedule="cosine")
    with pytest.raises(OptimError, match="total_steps"):
        make_schedule(open_)
    full = for_run(open_, 938, 0.1)
    assert (full.total_steps, full.warmup_steps) == (938, 94)
    fixed = for_run(OptimConfig(schedule="cosine", warmup_steps=200, total_steps=1000), 938, 0.1)
    assert (fixed.total_steps, fixed.warmup_steps) == (1000, 200)
    with pytest.raises(OptimError, match="warmup_steps=200.*100 updates"):
        for_run(OptimConfig(schedule="cosine", warmup_steps=200), 100)
    with pytest.raises(OptimError, match="warmup_ratio"):
        for_run(open_, 10, 1.0)


def test_learning_rate_is_that_of_the_next_update():
    config = OptimConfig(learning_rate=1.0, warmup_steps=4, first_step_lr="base")
    _, state = run(config, parameters(), [parameters(1)])
    assert float(learning_rate(config, state)) == pytest.approx(0.5)


def test_gradient_norm_is_the_norm_of_all_leaves():
    grads = parameters()
    flat = np.concatenate([a.ravel() for a in grads.values()])
    assert float(
        gradient_norms(jax.tree.map(jnp.asarray, grads))["loss/grad_norm"]
    ) == pytest.approx(float(np.linalg.norm(flat)), rel=1e-6)


@pytest.mark.parametrize("b2", [0.999, 0.98])
def test_moments_in_bfloat16(b2):
    """Both are stored so, arithmetic stays float32: twenty updates end within 0.5 % of the way that
    parameters moved (0.2 % measured), and not at the same place."""
    rng = np.random.default_rng(0)
    start = {"a/kernel": rng.normal(size=(64, 64)).astype(np.float32)}
    drift = 0.5 * rng.normal(size=(64, 64))
    draws = [(drift + rng.normal(size=(64, 64))).astype(np.float32) for _ in range(20)]
    ends = {}
    for moments in ("float32", "bfloat16"):
        config = OptimConfig(learning_rate=1e-3, b2=b2, weight_decay=0.0, moments=moments)
        params, state = run(config, start, [{"a/kernel": g} for g in draws])
        floats = [a for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]
        assert [a.dtype.name for a in floats] == [moments, moments]
        ends[moments] = np.asarray(params["a/kernel"])
    moved = np.linalg.norm(ends["float32"] - start["a/kernel"])
    apart = np.linalg.norm(ends["bfloat16"] - ends["float32"]) / moved
    assert 1e-4 < apart < 5e-3


@pytest.mark.parametrize(("b2", "falls"), [(0.999, False), (0.98, True)])
def test_a_bfloat16_second_moment_falls_only_with_a_smaller_b2(b2, falls):
    """What `kept_in` warns of: after gradients of 1, fifty of 0.01 leave it as it was with 0.999."""
    config = OptimConfig(b2=b2, weight_decay=0.0, clip_norm=0.0, moments="bfloat16")

    def second(gradients):
        grads = [{"a/kernel": np.full((2, 2), g, np.float32)} for g in gradients]
        _, state = run(config, {"a/kernel": np.zeros((2, 2), np.float32)}, grads)
        return float(state[0].inner[0].nu["a/kernel"][0, 0])

    large = [1.0] * 5
    before, after = second(large), second(large + [0.01] * 50)
    assert after == pytest.approx(before * 0.98**50, rel=0.1) if falls else after == before


def test_gradient_norms_by_part_of_the_model():
    """Each path in one part, parts that do not train absent, their squares adding up to the whole."""
    parts = {
        "vision": ("vision/blocks/qkv/kernel", "vision/patch_embed/kernel"),
        "embed": ("text/embed/embedding",),
        "attention": ("text/layers/q/kernel", "text/layers/q/bias", "text/layers/o/kernel"),
        "mlp": ("text/layers/mlp/gate/kernel", "text/layers/mlp/down/kernel"),
        "norm": ("text/layers/norm1/scale", "text/norm/scale"),
        "head": ("text/head/kernel",),
        "lora": ("vision/blocks/qkv/lora_a", "text/layers/mlp/up/lora_b"),
    }
    rng = np.random.default_rng(0)
    grads = {p: rng.normal(size=(3, 2)).astype(np.float32) for ps in parts.values() for p in ps}
    got = {k: float(v) for k, v in gradient_norms(jax.tree.map(jnp.asarray, grads)).items()}
    assert got.keys() == {"loss/grad_norm", *(f"loss/grad_norm/{part}" for part in parts)}
    for part, paths in parts.items():
        want = np.linalg.norm([np.linalg.norm(np.float64(grads[p])) for p in paths])
        assert got[f"loss/grad_norm/{part}"] == pytest.approx(want, rel=1e-6)
    squares = sum(got[f"loss/grad_norm/{part}"] ** 2 for part in parts)
    assert squares == pytest.approx(got["loss/grad_norm"] ** 2, rel=1e-6)
    half = {"text/norm/scale": jnp.full((4096,), 2.0, jnp.bfloat16)}
    assert float(gradient_norms(half)["loss/grad_norm/norm"]) == 128.0


def test_with_adapters_they_alone_train():
    """And what `lora.also` names, whatever train and freeze say; without a rank `also` is refused."""
    paths = (
        "vision/m/kernel",
        "vision/m/lora_a",
        "text/q/kernel",
        "text/q/lora_b",
        "text/norm/scale",
    )
    config = OptimConfig(train="nothing", freeze="^vision")
    alone = for_adapters(config, LoraConfig(rank=2))
    assert trainable_paths(paths, alone) == (paths[1], paths[3])
    beside = for_adapters(config, LoraConfig(rank=2, also="norm|^vision/m/k"))
    assert trainable_paths(paths, beside) == (paths[0], paths[1], paths[3], paths[4])
    assert for_adapters(config, LoraConfig()) is config
    with pytest.raises(OptimError, match="lora.also='norm' needs lora.rank"):
        for_adapters(config, LoraConfig(also="norm"))


def test_decay_applies_to_matrices_and_adapters():
    names = ("q/kernel", "embed/embedding", "q/lora_a", "q/lora_b", "q/bias", "norm1/scale")
    assert decays(dict.fromkeys(names, 0)) == dict(
        zip(names, [True] * 4 + [False] * 2, strict=True)
    )
