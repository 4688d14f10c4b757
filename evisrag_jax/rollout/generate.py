"""The rollout on the device: pages → features → prompt keys and values, once a prompt → its G responses.

    encode    images [P, I, W, S, C]         → features [P, I·M, D]
    prefill   prompt [P, L], features        → Prefix: KV of the prompts, last hidden state, tokens seen
    start     hidden, seen, keys             → DecodeState: room for G responses a prompt, nothing drawn yet
    decode    Prefix, settings, DecodeState  → DecodeState, all responses done (or `until` tokens each)

`model` is anything with the functions of `models.qwen25vl.model` (the module itself is passed) and `config`
its frozen configuration; both are static, and so is `mesh`, over whose batch axes prompts are split.
Everything that changes from call to call is an array, so a shape compiles once. One response after t tokens:

    slot        0    1   …  t-1   t  …
    tokens      a0   a1  …  a(t-1)
    suffix KV   a0   a1  …  a(t-1)      a(i) was fed at position next_position + i
    hidden                  of a(t-1); token t is drawn from it

A response that is done keeps its row: padding is fed and nothing more is recorded.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from evisrag_jax.models.qwen25vl.text import unstack_kv
from evisrag_jax.rollout.sampling import Controls, sample, token_uniforms
from evisrag_jax.runtime.mesh import BATCH_AXES


class Prefix(NamedTuple):
    """What the responses of P prompts share."""

    kv: Any  # the model's cache of the prompts
    hidden: Float[Array, "P D"]  # of each prompt's last token
    lengths: Int[Array, " P"]
    next_position: Int[Array, " P"]
    seen: Bool[Array, "P V"]


class Rows(NamedTuple):
    """Settings of each prompt's responses. stop_ids is padded with -1; invalid rows are padding of the batch."""

    controls: Controls
    max_tokens: Int[Array, " P"]
    stop_ids: Int[Array, "P E"]
    valid: Bool[Array, " P"]


class DecodeState(NamedTuple):
    """Everything that decoding changes. Tokens beyond a response's length are padding, their logp 0."""

    count: Int[Array, ""]  # tokens drawn so far: t above
    tokens: Int[Array, "P G T"]
    logp: Float[Array, "P G T"]  # log softmax(logits / T), see sampling
    length: Int[Array, "P G"]  # the end token counts
    hidden: Float[Array, "P G D"]  # from which the next token is drawn
    done: Bool[Array, "P G"]
    stopped: Bool[Array, "P G"]  # ended by a stop id
    failed_at: Int[Array, "P G"]  # index of the token whose logits were not finite, -1 if none
    seen: Bool[Array, "P G V"]
    keys: Key[Array, "P G"]
    suffix: Any  # the model's cache of the responses


@partial(jax.jit, static_argnames=("model", "config", "mesh"))
def encode(
    model: Hashable, config: Hashable, params: Any, images: Any, mesh: Mesh | None = None
) -> Float[Array, "P IM D"]:
    """Features of a batch of pages (`pages.patches.ImageArrays`), a prompt's images side by side."""
    return _split(model.encode_images(params, config, images), mesh)


@partial(jax.jit, static_argnames=("model", "config", "mesh"))
def prefill(
    model: Hashable,
    config: Hashable,
    params: Any,
    prompt: Any,
    features: Float[Array, "P IM D"] | None,
    mesh: Mesh | None = None,
) -> Prefix:
    """Runs each prompt once. `prompt` is the model's PromptInputs, right-padded to L."""
    hidden, kv = model.prefill(params, config, prompt, features)
    rows, length = prompt.tokens.shape
    last = model.last_hidden(hidden, prompt.lengths)
    vocab = jax.eval_shape(lambda h: model.logits(params, config, h), last).shape[-1]
    real = jnp.arange(length)[None] < prompt.lengths[:, None]
    tokens = jnp.where(real, prompt.tokens, vocab)  # out of range: dropped
    seen = jnp.zeros((rows, vocab), bool)
    seen = seen.at[jnp.arange(rows)[:, None], tokens].set(True, mode="drop")
    prefix = Prefix(unstack_kv(kv), last, prompt.lengths, prompt.next_position, seen)
    return _split(prefix, mesh)


@partial(jax.jit, static_argnames=("model", "config", "slots", "dtype", "mesh"))
def start(
    model: Hashable,
    config: Hashable,
    hidden: Float[Array, "P D"],
    seen: Bool[Array, "P V"],
    valid: Bool[Array, " P"],
    keys: Key[Array, "P G"],
    pad: Int[Array, ""],
    *,
    slots: int,
    dtype: Any,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Makes room for G responses a prompt of at most `slots` tokens each.

    `hidden` and `seen` are those of the Prefix and `dtype` is that of its cache. Prompts that are not valid
    (padding of the batch) are done from the start.
    """
    P, G = grid = keys.shape
    state = DecodeState(
        count=jnp.int32(0),
        tokens=jnp.broadcast_to(pad, (P, G, slots)).astype(jnp.int32),
        logp=jnp.zeros((P, G, slots), jnp.float32),
        length=jnp.zeros(grid, jnp.int32),
        hidden=jnp.broadcast_to(hidden[:, None], (P, G, hidden.shape[-1])),
        done=jnp.broadcast_to(~valid[:, None], grid),
        stopped=jnp.zeros(grid, bool),
        failed_at=jnp.full(grid, -1, jnp.int32),
        seen=jnp.broadcast_to(seen[:, None], (P, G, seen.shape[-1])),
        keys=keys,
        suffix=model.empty_suffix(config, P, G, slots, dtype),
    )
    return _split(state, mesh)


@partial(jax.jit, static_argnames=("model", "config"), donate_argnames=("state",))
def decode(
    model: Hashable,
    config: Hashable,
    params: Any,
    prefix: Prefix,
    rows: Rows,
    banned: Bool[Array, " V"],
    pad: Int[Array, ""],
    state: DecodeState,
    until: Int[Array, ""],
) -> DecodeState:
    """Draws tokens until every response is done or holds `until` of them (at most the slots).

    `state` is donated: its caches are updated in place. Layers are sliced out of the stacked parameters
    once, before the loop, and caches are a tuple of a layer's arrays, so that the loop copies neither.
    """
    params = model.unstack_layers(params)
    limit = jnp.minimum(until, state.tokens.shape[-1])

    def unfinished(state: DecodeState):
        return (state.count < limit) & ~jnp.all(state.done)

    def step(state: DecodeState):
        slot = state.count
        logits = model.logits(params, config, state.hidden)
        state, token = _draw(state, logits, rows, banned, pad)
        position = jnp.broadcast_to((prefix.next_position + slot)[:, None], token.shape)
        hidden, suffix = model.extend(
            params,
            config,
            token[..., None],
            position[..., None],
            prefix.lengths,
            prefix.kv,
            state.suffix,
            slot,
        )
        return state._replace(hidden=hidden[:, :, 0], suffix=suffix)

    return jax.lax.while_loop(unfinished, step, state)


def _split(tree: Any, mesh: Mesh | None) -> Any:
    """Keeps the prompt axis of every array over the mesh's batch axes, and leaves other axes to the compiler."""
    if mesh is None:
        return tree

    def constrain(a: Array) -> Array:
        if a.ndim == 0:
            return a
        spec = PartitionSpec(BATCH_AXES, *[PartitionSpec.UNCONSTRAINED] * (a.ndim - 1))
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))

    return jax.tree.map(constrain, tree)


def _draw(
    state: DecodeState, logits: Float[Array, "P G V"], rows: Rows, banned: Array, pad: Array
) -> tuple[DecodeState, Int[Array, "P G"]]:
    """Draws token number `count` of every live response and files it; the tokens to feed next."""
    P, G = grid = state.done.shape
    controls = Controls(*(jnp.broadcast_to(c[:, None], grid) for c in rows.controls))
    draw = sample(logits, token_uniforms(state.keys, state.count), state.seen, banned, controls)

    live = ~state.done
    failed = live & draw.failed
    drawn = live & ~draw.failed
    token = jnp.where(drawn, draw.token, pad)
    length = state.length + drawn
    stop = drawn & jnp.any(token[..., None] == rows.stop_ids[:, None], -1)
    full = length >= rows.max_tokens[:, None]
    put = jax.lax.dynamic_update_index_in_dim
    prompt, response = jnp.meshgrid(jnp.arange(P), jnp.arange(G), indexing="ij")
    state = state._replace(
        count=state.count + 1,
        tokens=put(state.tokens, token, state.count, axis=2),
        logp=put(state.logp, jnp.where(drawn, draw.logp, 0.0), state.count, axis=2),
        length=length,
        done=state.done | failed | stop | full,
        stopped=state.stopped | stop,
        failed_at=jnp.where(failed, state.count, state.failed_at),
        seen=state.seen.at[prompt, response, token].set(True),
    )
    return state, token
