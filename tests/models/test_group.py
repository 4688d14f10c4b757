"""One prompt, G responses: shared-prefix passes against the plain forward of prompt + response."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models import attention
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.text import unstack_kv
from tests.models.tiny import (
    SPECIAL,
    Shape,
    append_responses,
    each_tensor,
    largest,
    make_batch,
    make_row,
    relative,
    run,
)

G, T = 3, 6
VALUE = 2e-5  # largest absolute difference of logits, or of a hidden state
GRADIENT = 1e-5  # relative, per tensor


@pytest.fixture(scope="module")
def case(untied):
    """Two prompts (two pictures, none), three responses each."""
    rows = [make_row(untied, 31, (56, 84), (112, 112)), make_row(untied, 32, text=7)]
    shape = Shape(length=48, images=2, windows=1, tokens=16)
    responses = np.random.default_rng(33).integers(0, SPECIAL.endoftext, (2, G, T))
    return rows, make_batch(untied, rows, shape), jnp.asarray(responses)


def response_positions(prompt, width=T):
    start = prompt.next_position[:, None, None] + jnp.arange(width)
    return jnp.broadcast_to(start, (len(prompt.tokens), G, width))


@functools.partial(jax.jit, static_argnames=("config", "remat"))
def shared(params, config, prompt, images, responses, remat=False):
    """Hidden states [P, G, T, D] of the responses against one prefill a prompt."""
    features = model.encode_images(params, config, images, remat=remat)
    _, prefix = model.prefill(params, config, prompt, features, remat=remat)
    positions = response_positions(prompt, responses.shape[-1])
    return model.extend(params, config, responses, positions, prompt.lengths, prefix, remat=remat)[
        0
    ]


@functools.partial(jax.jit, static_argnames="config")
def repeated(params, config, prompt, images, responses):
    """The same hidden states by the plain path: G copies of prompt and pictures."""
    whole = append_responses(prompt, responses)
    copies = jax.tree.map(lambda a: jnp.repeat(a, G, axis=0), images)
    features = model.encode_images(params, config, copies)
    hidden, _ = model.prefill(params, config, whole, features)
    place = (whole.lengths - T)[:, None] + jnp.arange(T)
    hidden = jnp.take_along_axis(hidden, place[..., None], axis=1)
    return hidden.reshape(*responses.shape, -1)


def test_group_equals_the_repeated_path(untied, case):
    """Values, and gradients of all parameters through a drawn linear functional of the logits."""
    _, (prompt, images), responses = case
    shape = (*responses.shape, untied.config.text.vocab)
    weights = jax.random.normal(jax.random.key(1), shape)

    @functools.partial(jax.jit, static_argnames="path")
    def loss(params, path):
        hidden = path(params, untied.config, prompt, images, responses)
        logits = model.logits(params, untied.config, hidden)
        return (jax.nn.log_softmax(logits) * weights).sum(), logits

    (ours, ours_logits), ours_grads = jax.value_and_grad(loss, has_aux=True)(untied.params, shared)
    (theirs, logits), grads = jax.value_and_grad(loss, has_aux=True)(untied.params, repeated)
    assert largest(ours_logits, logits) <= VALUE
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    for (name, a), (_, b) in zip(each_tensor(ours_grads), each_tensor(grads), strict=True):
        assert relative(a, b) <= GRADIENT, name


def test_responses_do_not_see_each_other(untied, case):
    _, (prompt, images), responses = case
    before = shared(untied.params, untied.config, prompt, images, responses)
    other = responses.at[:, 1].set((responses[:, 1] + 1) % SPECIAL.endoftext)
    after = shared(untied.params, untied.config, prompt, images, other)
    np.testing.assert_array_equal(before[:, [0, 2]], after[:, [0, 2]])
    assert (before[:, 1] != after[:, 1]).any(-1).all()


def test_decoding_token_by_token_equals_teacher_forcing(untied, case):
    """A cache of more slots than tokens, stacked layers and caches against tuples of them."""
    _, (prompt, images), responses = case
    expected = shared(untied.params, untied.config, prompt, images, responses)
    prefix = run(untied.params, untied.config, prompt, images)[3]
    positions = response_positions(prompt)
    step = jax.jit(model.extend, static_argnames="config")
    empty = model.empty_suffix(untied.config, 2, G, T + 3, jnp.float32)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *zip(*empty, strict=True))
    ways = {
        "stacked": (untied.params, prefix, type(prefix)(*stacked)),
        "tuples": (model.unstack_layers(untied.params), unstack_kv(prefix), empty),
    }
    for name, (params, kv, suffix) in ways.items():
        for t in range(T):
            hidden, suffix = step(
                params, untied.config, responses[..., t : t + 1], positions[..., t : t + 1],
                prompt.lengths, kv, suffix, t,
            )  # fmt: skip
            assert largest(hidden[:, :, 0], expected[:, :, t]) <= VALUE, (name, t)


def test_unrolled_layers_equal_scan(untied, case):
    """prefill with a tuple of layers; keys and values come back as tuples."""
    _, (prompt, images), _ = case
    logits, features, hidden, kv = run(untied.params, untied.config, prompt, images)
    params = model.unstack_layers(untied.params)
    other, cache = jax.jit(model.prefill, static_argnames="config")(
        params, untied.config, prompt, features
    )
    assert largest(other, hidden) <= VALUE
    assert isinstance(cache.k, tuple)
    assert largest(jnp.stack(cache.v), kv.v) <= VALUE


def test_remat_changes_nothing(untied, case):
    """Tower, prompt and responses recomputed in the backward pass: same values and gradients."""
    _, (prompt, images), responses = case

    @functools.partial(jax.jit, static_argnames="remat")
    def loss(params, remat):
        hidden = shared(params, untied.config, prompt, images, responses, remat)
        return jnp.square(model.logits(params, untied.config, hidden)).mean()

    plain, grads = jax.value_and_grad(loss)(untied.params, False)
    again, remat_grads = jax.value_and_grad(loss)(untied.params, True)
    assert float(plain) == pytest.approx(float(again), rel=1e-6)
    for (name, a), (_, b) in zip(each_tensor(remat_grads), each_tensor(grads), strict=True):
        assert relative(a, b) <= GRADIENT, name


def test_query_blocks_change_nothing(untied, case, monkeypatch):
    """Blocks of 5 queries (none of the lengths divides by it): values and gradients."""
    _, (prompt, images), responses = case

    def loss(params):
        hidden = shared.__wrapped__(params, untied.config, prompt, images, responses)
        return jnp.square(model.logits(params, untied.config, hidden)).mean()

    whole, grads = jax.jit(jax.value_and_grad(loss))(untied.params)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    blocked, block_grads = jax.jit(jax.value_and_grad(lambda params: loss(params)))(untied.params)
    assert float(whole) == pytest.approx(float(blocked), rel=1e-5)
    for (name, a), (_, b) in zip(each_tensor(block_grads), each_tensor(grads), strict=True):
        assert relative(a, b) <= GRADIENT, name


@pytest.mark.parametrize("layers", [1, 2])
def test_fewer_layers_are_a_prefix_of_the_parameters(untied, case, layers):
    """Any depth: the first layers of the stack run as a model of that depth."""
    _, (prompt, images), _ = case
    config = dataclasses.replace(
        untied.config, text=dataclasses.replace(untied.config.text, layers=layers)
    )
    text = untied.params["text"]
    text = text | {"layers": jax.tree.map(lambda a: a[:layers], text["layers"])}
    params = untied.params | {"text": text}
    _, features, hidden, kv = run(params, config, prompt, images)
    assert kv.k.shape[0] == layers
    embedded = model.embed_prompt(params, prompt, features)
    assert hidden.shape == embedded.shape
