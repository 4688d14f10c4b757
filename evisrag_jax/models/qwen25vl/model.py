"""The joined model as pure functions over one parameter dict {"vision": …, "text": …}.

    images ──encode_images──► features [P, I·M, D] ─┐
    prompt tokens ──────────────────────────────────┴─prefill──► hidden, KV once a prompt
    responses [P, G, T] ──extend against that KV──► hidden ──logits──► [P, G, T, V]

The compute dtype is that of the parameters passed in (cast them with `cast_params`); norms, rotary,
softmax and logits are float32 inside whatever it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from evisrag_jax.models.qwen25vl import text as decoder
from evisrag_jax.models.qwen25vl import vision as tower
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.decode import decode_logits as decode_logits
from evisrag_jax.models.qwen25vl.decode import decode_params as decode_params
from evisrag_jax.models.qwen25vl.decode import decode_step as decode_step
from evisrag_jax.models.qwen25vl.decode import empty_kv as empty_kv
from evisrag_jax.models.qwen25vl.decode import resident_kv as resident_kv
from evisrag_jax.models.qwen25vl.text import KV
from evisrag_jax.runtime.mesh import gathered, over_batch

Params = dict[str, Any]


class PromptInputs(NamedTuple):
    """Right-padded prompts. image_index is the row of `features` a token takes, -1 for text."""

    tokens: Int[Array, "P L"]
    positions: Int[Array, "P 3 L"]
    lengths: Int[Array, " P"]
    image_index: Int[Array, "P L"]
    next_position: Int[Array, " P"]


def init_boxed(config: Qwen25VLConfig, key: Array) -> Params:
    """Parameters with their logical axis names attached (flax LogicallyPartitioned boxes)."""
    k_vision, k_text = jax.random.split(key)
    params = {"text": decoder.init_text(config.text, k_text)}
    if config.vision is not None:
        params["vision"] = tower.init_vision(config.vision, k_vision)
    return params


def init_params(config: Qwen25VLConfig, key: Array) -> Params:
    """Random float32 parameters as a plain nested dict."""
    return nn.unbox(init_boxed(config, key))


def param_shapes(config: Qwen25VLConfig) -> Params:
    """Shapes and dtypes of the parameters, nothing allocated."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def logical_axes(config: Qwen25VLConfig) -> Params:
    """A tree like the parameters whose leaves are tuples of logical axis names."""
    boxed = jax.eval_shape(lambda: init_boxed(config, jax.random.key(0)))
    return jax.tree.map(
        lambda box: tuple(box.names), boxed, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata)
    )


def cast_params(params: Params, dtype) -> Params:
    """The same tree in the compute dtype."""
    return jax.tree.map(lambda a: a.astype(dtype), params)


def compute_dtype(params: Params):
    """The dtype the functions below compute in."""
    return params["text"]["embed"]["embedding"].dtype


def encode_images(
    params: Params, config: Qwen25VLConfig, images: Any, *, remat: str = "none"
) -> Float[Array, "P IM D"]:
    """Image features a prompt, padded to I images of M tokens.

    `images` has array fields patches [P, I, W, S, C], mask [P, I, W, S], rowcol [P, I, W, S, 2] and
    merged_index [P, I, M] (what `pages.patches.stack_pages` makes).
    """
    if config.vision is None:
        raise ValueError("this model has no vision tower; pass features=None to prefill")
    P, I, M = images.merged_index.shape
    if I * M == 0:
        return jnp.zeros((P, 0, config.vision.out_width), compute_dtype(params))
    patches, mask, rowcol, merged_index = (
        jnp.asarray(a).reshape(P * I, *a.shape[2:])
        for a in (images.patches, images.mask, images.rowcol, images.merged_index)
    )
    patches = patches.astype(compute_dtype(params))
    features = tower.encode(
        params["vision"], config.vision, patches, mask, rowcol, merged_index, remat=remat
    )
    return features.reshape(P, I * M, -1)


def embed(params: Params, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """Embeddings of tokens."""
    table = gathered(params["text"]["embed"]["embedding"], ("vocab", "embed"), looked_up=True)
    return over_batch(table[tokens])


def embed_prompt(
    params: Params, prompt: Any, features: Float[Array, "P IM D"] | None
) -> Float[Array, "P L D"]:
    """Token embeddings with image features written over the image slots."""
    x = embed(params, prompt.tokens)
    if features is None or features.shape[1] == 0:
        return x
    index = jnp.asarray(prompt.image_index)
    rows = jnp.take_along_axis(features, jnp.maximum(index, 0)[..., None], axis=1)
    return jnp.where((index >= 0)[..., None], rows.astype(x.dtype), x)


def prefill(
    params: Params,
    config: Qwen25VLConfig,
    prompt: Any,
    features: Float[Array, "P IM D"] | None = None,
    *,
    remat: str = "none",
) -> tuple[Float[Array, "P L D"], KV]:
    """Hidden states of the prompts (a PromptInputs), and their KV [layers, P, L, K, H]."""
    x = embed_prompt(params, prompt, features)
    return decoder.prefill(
        params["text"], config.text, x, prompt.positions, prompt.lengths, remat=remat
    )


def extend(
    params: Params,
    config: Qwen25VLConfig,
    tokens: Int[Array, "P G T"],
    positions: Int[Array, "P G T"],
    lengths: Int[Array, " P"],
    prefix: KV,
    *,
    remat: str = "none",
) -> Float[Array, "P G T D"]:
    """Hidden states of response tokens (text only) against one prefill a prompt."""
    x = embed(params, tokens)
    return decoder.extend(params["text"], config.text, x, positions, lengths, prefix, remat=remat)


def attention_mass(
    params: Params,
    config: Qwen25VLConfig,
    tokens: Int[Array, "P G T"],
    positions: Int[Array, "P G T"],
    lengths: Int[Array, " P"],
    prefix: KV,
    key_sets: Bool[Array, "P sets L"],
) -> Float[Array, "layers P G T sets"]:
    """Attention mass of each layer and response token on sets of prompt tokens; arguments as `extend`."""
    x = embed(params, tokens)
    return decoder.attention_mass(
        params["text"], config.text, x, positions, lengths, prefix, key_sets
    )


def last_hidden(hidden: Float[Array, "P L D"], lengths: Int[Array, " P"]) -> Float[Array, "P D"]:
    """The hidden state of each prompt's last real token: it predicts the first response token.

    An empty prompt (a padding row of the batch) takes its slot 0, which is finite.
    """
    last = jnp.maximum(lengths - 1, 0)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


def logits(params: Params, config: Qwen25VLConfig, hidden: Float[Array, "*B D"]) -> Array:
    """Float32 logits over the vocabulary."""
    return decoder.head_logits(params["text"], config.text, hidden)
