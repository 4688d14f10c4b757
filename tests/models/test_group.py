"""One prompt, G responses: shared-prefix passes against the plain forward of prompt + response."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models import attention, blocked_attention
from evisrag_jax.models.qwen25vl import model
from tests.models.tiny import (
    SPECIAL,
    Shape,
    append_responses,
    decoded,
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
def shared(params, config, prompt, images, responses, remat="none"):
    """Hidden states [P, G, T, D] of the responses against one prefill a prompt."""
    features = model.encode_images(params, config, images, remat=remat)
    _, prefix = model.prefill(params, config, prompt, features, remat=remat)
    positions = response_positions(prompt, responses.shape[-1])
    return model.extend(params, config, responses, positions, prompt.lengths, prefix, remat=remat)


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


def test_query_blocks_change_nothing(tied, case, plain, monkeypatch):
    """Attention in blocks of 5 queries, which divide none of the lengths; tower, prompt and responses
    recomputed in the backward pass."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    for name in ("BLOCK", "LONE_BLOCK"):
        monkeypatch.setattr(blocked_attention, name, 5)
    path = functools.partial(shared.__wrapped__, remat="full")
    assert_equal(loss_and_grads(tied, case, path), plain)


@pytest.mark.parametrize("remat", ["dots", "attention"])
def test_remat_changes_nothing(tied, case, plain, remat):
    path = functools.partial(shared.__wrapped__, remat=remat)
    assert_equal(loss_and_grads(tied, case, path), plain)


def test_responses_do_not_see_each_other(tied, case):
    _, (prompt, images), responses = case
    before = shared(tied.params, tied.config, prompt, images, responses)
    other = responses.at[:, 1].set((responses[:, 1] + 1) % SPECIAL.endoftext)
    after = shared(tied.params, tied.config, prompt, images, other)
    np.testing.assert_array_equal(before[:, [0, 2]], after[:, [0, 2]])
    assert (before[:, 1] != after[:, 1]).any(-1).all()


@pytest.mark.parametrize("fuse", [True, False])
def test_decoding_token_by_token_equals_teacher_forcing(tied, case, fuse):
    """A cache of more slots than tokens; kernels joined or one by one."""
    _, (prompt, images), responses = case
    expected = shared(tied.params, tied.config, prompt, images, responses)
    prefix = run(tied.params, tied.config, prompt, images)[3]
    hidden = decoded(tied.params, tied.config, prompt, prefix, responses, slots=T + 3, fuse=fuse)
    assert largest(hidden, expected) <= VALUE
