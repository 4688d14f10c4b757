"""The device programs of a rollout: prompts into residence, responses into slots, tokens out.

    images ─encode─► features ─┐
    prompt ────────────────────┴─prefill─► Pool ─admit─► Slots ─decode─► … ─fetch on the host

A Pool holds R prompts, computed once each. Slots hold S responses, each of any resident prompt and at
its own length, so a finished one makes room for the next without waiting for the others. After t tokens
of one response:

    suffix place  0    1   …  t-1   t  …
    tokens        a0   a1  …  a(t-1)
    suffix KV     a0   a1  …  a(t-1)      a(i) was fed at position next_position + i
    hidden                    of a(t-1); token t is drawn from it

All arrays begin with Z, the shards of the mesh's batch axes (1 on one device): a slot reads rows of its
own shard only, so nothing crosses devices. Shapes depend on the bucket, the group size and the number of
slots; every program compiles once for them.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from evisrag_jax.models.decode_attention import Seats
from evisrag_jax.rollout.sampling import Controls, sample, token_uniforms
from evisrag_jax.runtime.mesh import BATCH_AXES, traced_on


class Pool(NamedTuple):
    """Resident prompts: what their responses share."""

    kv: Any  # the model's cache of the prompts, heads first
    hidden: Float[Array, "Z R D"]  # of each prompt's last token
    lengths: Int[Array, "Z R"]
    next_position: Int[Array, "Z R"]
    seen: Bool[Array, "Z R V"]


class Entry(NamedTuple):
    """What a response brings into its slot."""

    row: Int[Array, "Z S"]  # of its prompt
    key: UInt32[Array, "Z S 2"]  # key data, see runtime.prng.sample_keys
    controls: Controls  # [Z, S]
    max_tokens: Int[Array, "Z S"]


class Slots(NamedTuple):
    """Responses at work. Tokens beyond a response's length are padding, their logp 0; a slot that is
    done keeps its result until another response enters."""

    entry: Entry
    tokens: Int[Array, "Z S T"]
    logp: Float[Array, "Z S T"]  # log softmax(logits / T), see sampling
    length: Int[Array, "Z S"]  # the end token counts
    hidden: Float[Array, "Z S D"]  # from which the next token is drawn
    done: Bool[Array, "Z S"]
    stopped: Bool[Array, "Z S"]  # ended by a stop id
    failed_at: Int[Array, "Z S"]  # index of the token whose logits were not finite, -1 if none
    seen: Bool[Array, "Z S V"]
    suffix: Any  # the model's cache of the responses


class Results(NamedTuple):
    """The part of Slots that the host reads."""

    tokens: Int[Array, "Z S T"]
    logp: Float[Array, "Z S T"]
    length: Int[Array, "Z S"]
    done: Bool[Array, "Z S"]
    stopped: Bool[Array, "Z S"]
    failed_at: Int[Array, "Z S"]


class Ends(NamedTuple):
    """Constants of an engine: ids that end a response, ids never drawn, the id that fills."""

    stop_ids: Int[Array, " E"]
    banned: Bool[Array, " V"]
    pad: Int[Array, ""]


@partial(jax.jit, static_argnames=("model", "config", "fuse"))
def prepare(model: Hashable, config: Hashable, params: Any, *, fuse: bool) -> Any:
    """The decoder's weights in decoding layout: once a call of the engine, outside the loop."""
    return model.decode_params(params, config, fuse=fuse)


@partial(jax.jit, static_argnames=("model", "config", "mesh"))
def encode(
    model: Hashable, config: Hashable, params: Any, images: Any, mesh: Mesh | None = None
) -> Float[Array, "P IM D"]:
    """Features of a batch of pages (`pages.patches.ImageArrays`), a prompt's images side by side."""
    return _split(traced_on(mesh, model.encode_images)(params, config, images), mesh)


@partial(
    jax.jit,
    static_argnames=("model", "config", "rows", "length", "vocab", "dtype", "shards", "mesh"),
)
def empty_pool(
    model: Hashable,
    config: Hashable,
    *,
    shards: int,
    rows: int,
    length: int,
    vocab: int,
    dtype: Any,
    mesh: Mesh | None = None,
) -> Pool:
    """Room for `rows` prompts of `length` tokens a shard."""
    kv = model.empty_kv(config, shards * rows, length, dtype)
    pool = Pool(
        kv=jax.tree.map(lambda a: a.reshape(shards, rows, *a.shape[1:]), kv),
        hidden=jnp.zeros((shards, rows, config.text.width), dtype),
        lengths=jnp.ones((shards, rows), jnp.int32),
        next_position=jnp.ones((shards, rows), jnp.int32),
        seen=jnp.zeros((shards, rows, vocab), bool),
    )
    return _split(pool, mesh)


@partial(jax.jit, static_argnames=("model", "config", "mesh"), donate_argnames=("pool",))
def prefill(
    model: Hashable,
    config: Hashable,
    params: Any,
    prompt: Any,
    features: Float[Array, "P IM D"] | None,
    pool: Pool,
    rows: Int[Array, "Z B"],
    mesh: Mesh | None = None,
) -> Pool:
    """Runs B prompts a shard once and files them in `rows` of the pool, which is donated.

    `prompt` is the model's PromptInputs of P = Z·B prompts, right-padded to L. A row beyond the pool
    drops its prompt (padding of the batch).
    """
    hidden, kv = traced_on(mesh, model.prefill)(params, config, prompt, features)
    P, length = prompt.tokens.shape
    vocab = pool.seen.shape[-1]
    real = jnp.arange(length)[None] < prompt.lengths[:, None]
    tokens = jnp.where(real, prompt.tokens, vocab)  # out of range: dropped
    seen = jnp.zeros((P, vocab), bool)
    seen = seen.at[jnp.arange(P)[:, None], tokens].set(True, mode="drop")
    new = Pool(
        kv=model.resident_kv(kv),
        hidden=model.last_hidden(hidden, prompt.lengths),
        lengths=prompt.lengths,
        next_position=prompt.next_position,
        seen=seen,
    )

    def file(whole: Array, part: Array) -> Array:
        part = part.reshape(*rows.shape, *part.shape[1:]).astype(whole.dtype)
        return jax.vmap(lambda w, r, p: w.at[r].set(p, mode="drop"))(whole, rows, part)

    return _split(jax.tree.map(file, pool, new), mesh)


@partial(jax.jit, static_argnames=("model", "config", "slots", "response", "mesh"))
def empty_slots(
    model: Hashable,
    config: Hashable,
    pool: Pool,
    *,
    slots: int,
    response: int,
    mesh: Mesh | None = None,
) -> Slots:
    """Slots for responses of at most `response` tokens, all done."""
    shards = pool.lengths.shape[0]
    grid = (shards, slots)
    dtype = jax.tree.leaves(pool.kv)[0].dtype
    suffix = model.empty_kv(config, shards * slots, response, dtype)
    zeros = jnp.zeros(grid, jnp.int32)
    state = Slots(
        entry=Entry(
            row=zeros,
            key=jnp.zeros((*grid, 2), jnp.uint32),
            controls=Controls(jnp.zeros(grid), jnp.ones(grid), zeros, jnp.ones(grid, jnp.float32)),
            max_tokens=zeros,
        ),
        tokens=jnp.zeros((*grid, response), jnp.int32),
        logp=jnp.zeros((*grid, response), jnp.float32),
        length=zeros,
        hidden=jnp.zeros((*grid, pool.hidden.shape[-1]), dtype),
        done=jnp.ones(grid, bool),
        stopped=jnp.zeros(grid, bool),
        failed_at=jnp.full(grid, -1, jnp.int32),
        seen=jnp.zeros((*grid, pool.seen.shape[-1]), bool),
        suffix=jax.tree.map(lambda a: a.reshape(*grid, *a.shape[1:]), suffix),
    )
    return _split(state, mesh)


@partial(jax.jit, static_argnames=("mesh",), donate_argnames=("slots",))
def admit(
    pool: Pool,
    slots: Slots,
    fresh: Bool[Array, "Z S"],
    entry: Entry,
    pad: Int[Array, ""],
    mesh: Mesh | None = None,
) -> Slots:
    """Responses enter the `fresh` slots; the others go on. Old suffix keys need no clearing: a place is
    written before it is read."""

    def mix(new: Array, old: Array) -> Array:
        return jnp.where(fresh.reshape(*fresh.shape, *[1] * (old.ndim - 2)), new, old)

    def of_row(a: Array) -> Array:
        return jnp.take_along_axis(a, entry.row[..., None], axis=1)

    fresh_state = slots._replace(
        entry=entry,
        tokens=jnp.broadcast_to(pad, slots.tokens.shape),
        logp=jnp.zeros_like(slots.logp),
        length=jnp.zeros_like(slots.length),
        hidden=of_row(pool.hidden),
        done=jnp.zeros_like(slots.done),
        stopped=jnp.zeros_like(slots.stopped),
        failed_at=jnp.full_like(slots.failed_at, -1),
        seen=of_row(pool.seen),
        suffix=None,
    )
    mixed = jax.tree.map(mix, fresh_state, slots._replace(suffix=None))
    return _split(mixed._replace(suffix=slots.suffix), mesh)


@partial(jax.jit, static_argnames=("mesh",))
def shrink(slots: Slots, index: Int[Array, "Z s"], mesh: Mesh | None = None) -> Slots:
    """The slots of `index`, in its order."""
    return _split(jax.tree.map(lambda a: jax.vmap(lambda b, i: b[i])(a, index), slots), mesh)


@partial(jax.jit, static_argnames=("model", "config"), donate_argnames=("slots",))
def decode(
    model: Hashable,
    config: Hashable,
    params: Any,
    pool: Pool,
    seats: Seats,
    ends: Ends,
    slots: Slots,
    until: Int[Array, ""],
) -> Slots:
    """Draws tokens until `until` slots are done. `slots` is donated: its caches are updated in place.

    params: what `prepare` gave.  seats: [Z, R, W], [Z, S], [Z, S].
    """
    logits_of = jax.vmap(model.decode_logits, in_axes=(None, 0))
    feed = jax.vmap(
        lambda *args: model.decode_step(params, config, *args), in_axes=(0,) * 7, out_axes=0
    )

    def step(slots: Slots) -> Slots:
        index = slots.length
        slots, token = _draw(slots, logits_of(params, slots.hidden), ends)
        position = jnp.take_along_axis(pool.next_position, slots.entry.row, axis=1) + index
        hidden, suffix = feed(token, position, index, seats, pool.lengths, pool.kv, slots.suffix)
        return slots._replace(hidden=hidden, suffix=suffix)

    return jax.lax.while_loop(lambda slots: jnp.sum(slots.done) < until, step, slots)


@jax.jit
def results(slots: Slots) -> Results:
    """What the host reads, apart from the donated state."""
    return Results(*(getattr(slots, name) for name in Results._fields))


def _split(tree: Any, mesh: Mesh | None) -> Any:
    """Keeps the first axis of every array over the mesh's batch axes; other axes are the compiler's."""
    if mesh is None:
        return tree

    def constrain(a: Array) -> Array:
        spec = PartitionSpec(BATCH_AXES, *[PartitionSpec.UNCONSTRAINED] * (a.ndim - 1))
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))

    return jax.tree.map(constrain, tree)


def _draw(
    slots: Slots, logits: Float[Array, "Z S V"], ends: Ends
) -> tuple[Slots, Int[Array, "Z S"]]:
    """Draws the next token of every live response and files it; the tokens to feed next."""
    entry, index = slots.entry, slots.length
    keys = jax.random.wrap_key_data(entry.key, impl="threefry2x32")
    uniform = token_uniforms(keys, index)
    draw = sample(logits, uniform, slots.seen, ends.banned, entry.controls)

    live = ~slots.done
    failed = live & draw.failed
    drawn = live & ~draw.failed
    token = jnp.where(drawn, draw.token, ends.pad)
    length = slots.length + drawn
    stop = drawn & jnp.any(token[..., None] == ends.stop_ids, -1)
    z, s = jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij")
    here = jnp.where(drawn, index, slots.tokens.shape[-1])  # out of range: dropped
    slots = slots._replace(
        tokens=slots.tokens.at[z, s, here].set(token, mode="drop"),
        logp=slots.logp.at[z, s, here].set(draw.logp, mode="drop"),
        length=length,
        done=slots.done | failed | stop | (length >= entry.max_tokens),
        stopped=slots.stopped | stop,
        failed_at=jnp.where(failed, index, slots.failed_at),
        seen=slots.seen.at[z, s, token].set(True),
    )
    return slots, token
