"""Sampling rules against hand-computed tables, numpy and transformers' own logits processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.rollout import sampling
from evisrag_jax.rollout.sampling import SamplingConfig, SamplingError
from evisrag_jax.runtime import prng

draw = jax.jit(sampling.sample)


def controls(rows, **settings):
    """Arrays for `rows` rows; a scalar setting holds for all of them."""
    base = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0} | settings
    dtypes = {"top_k": np.int32}
    return sampling.Controls(
        **{
            k: jnp.asarray(np.broadcast_to(np.asarray(v, dtypes.get(k, np.float32)), (rows,)))
            for k, v in base.items()
        }
    )


def run(logits, uniform=0.5, seen=None, banned=None, **settings):
    logits = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    rows, vocab = logits.shape
    seen = jnp.zeros((rows, vocab), bool) if seen is None else jnp.asarray(seen)
    banned = jnp.zeros(vocab, bool) if banned is None else jnp.asarray(banned)
    uniform = jnp.broadcast_to(jnp.asarray(uniform, jnp.float32), (rows,))
    out = draw(logits, uniform, seen, banned, controls(rows, **settings))
    return jax.tree.map(np.asarray, out)


def support(probabilities, **settings):
    """Every id that a fine grid of uniforms reaches."""
    grid = np.linspace(0, 1, 400, endpoint=False)
    logits = np.tile(np.log(np.asarray(probabilities, np.float64)), (len(grid), 1))
    return set(run(logits, grid, **settings).token.tolist())


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 1.0}, {0, 1, 2}),
        ({"top_p": 0.0}, {0}),
        ({"top_k": 0}, {0, 1, 2}),
        ({"top_k": -1}, {0, 1, 2}),
        ({"top_k": 99}, {0, 1, 2}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 2, "top_p": 0.62}, {0}),  # of what top-k left, 0.625 and 0.375
        ({"temperature": 0.0, "top_p": 0.9}, {0}),  # greedy with top-p is not refused
    ],
)
def test_b44_filter_table(settings, expected):
    assert support([0.5, 0.3, 0.2], **settings) == expected


def test_b44_greedy_is_argmax_with_ties_to_the_lowest_id_whatever_the_uniform():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (64, 11)).astype(np.float32)  # many ties
    for uniform in (0.0, 0.31, 0.999999):
        out = run(logits, uniform, temperature=0.0)
        np.testing.assert_array_equal(out.token, logits.argmax(-1))
        assert np.isfinite(out.logp).all() and not out.failed.any()
        np.testing.assert_array_equal(run(logits, uniform, top_k=1).token, logits.argmax(-1))
        np.testing.assert_array_equal(run(logits, uniform, top_p=0.0).token, logits.argmax(-1))


def test_b44_rows_of_one_batch_keep_their_own_temperature():
    logits = np.tile([0.0, 1.0, 0.5], (400, 1))
    warm = np.arange(400) % 2
    out = run(logits, np.linspace(0, 1, 400, endpoint=False), temperature=warm)
    assert set(out.token[warm == 0].tolist()) == {1}
    assert set(out.token[warm == 1].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 1.01},
        {"top_p": -0.1},
        {"top_k": -2},
        {"repetition_penalty": 0.0},
        {"max_tokens": 0},
    ],
)
def test_b44_bad_settings_are_refused_by_name(bad):
    with pytest.raises(SamplingError, match=next(iter(bad))):
        SamplingConfig(**bad)


def test_b44_chi_square_of_20000_draws():
    """Keys as the engine folds them; 1 % critical values of chi-square with 9 and 4 degrees of freedom."""
    count, rng = 20000, np.random.default_rng(3)
    logits = rng.normal(size=10).astype(np.float32)
    keys = prng.sample_keys(5, 2, [f"prompt {i}" for i in range(200)], 100)
    uniform = sampling.token_uniforms(keys, jnp.int32(7)).reshape(-1)
    tiled = np.tile(logits, (count, 1))

    p = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    observed = np.bincount(run(tiled, uniform).token, minlength=10)
    assert ((observed - count * p) ** 2 / (count * p)).sum() < 21.67

    order = np.argsort(-p)[:5]
    q = p[order] / p[order].sum()
    observed = np.bincount(run(tiled, uniform, top_k=5).token, minlength=10)
    assert observed.sum() == observed[order].sum()
    assert ((observed[order] - count * q) ** 2 / (count * q)).sum() < 13.28


@pytest.mark.parametrize("vocab", [7, 256, 1000, 4096 + 3])
def test_inverse_cdf_equals_float64_search(vocab):
    """The two-level search against numpy's searchsorted; equal unless the draw is within 1e-5 of an edge."""
    rng = np.random.default_rng(vocab)
    weights = np.where(rng.random((50, vocab)) < 0.5, 0, rng.random((50, vocab)) ** 4)
    weights = weights.astype(np.float32)
    uniform = rng.random(50).astype(np.float32)
    token = np.asarray(sampling.inverse_cdf(jnp.asarray(weights), jnp.asarray(uniform)))
    for row, w in enumerate(weights.astype(np.float64)):
        running = np.cumsum(w) / w.sum()
        right = np.searchsorted(running, uniform[row], side="right")
        near = np.abs(running - uniform[row]).min() < 1e-5
        assert token[row] == right or near
        assert w[token[row]] > 0


def test_inverse_cdf_never_returns_an_id_of_weight_zero():
    weights = np.zeros((1, 700), np.float32)
    weights[0, [3, 300]] = 1.0
    for uniform, expected in ((0.0, 3), (0.49, 3), (0.5, 300), (1 - 2**-24, 300)):
        out = sampling.inverse_cdf(jnp.asarray(weights), jnp.asarray([uniform], jnp.float32))
        assert int(out[0]) == expected


def test_filters_and_penalty_equal_transformers():
    """Support of the draw against transformers' processors in their order: penalty, T, top-k, top-p."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(1)
    rows, vocab = 40, 30
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 2
    prompt = rng.integers(0, vocab, (rows, 6))
    seen = np.zeros((rows, vocab), bool)
    seen[np.arange(rows)[:, None], prompt] = True
    temperature, penalty, top_k, top_p = 0.7, 1.3, 9, 0.8
    scores = torch.from_numpy(logits)
    for step in (
        hf.RepetitionPenaltyLogitsProcessor(penalty),
        hf.TemperatureLogitsWarper(temperature),
        hf.TopKLogitsWarper(top_k),
        hf.TopPLogitsWarper(top_p),
    ):
        scores = step(torch.from_numpy(prompt), scores)
    ours = sampling.penalise(jnp.asarray(logits), jnp.asarray(seen), jnp.full(rows, penalty))
    ours = ours / temperature
    keep = sampling.keep_mask(
        ours - ours.max(-1, keepdims=True), jnp.full(rows, top_p), jnp.full(rows, top_k)
    )
    np.testing.assert_array_equal(np.asarray(keep), torch.isfinite(scores).numpy())
    np.testing.assert_allclose(
        np.asarray(ours)[np.asarray(keep)], scores[torch.isfinite(scores)].numpy(), atol=1e-5
    )


def test_a_draw_does_not_depend_on_the_filters_of_other_rows():
    rng = np.random.default_rng(2)
    logits, uniform = rng.normal(size=(6, 50)), rng.random(6)
    alone = run(logits, uniform)
    mixed = run(logits, uniform, top_k=[0, 3, 0, 0, 5, 0], top_p=[1, 1, 1, 0.4, 1, 1])
    plain = [0, 2, 5]
    np.testing.assert_array_equal(alone.token[plain], mixed.token[plain])


def test_b51_logp_divides_logits_by_the_temperature():
    """log p(0) of logits [2, 0] at T 0.5 is -0.018150 (dividing log-probs would give -0.253856)."""
    out = run([2.0, 0.0], 0.0, temperature=0.5)
    np.testing.assert_allclose(out.logp, [-0.018150], atol=1e-6)


def test_b51_logp_is_that_of_the_unfiltered_distribution():
    logits = np.log([0.5, 0.3, 0.2])
    out = run(
        logits, 0.9, top_k=2, seen=[[True, False, False]], repetition_penalty=1.5,
        banned=[True, False, False],
    )  # fmt: skip
    assert out.token.tolist() == [2]
    np.testing.assert_allclose(out.logp, np.log([0.2]), atol=1e-6)


def test_banned_ids_are_never_drawn():
    logits = np.tile([9.0, 0.0, 8.0, 0.1], (200, 1))
    banned = np.asarray([True, False, True, False])
    for temperature in (0.0, 1.0):
        out = run(logits, np.linspace(0, 1, 200, False), banned=banned, temperature=temperature)
        assert not banned[out.token].any()


def test_b28_nan_or_infinite_logits_fail_the_row_and_only_the_row():
    logits = np.zeros((5, 4), np.float32)
    logits[0, 2], logits[1], logits[3, 1], logits[4] = np.nan, np.nan, np.inf, -np.inf
    for temperature in (0.0, 1.0):
        out = run(logits, temperature=temperature)
        assert out.failed.tolist() == [True, True, False, True, True]
        assert out.token[[0, 1, 3, 4]].tolist() == [-1] * 4
        assert np.isfinite(out.logp).all()
    assert run(np.zeros((1, 3)), banned=np.ones(3, bool)).failed.all()
