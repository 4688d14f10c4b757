"""The table of shardings: every parameter, bytes a device, reasons; adapters and cut stacks too."""

import jax
import jax.numpy as jnp

from evisrag_jax.models.lora import LoraConfig, add_adapters
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.optimiser import OptimConfig, for_adapters, make_optimiser
from evisrag_jax.training.state import init_state, state_shardings
from evisrag_jax.training.table import sharding_table
from tests.rl.tiny import tiny_config

CONFIG = tiny_config()  # width 32, two layers, four heads, two of keys and values


def table(sizes, last_layers=0, rank=0):
    optim, lora = OptimConfig(last_layers=last_layers), LoraConfig(rank=rank)
    mesh = make_mesh(*sizes, devices=jax.devices()[: sizes[0] * sizes[1] * sizes[2]])
    params = model.param_shapes(CONFIG)
    if lora.rank:
        params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), params)
        params = add_adapters(params, CONFIG, lora, mesh, seed=0)
    optim = for_adapters(optim, lora)
    state = jax.eval_shape(lambda tree: init_state(tree, optim, make_optimiser(optim)), params)
    text = sharding_table(CONFIG, mesh, state, state_shardings(CONFIG, mesh, state))
    return {line.split()[0]: line for line in text.splitlines() if line.split()}, text


def test_bytes_reasons_and_totals():
    """q's kernel, float32[2, 32, 4, 8]: a quarter over fsdp, a half over tensor; keys and values of two
    heads stay whole over four tensor devices, and the table says why."""
    rows, text = table((1, 4, 2))
    assert text.startswith("mesh data=1 x fsdp=4 x tensor=2, 1 process(es)")
    assert "-, fsdp, tensor" in rows["text/layers/q/kernel"]
    assert f"{2 * 32 * 32 * 4 // 8 / 1024:.1f} KiB" in rows["text/layers/q/kernel"]
    rows, text = table((1, 2, 4))
    assert "kv_heads: 2 does not divide by tensor=4" in rows["text/layers/k/kernel"]
    assert "frozen" in rows and "vision/blocks/qkv/kernel" in rows
    assert "optimiser state:" in text


def test_adapters_and_cut_stacks_have_rows_of_their_own():
    rows, _ = table((1, 2, 2), rank=2)
    assert "2x32x2" in rows["text/layers/q/lora_a"] and "text/layers/q/kernel" in rows
    _, text = table((1, 1, 1), last_layers=1)
    lines = [line for line in text.splitlines() if line.startswith("text/layers/q/kernel")]
    assert len(lines) == 2 and all("1x32x4x8" in line for line in lines)
