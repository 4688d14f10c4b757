"""The forward pass of training: each prompt once, its G responses against it.

    prompt  p0 p1 p2 │ responses  a0 a1 a2        every response sees its prompt and itself;
                     │            b0 b1 b2        responses never see each other
    predicts      a0 ◄─ p2        a1 ◄─ a0 …      the prompt's last state predicts every first token

The repeated path (each response behind its own copy of the prompt) gives the same numbers and stays
in the tests as the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.training.logprobs import TokenScores, token_scores


class GroupBatch(NamedTuple):
    """What one update reads. Responses are right-padded; `lengths` counts the end token.

    prompt  a model.PromptInputs of P prompts;  images  page arrays [P, I, …] or None for text only
    tokens  Int[P, G, T] sampled ids;  lengths  Int[P, G], 0 for a padding row
    features  of the images, where a frozen tower has computed them before; the tower is then not run
    """

    prompt: Any
    images: Any
    tokens: Int[Array, "P G T"]
    lengths: Int[Array, "P G"]
    features: Float[Array, "P IM D"] | None = None


def response_mask(lengths: Int[Array, "P G"], width: int) -> Float[Array, "P G T"]:
    """1 on the first `lengths` tokens of each response, up to and including its end token."""
    return (jnp.arange(width) < lengths[..., None]).astype(jnp.float32)


def score_responses(
    params: dict,
    config: Qwen25VLConfig,
    batch: GroupBatch,
    *,
    temperature: float | Float[Array, ""] = 1.0,
    train_vision: bool = False,
    remat: str = "full",
    chunk: int = 2048,
) -> TokenScores:
    """Log-prob and entropy of every response token, [P, G, T] float32 (padding positions included).

    logits are divided by the sampling temperature, so that on-policy ratios are 1 (EVisRAG spec 4.4).
    With `train_vision` false no gradient reaches the tower, and none of it is kept for one. `remat`: see
    `models.remat`.
    """
    features = batch.features
    if features is not None:
        features = jax.lax.stop_gradient(features)
    elif batch.images is not None:
        features = model.encode_images(
            params, config, batch.images, remat=remat if train_vision else "none"
        )
        if not train_vision:
            features = jax.lax.stop_gradient(features)
    hidden, prefix = model.prefill(params, config, batch.prompt, features, remat=remat)
    first = model.last_hidden(hidden, batch.prompt.lengths)
    P, G, T = batch.tokens.shape
    states = jnp.broadcast_to(first[:, None, None], (P, G, 1, first.shape[-1]))
    if T > 1:
        inputs = batch.tokens[:, :, :-1]
        positions = batch.prompt.next_position[:, None, None] + jnp.arange(T - 1)
        positions = jnp.broadcast_to(positions, inputs.shape)
        later = model.extend(
            params, config, inputs, positions, batch.prompt.lengths, prefix, remat=remat
        )
        states = jnp.concatenate([states, later], axis=2)
    return token_scores(params, config, states, batch.tokens, temperature, chunk)
