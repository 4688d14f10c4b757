"""Remat policies: what they keep, and the names that are refused. Equal numbers: test_group."""

import functools

import jax
import jax.numpy as jnp
import pytest

from evisrag_jax.models.qwen25vl import text
from evisrag_jax.models.qwen25vl.config import TextConfig
from evisrag_jax.models.remat import POLICIES, check_remat

CONFIG = TextConfig(
    vocab=64, width=128, mlp=512, layers=8, heads=4, kv_heads=2, head_dim=32, theta=1e4,
    mrope_section=(4, 6, 6), tied=True,
)  # fmt: skip
L = 512


def memory(remat: str) -> int:
    """Bytes that the compiled gradient of a prompt's hidden states needs beside its arguments."""

    def loss(params, x):
        positions = jnp.broadcast_to(jnp.arange(L), (1, 3, L))
        hidden, _ = text.prefill(params, CONFIG, x, positions, jnp.array([L]), remat=remat)
        return jnp.square(hidden).sum()

    boxed = jax.eval_shape(functools.partial(text.init_text, CONFIG), jax.random.key(0))
    params = jax.tree.map(lambda box: box.value, boxed, is_leaf=lambda leaf: hasattr(leaf, "names"))
    x = jax.ShapeDtypeStruct((1, L, CONFIG.width), jnp.float32)
    return jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis().temp_size_in_bytes


def test_each_policy_keeps_less_than_the_one_above():
    """Attention's result is 8 layers × 512 × 128 floats = 2 MiB, products are ten times as much."""
    sizes = [memory(remat) for remat in POLICIES]
    assert list(POLICIES) == ["none", "dots", "attention", "full"]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    attention = CONFIG.layers * L * CONFIG.width * 4
    assert attention <= sizes[2] - sizes[3] <= 1.2 * attention
    assert sizes[0] > 3 * sizes[3]


@pytest.mark.parametrize("name", ["dot", "", "True"])
def test_other_names_are_refused_by_name(name):
    with pytest.raises(
        ValueError, match=f"remat={name!r}: choose one of none, dots, attention, full"
    ):
        check_remat(name)
