"""Log-probabilities of given tokens without ever holding the logits of all positions.

Full float32 logits of 8 responses of 2,048 tokens over 152,000 words are 9.3 GiB; here they live one
chunk of positions at a time, forward and backward.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime.mesh import batch_shards, over_batch


class TokenScores(NamedTuple):
    """Per token: its log-probability and the entropy of the distribution it was drawn from (nats)."""

    logp: Float[Array, "*B"]
    entropy: Float[Array, "*B"]


def token_scores(
    params: dict,
    config: Qwen25VLConfig,
    hidden: Float[Array, "*B D"],
    tokens: Int[Array, "*B"],
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 2048,
) -> TokenScores:
    """Scores of `tokens` under softmax(logits / temperature), in chunks of `chunk` positions.

    hidden[…] is the state that predicts tokens[…]. Each chunk is rematerialised in the backward
    pass; any number of positions works (the remainder is padded). On a mesh every device has a chunk of
    its own rows. Float32 throughout.
    """
    # Z parts of the rows lie on different devices: a chunk has positions of each.
    shape, Z = tokens.shape, batch_shards()
    flat, ids = hidden.reshape(Z, -1, hidden.shape[-1]), tokens.reshape(Z, -1)
    n = ids.shape[1]
    chunk = min(chunk, n)
    pad = -n % chunk

    def cut(a):
        a = jnp.pad(a, ((0, 0), (0, pad), *[(0, 0)] * (a.ndim - 2)))
        a = a.reshape(Z, -1, chunk, *a.shape[2:]).swapaxes(0, 1)
        return over_batch(a.reshape(len(a), Z * chunk, *a.shape[3:]), axis=1)

    flat, ids = cut(flat), cut(ids)

    @jax.checkpoint
    def score(chunk_hidden, chunk_ids):
        logits = over_batch(model.logits(params, config, over_batch(chunk_hidden)) / temperature)
        log_p = jax.nn.log_softmax(logits, -1)
        picked = jnp.take_along_axis(log_p, chunk_ids[:, None], -1)[:, 0]
        # Of log p, not of the logits: those are large and would cancel.
        return picked, -jnp.sum(jnp.exp(log_p) * log_p, -1)

    if ids.shape[0] == 1:
        scores = [a[None] for a in score(flat[0], ids[0])]
    else:
        scores = jax.lax.map(lambda args: score(*args), (flat, ids))
    return TokenScores(
        *(
            a.reshape(-1, Z, chunk).swapaxes(0, 1).reshape(Z, -1)[:, :n].reshape(shape)
            for a in scores
        )
    )
