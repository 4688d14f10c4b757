"""Device random keys: a token's key folds (seed, step, prompt id, sample index, token index).

A token's randomness depends on what it is, never on where it is computed: not on its place in a
batch, its slot, the number of devices or a restart. Host code that must not import jax takes
``philox`` from :mod:`evisrag_jax.runtime.host_random`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt32

from evisrag_jax.runtime.host_random import check_seed, philox, text_hash

__all__ = ["fold_tokens", "philox", "root_key", "sample_keys", "text_hash", "token_key"]

# The default since jax 0.5: values drawn do not depend on how the array is sharded.
if not getattr(jax.config, "jax_threefry_partitionable", True):
    jax.config.update("jax_threefry_partitionable", True)


def _counters(name: str, *values: int) -> np.ndarray:
    for value in values:
        if not 0 <= value < 2**32:
            raise ValueError(f"{name} {value} is out of range [0, 2**32)")
    return np.array(values, np.uint32)


@jax.jit
def _make_root(seed: UInt32[Array, ""]) -> Key[Array, ""]:
    return jax.random.key(seed, impl="threefry2x32")


@jax.jit
def _fold_sample(
    seed: UInt32[Array, ""],
    step: UInt32[Array, ""],
    prompt: UInt32[Array, ""],
    sample: UInt32[Array, ""],
) -> Key[Array, ""]:
    key = _make_root(seed)
    for number in (step, prompt, sample):
        key = jax.random.fold_in(key, number)
    return key


@jax.jit
def _fold_grid(
    seed: UInt32[Array, ""],
    step: UInt32[Array, ""],
    prompts: UInt32[Array, " P"],
    samples: UInt32[Array, " G"],
) -> Key[Array, "P G"]:
    over_samples = jax.vmap(_fold_sample, in_axes=(None, None, None, 0))
    return jax.vmap(over_samples, in_axes=(None, None, 0, None))(seed, step, prompts, samples)


def root_key(seed: int) -> Key[Array, ""]:
    """The run's root key (threefry). ValueError unless 0 <= seed < 2**32."""
    return _make_root(jax.device_put(np.uint32(check_seed(seed))))


def token_key(seed: int, step: int, prompt_id: str, sample: int) -> Key[Array, ""]:
    """The key of one response: step, CRC-32 of the prompt id and sample folded into the seed's key.

    The token index is folded on the device, by :func:`fold_tokens`. Works under a transfer guard.
    """
    numbers = (check_seed(seed), *_counters("step", step), text_hash(prompt_id))
    numbers += tuple(_counters("sample", sample))
    return _fold_sample(*jax.device_put([np.uint32(number) for number in numbers]))


def sample_keys(
    seed: int, step: int, prompt_ids: Sequence[str], group: int, *, first_sample: int = 0
) -> Key[Array, "P G"]:
    """Keys of the responses ``first_sample .. first_sample + group - 1`` of every prompt.

    Entry (p, g) equals ``token_key(seed, step, prompt_ids[p], first_sample + g)`` exactly.
    Works under a transfer guard.
    """
    if group < 1:
        raise ValueError(f"group {group} must be at least 1")
    prompts = np.array([text_hash(name) for name in prompt_ids], np.uint32)
    samples = _counters("sample", *range(first_sample, first_sample + group))
    numbers = (np.uint32(check_seed(seed)), _counters("step", step)[0], prompts, samples)
    return _fold_grid(*jax.device_put(numbers))


def fold_tokens(keys: Key[Array, "*B"], index: Int[Array, "*#B"] | int) -> Key[Array, "*B"]:
    """Fold a token index (one for all, or one a key) into keys of any shape; works under jit."""
    flat = keys.reshape(-1)
    index = jnp.broadcast_to(jnp.asarray(index, jnp.uint32), keys.shape).reshape(-1)
    return jax.vmap(jax.random.fold_in)(flat, index).reshape(keys.shape)
