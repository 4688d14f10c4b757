"""One prompt, G responses: shared-prefix passes against the plain forward of prompt + response."""

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
def case(tied):
    """Two prompts (two pictures, none), three responses each."""
    rows = [make_row(tied, 31, (56, 84), (112, 112)), make_row(tied, 32, text=7)]
    shape = Shape(length=48, images=2, windows=4, tokens=16)
    responses = np.random.default_rng(33).integers(0, SPECIAL.endoftext, (2, G, T))
    return rows, make_batch(tied, rows, shape), jnp.asarray(responses)


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


def loss_and_grads(pair, case, path):
    """A drawn linear functional of the responses' log-probs, its gradient, and the logits."""
    _, (prompt, images), responses = case
    weights = jax.random.normal(jax.random.key(1), (*responses.shape, pair.config.text.vocab))

    @jax.jit
    def loss(params):
        hidden = path(params, pair.config, prompt, images, responses)
        logits = model.logits(params, pair.config, hidden)
        return (jax.nn.log_softmax(logits) * weights).sum(), logits

    (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(pair.params)
    return logits, grads


@pytest.fixture(scope="module")
def plain(tied, case):
    """Logits and gradients of the shared-prefix path."""
    return loss_and_grads(tied, case, shared)


def assert_equal(ours, theirs):
    assert largest(ours[0], theirs[0]) <= VALUE
    for (name, a), (_, b) in zip(each_tensor(ours[1]), each_tensor(theirs[1]), strict=True):
        assert relative(a, b) <= GRADIENT, name


def test_group_equals_the_repeated_path(tied, case, plain):
    """Values, and gradients of all parameters, the tower's included."""
    assert_equal(plain, loss_and_grads(tied, case, repeated))


def test_remat_and_query_blocks_change_nothing(tied, case, plain, monkeypatch):
    """Tower, prompt and responses recomputed in the backward pass, attention in blocks of 5 queries
    (which divide none of the lengths)."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    path = functools.partial(shared.__wrapped__, remat=True)
    assert_equal(loss_and_grads(tied, case, path), plain)


def test_responses_do_not_see_each_other(tied, case):
    _, (prompt, images), responses = case
    before = shared(tied.params, tied.config, prompt, images, responses)
    other = responses.at[:, 1].set((responses[:, 1] + 1) % SPECIAL.endoftext)
    after = shared(tied.params, tied.config, prompt, images, other)
    np.testing.assert_array_equal(before[:, [0, 2]], after[:, [0, 2]])
    assert (before[:, 1] != after[:, 1]).any(-1).all()


def test_decoding_token_by_token_equals_teacher_forcing(tied, case):
    """A cache of more slots than tokens, stacked layers and caches against tuples of them."""
    _, (prompt, images), responses = case
    expected = shared(tied.params, tied.config, prompt, images, responses)
    prefix = run(tied.params, tied.config, prompt, images)[3]
    positions = response_positions(prompt)
    step = jax.jit(model.extend, static_argnames="config")
    empty = model.empty_suffix(tied.config, 2, G, T + 3, jnp.float32)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *zip(*empty, strict=True))
    ways = {
        "stacked": (tied.params, prefix, type(prefix)(*stacked)),
        "tuples": (model.unstack_layers(tied.params), unstack_kv(prefix), empty),
    }
    for name, (params, kv, suffix) in ways.items():
        for t in range(T):
            hidden, suffix = step(
                params, tied.config, responses[..., t : t + 1], positions[..., t : t + 1],
                prompt.lengths, kv, suffix, t,
            )  # fmt: skip
            assert largest(hidden[:, :, 0], expected[:, :, t]) <= VALUE, (name, t)


def test_unrolled_layers_equal_scan(tied, case):
    """prefill with a tuple of layers; keys and values come back as tuples."""
    _, (prompt, images), _ = case
    logits, features, hidden, kv = run(tied.params, tied.config, prompt, images)
    params = model.unstack_layers(tied.params)
    other, cache = jax.jit(model.prefill, static_argnames="config")(
        params, tied.config, prompt, features
    )
    assert largest(other, hidden) <= VALUE
    assert isinstance(cache.k, tuple)
    assert largest(jnp.stack(cache.v), kv.v) <= VALUE
