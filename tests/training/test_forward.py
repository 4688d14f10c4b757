"""Token scores of responses: against torch, against the repeated path, in chunks, with temperature.

B31: the chunked head, its values and its memory.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig
from evisrag_jax.training.forward import GroupBatch, response_mask, score_responses
from evisrag_jax.training.logprobs import token_scores
from tests.models.tiny import (
    SPECIAL,
    Shape,
    append_responses,
    decoded,
    each_tensor,
    largest,
    make_batch,
    make_pair,
    make_row,
    relative,
    torch_logits,
)

P, G, T = 2, 3, 6
LOGP = 2e-5  # largest absolute difference, nats
GRADIENT = 1e-5  # relative, per tensor
LENGTHS = np.array([[6, 3, 1], [5, 0, 6]])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    return make_pair(folder, depth=2, full=(1,), tied=True, layers=2, width=32, seed=7)


@pytest.fixture(scope="module")
def rows(pair):
    return [make_row(pair, 71, (56, 84), (84, 56)), make_row(pair, 72, text=6)]


@pytest.fixture(scope="module")
def batch(pair, rows):
    """Two prompts (two pictures, none), three responses each, of lengths 0 to 6."""
    prompt, images = make_batch(pair, rows, Shape(length=40, images=2, windows=1, tokens=6))
    tokens = np.random.default_rng(73).integers(0, SPECIAL.endoftext, (P, G, T))
    return GroupBatch(prompt, images, jnp.asarray(tokens), jnp.asarray(LENGTHS))


score = jax.jit(score_responses, static_argnames=("config", "train_vision", "remat", "chunk"))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_torch(pair, rows, batch, temperature):
    """log softmax(logits / T) and its entropy, by a full torch forward of prompt + response."""
    ours = score(pair.params, pair.config, batch, temperature=temperature)
    for p, row in enumerate(rows):
        size = len(row.prompt.ids)
        for g in range(G):
            response = np.asarray(batch.tokens[p, g])
            with torch.no_grad():
                logits = torch_logits(pair, row, response)[size - 1 : -1] / temperature
            logp = torch.log_softmax(logits, -1)
            picked = logp.gather(-1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0]
            assert largest(ours.logp[p, g], picked) <= LOGP
            entropy = -(logp.exp() * logp).sum(-1)
            assert largest(ours.entropy[p, g], entropy) <= LOGP


def objective(scores, lengths):
    """A drawn linear functional of the real tokens' scores."""
    weights = jax.random.normal(jax.random.key(1), (2, *scores.logp.shape))
    mask = response_mask(lengths, scores.logp.shape[-1])
    return ((scores.logp * weights[0] + 0.3 * scores.entropy * weights[1]) * mask).sum()


@functools.partial(jax.jit, static_argnames="config")
def repeated_path(params, config, batch):
    """Scores with every response behind its own copy of prompt and pictures."""
    G, T = batch.tokens.shape[1:]
    whole = append_responses(batch.prompt, batch.tokens)
    images = jax.tree.map(lambda a: jnp.repeat(a, G, axis=0), batch.images)
    hidden, _ = model.prefill(params, config, whole, model.encode_images(params, config, images))
    place = (whole.lengths - T - 1)[:, None] + jnp.arange(T)
    hidden = jnp.take_along_axis(hidden, place[..., None], axis=1).reshape(*batch.tokens.shape, -1)
    return token_scores(params, config, hidden, batch.tokens)


def scores_and_grads(pair, batch, path):
    """Scores by `path` and the gradient of `objective`."""

    @jax.jit
    def loss(params):
        scores = path(params)
        return objective(scores, batch.lengths), scores

    (_, scores), grads = jax.value_and_grad(loss, has_aux=True)(pair.params)
    return scores, grads


@pytest.fixture(scope="module")
def trained(pair, batch):
    """Scores and gradients with the tower trained."""
    return scores_and_grads(pair, batch, lambda p: score(p, pair.config, batch, train_vision=True))


def assert_equals_the_repeated_path(pair, batch, ours, grads):
    theirs, expected = scores_and_grads(pair, batch, lambda p: repeated_path(p, pair.config, batch))
    assert largest(ours.logp, theirs.logp) <= LOGP
    assert largest(ours.entropy, theirs.entropy) <= LOGP
    for (name, x), (_, y) in zip(each_tensor(grads), each_tensor(expected), strict=True):
        assert relative(x, y) <= GRADIENT, name


def test_shared_prefix_equals_the_repeated_path(pair, batch, trained):
    """Values, and gradients of all parameters with the tower trained."""
    assert_equals_the_repeated_path(pair, batch, *trained)


def test_a_group_of_one_behind_three_images_and_one(pair):
    """G = 1; a response of full length, and one of a single token."""
    rows = [make_row(pair, 74, (56, 84), (84, 56), (56, 56)), make_row(pair, 75, (84, 84))]
    prompt, images = make_batch(pair, rows, Shape(length=48, images=3, windows=1, tokens=9))
    tokens = np.random.default_rng(76).integers(0, SPECIAL.endoftext, (2, 1, T))
    batch = GroupBatch(prompt, images, jnp.asarray(tokens), jnp.array([[T], [1]]))
    path = functools.partial(score, config=pair.config, batch=batch, train_vision=True)
    assert_equals_the_repeated_path(pair, batch, *scores_and_grads(pair, batch, path))


def test_b24_a_group_is_a_packed_row_that_does_not_leak(pair, rows, batch):
    """Another response, and another prompt's tokens and pixels, leave a response's scores bitwise as they
    were; each equals the response behind its prompt alone, with positions that start anew, so the loss
    is the token-weighted mean of the separate ones."""
    whole = score(pair.params, pair.config, batch)
    tokens = np.asarray(batch.tokens).copy()
    tokens[0, 0] = (tokens[0, 0] + 1) % SPECIAL.endoftext
    prompt = batch.prompt._replace(tokens=batch.prompt.tokens.at[1, :3].set(5))
    images = batch.images._replace(patches=jnp.asarray(batch.images.patches).at[1].set(0.5))
    other = score(pair.params, pair.config, batch._replace(tokens=jnp.asarray(tokens)))
    np.testing.assert_array_equal(other.logp[0, 1:], whole.logp[0, 1:])
    np.testing.assert_array_equal(other.logp[1], whole.logp[1])
    assert (np.asarray(other.logp)[0, 0] != np.asarray(whole.logp)[0, 0]).all()
    other = score(pair.params, pair.config, batch._replace(prompt=prompt, images=images))
    np.testing.assert_array_equal(other.logp[0], whole.logp[0])
    assert (np.asarray(other.logp)[1] != np.asarray(whole.logp)[1]).all()
    total, count = 0.0, 0
    for p, g in np.argwhere(LENGTHS):
        alone, pages = make_batch(pair, rows[p : p + 1], Shape(40, 2, 1, 6))
        response, length = batch.tokens[p : p + 1, g : g + 1], batch.lengths[p : p + 1, g : g + 1]
        logp = score(pair.params, pair.config, GroupBatch(alone, pages, response, length)).logp
        assert largest(logp[0, 0], whole.logp[p, g]) <= LOGP
        total, count = total - float(logp[0, 0, : LENGTHS[p, g]].sum()), count + LENGTHS[p, g]
    mask = response_mask(batch.lengths, T)
    mean = -float((whole.logp * mask).sum() / mask.sum())
    assert mean == pytest.approx(total / count, abs=LOGP)


def test_a_frozen_tower_gets_no_gradient(pair, batch, trained):
    """Exactly 0 for the tower, and the same decoder gradient as with the tower trained; without
    remat, which the other path has."""
    _, frozen = scores_and_grads(pair, batch, lambda p: score(p, pair.config, batch, remat="none"))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(frozen["vision"]))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(trained[1]["vision"]))
    for (name, a), (_, b) in zip(
        each_tensor(frozen["text"]), each_tensor(trained[1]["text"]), strict=True
    ):
        assert relative(a, b) <= GRADIENT, name


def test_b18_text_only_batch(pair, rows, batch):
    """No images in the batch: the text prompt's scores stay the same."""
    prompt = jax.tree.map(lambda a: a[1:], batch.prompt)
    alone = GroupBatch(prompt, None, batch.tokens[1:], batch.lengths[1:])
    expected = score(pair.params, pair.config, batch).logp[1]
    assert largest(score(pair.params, pair.config, alone).logp[0], expected) <= LOGP


def test_padding_tokens_do_not_matter(pair, batch):
    """Whatever stands behind a response's end, the scores up to it are bitwise the same."""
    mask = np.asarray(response_mask(batch.lengths, T)) > 0
    np.testing.assert_array_equal(mask.sum(-1), LENGTHS)
    other = batch._replace(tokens=jnp.where(mask, batch.tokens, SPECIAL.endoftext))
    a = score(pair.params, pair.config, batch)
    b = score(pair.params, pair.config, other)
    np.testing.assert_array_equal(np.asarray(a.logp)[mask], np.asarray(b.logp)[mask])


def test_one_token_responses(pair, batch):
    """T = 1 needs the prompt's last state only."""
    first = batch._replace(tokens=batch.tokens[..., :1])
    expected = score(pair.params, pair.config, batch).logp[..., :1]
    assert largest(score(pair.params, pair.config, first).logp, expected) <= LOGP


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_b51_decode_and_training_agree(pair, batch, temperature):
    """Token by token against a cache, as a rollout does it: the on-policy ratio is 1."""
    params, config = pair.params, pair.config
    features = model.encode_images(params, config, batch.images)
    hidden, kv = model.prefill(params, config, batch.prompt, features)
    first = model.last_hidden(hidden, batch.prompt.lengths)[:, None, None]
    later = decoded(params, config, batch.prompt, kv, batch.tokens[..., :-1], slots=T)
    states = jnp.concatenate([jnp.broadcast_to(first, (P, G, 1, first.shape[-1])), later], 2)
    logp = jax.nn.log_softmax(model.logits(params, config, states) / temperature)
    drawn = jnp.take_along_axis(logp, batch.tokens[..., None], -1)[..., 0]
    trained = score(params, config, batch, temperature=temperature).logp
    ratio = jnp.exp(trained - drawn)
    assert jnp.abs(ratio - 1).max() < 1e-4


def two_words() -> tuple[dict, Qwen25VLConfig]:
    """A head that turns the hidden state [1, 0] into the logits [2, 0]."""
    text = TextConfig(
        vocab=2, width=2, mlp=2, layers=1, heads=1, kv_heads=1, head_dim=2, theta=10.0,
        mrope_section=(1, 0, 0), tied=False,
    )  # fmt: skip
    head = jnp.array([[2.0, 0.0], [0.0, 0.0]])
    return {"text": {"head": {"kernel": head}}}, Qwen25VLConfig(text, None)


def test_b51_logits_are_divided_by_the_temperature():
    """Logits [2, 0] at T = 0.5: log p(0) = -0.018150; dividing log-probs would give -0.253856."""
    params, config = two_words()
    hidden, tokens = jnp.array([[1.0, 0.0]]), jnp.array([0])
    for temperature in (0.5, jnp.float32(0.5)):
        scores = token_scores(params, config, hidden, tokens, temperature)
        assert float(scores.logp[0]) == pytest.approx(-0.018150, abs=1e-6)
        p = np.exp(-0.0181499)
        entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
        assert float(scores.entropy[0]) == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 17])
def test_b31_chunks_change_nothing(pair, length):
    """Chunks of 8: lengths 1, chunk - 1, chunk, chunk + 1 and two and a bit, with logits up to 100;
    values against numpy in float64, gradients (one length) against a single log-softmax."""
    keys = jax.random.split(jax.random.key(length), 3)
    hidden = jax.random.normal(keys[0], (length, pair.config.text.width))
    tokens = jax.random.randint(keys[1], (length,), 0, pair.config.text.vocab)
    weights = jax.random.normal(keys[2], (2, length))
    table = pair.params["text"]["embed"]["embedding"]

    def chunked(hidden, table, chunk):
        params = {"text": {"embed": {"embedding": table}}}
        scores = token_scores(params, pair.config, hidden, tokens, 0.7, chunk=chunk)
        return (scores.logp * weights[0] + scores.entropy * weights[1]).sum(), scores

    _, ours = jax.jit(chunked, static_argnums=2)(hidden, table, 8)
    logits = np.asarray(hidden @ table.T, np.float64) / 0.7
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert ours.logp.shape == ours.entropy.shape == (length,)
    assert largest(ours.logp, logp[np.arange(length), tokens]) <= 1e-5
    assert largest(ours.entropy, -(np.exp(logp) * logp).sum(-1)) <= 1e-5
    if length == 9:
        grad = jax.jit(jax.grad(chunked, argnums=(0, 1), has_aux=True), static_argnums=2)
        for a, b in zip(grad(hidden, table, 8)[0], grad(hidden, table, 9)[0], strict=True):
            assert relative(a, b) <= GRADIENT


def test_b31_the_head_at_full_length_stays_under_2_gib():
    """1,536 response tokens behind 15,000 prompt tokens, 151,936 words of 2,048: all logits in float32
    would be 9.4 GiB with the prompt and 0.9 GiB twice without; compiled, never run."""
    text = TextConfig(
        vocab=151_936, width=2048, mlp=2, layers=1, heads=1, kv_heads=1, head_dim=2, theta=10.0,
        mrope_section=(1, 0, 0), tied=True,
    )  # fmt: skip
    config = Qwen25VLConfig(text, None)

    def loss(table, hidden, tokens):
        states = hidden[:, 14_999:]  # the prompt's last state, and the responses' but the last
        params = {"text": {"embed": {"embedding": table}}}
        return token_scores(params, config, states, tokens, chunk=512).logp.sum()

    spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arguments = spec((151_936, 2048)), spec((1, 16_535, 2048))
    tokens = jax.ShapeDtypeStruct((1, 1536), jnp.int32)
    step = jax.jit(jax.grad(loss, argnums=1))
    memory = step.lower(*arguments, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 2**30
