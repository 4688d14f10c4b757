"""bfloat16, empty rows, masked softmax: finite everywhere, float32 where it matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models import attention, layers
from evisrag_jax.models.qwen25vl import model, text, vision
from tests.models.tiny import (
    Shape,
    each_tensor,
    loss_and_grads,
    loss_weights,
    make_batch,
    make_row,
    relative,
    run,
)

SHAPE = Shape(length=64, images=2, windows=6, tokens=20)


@pytest.fixture(scope="module")
def rows(tied):
    return [make_row(tied, 51, (56, 84), (140, 112)), make_row(tied, 52, text=10)]


def test_bf16_runs_near_float32(tied, rows):
    """Logits in bfloat16 are finite and within 3 % (relative norm) of float32, gradients within
    15 %. bfloat16 keeps 8 bits: 0.4 % a rounding."""
    batch = make_batch(tied, rows, SHAPE)
    half = model.cast_params(tied.params, jnp.bfloat16)
    logits, features, hidden, kv = run(half, tied.config, *batch)
    assert logits.dtype == jnp.float32
    assert {features.dtype, hidden.dtype, kv.k.dtype, kv.v.dtype} == {jnp.dtype(jnp.bfloat16)}
    expected = run(tied.params, tied.config, *batch)[0]
    for p, row in enumerate(rows):
        size = len(row.prompt.ids)
        assert np.isfinite(logits[p]).all()
        assert relative(logits[p, :size], expected[p, :size]) <= 0.03
    weights = loss_weights(rows, SHAPE.length)
    _, ours = loss_and_grads(half, tied.config, *batch, weights)
    _, theirs = loss_and_grads(tied.params, tied.config, *batch, weights)
    for (name, a), (_, b) in zip(each_tensor(ours), each_tensor(theirs), strict=True):
        assert relative(a, b) <= 0.15, name


def test_rotary_angles_stay_float32_under_bf16(tied):
    """At row 100 a bfloat16 angle is off by up to 0.25 rad; ours does not depend on the dtype of
    the activations, which are rounded once, after the rotation."""
    config = tied.config
    rowcol = jnp.stack([jnp.arange(101), jnp.arange(101)], -1)
    positions = jnp.broadcast_to(jnp.arange(101), (1, 3, 101))
    for cos, sin in (
        vision.rotary_angles(rowcol, config.vision),
        text.rotary_angles(positions, config.text),
    ):
        assert cos.dtype == sin.dtype == jnp.float32
        x = jax.random.normal(jax.random.key(2), (*cos.shape[:-1], 1, 2 * cos.shape[-1]))
        x = x.astype(jnp.bfloat16)
        exact = layers.rotate(x.astype(jnp.float32), cos, sin)
        np.testing.assert_array_equal(layers.rotate(x, cos, sin), exact.astype(jnp.bfloat16))
        rounded = layers.rotate(x, *(a.astype(jnp.bfloat16) for a in (cos, sin)))
        assert jnp.abs(rounded.astype(jnp.float32) - exact).max() > 0.005


def test_rotary_angles_keep_float32_in_the_whole_model(tied, rows, monkeypatch):
    """No layer of a bfloat16 run hands rounded cosines or sines to the rotation."""
    seen = []
    original = layers.rotate

    def watching(x, cos, sin):
        seen.append((x.dtype, cos.dtype, sin.dtype))
        return original(x, cos, sin)

    monkeypatch.setattr(vision, "rotate", watching)
    monkeypatch.setattr(text, "rotate", watching)
    half = model.cast_params(tied.params, jnp.bfloat16)
    batch = make_batch(tied, rows, SHAPE)
    jax.eval_shape(lambda: run.__wrapped__(half, tied.config, *batch))
    dtypes = (jnp.bfloat16, jnp.float32, jnp.float32)
    assert set(seen) == {tuple(map(jnp.dtype, dtypes))}
    assert len(seen) == 2 * 2 + 2  # q and k of a period of two blocks and of the scanned layer


def test_b28_activations_beyond_float16_stay_finite(tied, rows):
    """Residual streams near 1e6 (float16 ends at 65,504): float32 norms and scores, finite logits,
    in both formats; no NaN that argmax would turn into id 0."""
    params = jax.tree.map(lambda a: a, tied.params)
    params["text"]["embed"] = {"embedding": 1e6 * params["text"]["embed"]["embedding"]}
    for dtype in (jnp.float32, jnp.bfloat16):
        logits, _, hidden, _ = run(
            model.cast_params(params, dtype), tied.config, *make_batch(tied, rows, SHAPE)
        )
        assert np.isfinite(logits).all()
        assert jnp.isfinite(hidden).all()


def test_b29_masked_softmax_gradient():
    """log softmax at [1, 1, 100] with the third entry masked: finite, and 0 for the third."""
    seen = jnp.array([True, True, False])
    grad = jax.grad(lambda x: jnp.log(attention._softmax(x, seen)[0]))(jnp.array([1.0, 1.0, 100.0]))
    np.testing.assert_allclose(grad, [0.5, -0.5, 0.0], atol=1e-7)
    assert grad[2] == 0


def test_b29_attention_with_nothing_to_see():
    """Lengths of 0 and masks without a True: finite values, zero gradient to the keys' rows used
    by others."""
    q, k, v = (
        jax.random.normal(key, (2, 4, 2, 8)) for key in jax.random.split(jax.random.key(3), 3)
    )

    def both(q, k, v):
        causal = attention.causal_attention(q, k, v, jnp.array([0, 3]))
        masked = attention.masked_attention(q, k, v, jnp.zeros((2, 4), bool))
        return jnp.sin(causal).sum() + jnp.sin(masked).sum()

    value, grads = jax.jit(jax.value_and_grad(both, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


def test_b29_an_empty_row_changes_nothing(tied, rows):
    """A row of padding only: loss and gradients finite and equal to the batch without it, all of it
    under jax_debug_nans, forward and backward."""
    prompt, images = make_batch(tied, rows, SHAPE)
    padded = model.PromptInputs(
        tokens=jnp.pad(prompt.tokens, ((0, 1), (0, 0)), constant_values=89),
        positions=jnp.pad(prompt.positions, ((0, 1), (0, 0), (0, 0))),
        lengths=jnp.pad(prompt.lengths, (0, 1)),
        image_index=jnp.pad(prompt.image_index, ((0, 1), (0, 0)), constant_values=-1),
        next_position=jnp.pad(prompt.next_position, (0, 1)),
    )
    more = type(images)(*(jnp.pad(a, ((0, 1), *[(0, 0)] * (a.ndim - 1))) for a in images))
    weights = loss_weights(rows, SHAPE.length)
    with jax.debug_nans(True):
        loss, grads = loss_and_grads(tied.params, tied.config, prompt, images, weights)
        loss2, grads2 = loss_and_grads(
            tied.params, tied.config, padded, more, np.pad(weights, ((0, 1), (0, 0)))
        )
        hidden = run(tied.params, tied.config, padded, more)[2]
        last = model.last_hidden(hidden, padded.lengths)
    assert np.isfinite(last).all()
    assert float(loss) == pytest.approx(float(loss2), rel=1e-6)
    for (name, a), (_, b) in zip(each_tensor(grads2), each_tensor(grads), strict=True):
        assert np.isfinite(a).all()
        assert relative(a, b) <= 1e-5, name
