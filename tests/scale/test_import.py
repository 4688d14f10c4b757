"""Weights at real size: what a process reads, what it holds, and that every mesh gets the same numbers."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.sizes import SIZES, published
from evisrag_jax.models.qwen25vl.weights import (
    check_folder,
    load_params,
    read_params,
    save_params,
    write_folder,
)
from evisrag_jax.runtime.mesh import make_mesh, shardings
from evisrag_jax.training.state import flatten
from tests.rl import tiny

ROOT = Path(__file__).parents[2]
_tool = importlib.util.spec_from_file_location("make_checkpoint", ROOT / "tools/make_checkpoint.py")
make_checkpoint = importlib.util.module_from_spec(_tool)
_tool.loader.exec_module(make_checkpoint)
PEAK = """
import resource, sys
import jax, jax.numpy as jnp
from evisrag_jax.models.qwen25vl.weights import load_params
jax.block_until_ready(jnp.zeros(1))
if len(sys.argv) > 1:
    params, _ = load_params(sys.argv[1], jnp.bfloat16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny float32 model in three files."""
    config = tiny.tiny_config()
    folder = tmp_path_factory.mktemp("model")
    params = tiny.draw_params(config)
    save_params(params, config, folder, dtype=np.float32, max_shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def places(config, mesh):
    return shardings(model.logical_axes(config), model.param_shapes(config), mesh)


@pytest.mark.parametrize("devices", [(1, 8, 1), (1, 4, 2), (2, 2, 2)])
def test_every_mesh_gets_the_same_numbers(folder, devices):
    whole, config = load_params(folder)
    split = places(config, make_mesh(*devices))
    got, _ = load_params(folder, jnp.float32, split)
    for path, leaf in flatten(got).items():
        assert leaf.sharding == flatten(split)[path]
        np.testing.assert_array_equal(leaf, flatten(whole)[path])
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, flatten(whole)[path][shard.index])


def test_a_process_reads_only_what_its_devices_hold(folder, monkeypatch):
    """Four of eight devices, as if the others were another process's: bytes read are those of the distinct
    shards on the four, each once."""
    config, shards = check_folder(folder)
    split = places(config, make_mesh(1, 4, 2))
    mine = set(jax.devices()[:4])
    original = jax.sharding.NamedSharding.addressable_devices_indices_map
    wanted = 0
    for shape, place in zip(
        jax.tree.leaves(model.param_shapes(config)), jax.tree.leaves(split), strict=True
    ):
        found = {}
        for device, index in original(place, shape.shape).items():
            if device in mine:
                bounds = [s.indices(n)[:2] for s, n in zip(index, shape.shape, strict=True)]
                found[tuple(bounds)] = np.prod([b - a for a, b in bounds], initial=1)
        wanted += 4 * int(sum(found.values()))

    monkeypatch.setattr(
        jax.sharding.NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: {d: i for d, i in original(self, shape).items() if d in mine},
    )
    # Half an array is none: any will do for the caller.
    monkeypatch.setattr(
        jax, "make_array_from_single_device_arrays", lambda shape, place, parts: parts[0]
    )
    read_params(shards, config, jnp.float32, split)
    # The patch embedding's file has both frames of a patch, as the parameter has.
    assert shards.bytes_read == wanted < 0.7 * shards.nbytes


def peak(*args) -> int:
    """ru_maxrss of a process, bytes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", PEAK, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout)


@pytest.mark.slow
def test_the_import_holds_the_weights_once(tmp_path):
    """400 MB of weights in tensors of at most 8 MB: the peak, beside what Python takes by itself, is at most
    1.15 x weights + 1/32 GiB (at full size the bound is 1.15 x + 1 GiB, Python included)."""
    config = tiny.tiny_config()
    sizes = {"width": 1024, "mlp": 4096, "layers": 12, "heads": 16, "head_dim": 64}
    text = dataclasses.replace(config.text, mrope_section=(8, 12, 12), **sizes)
    vision = dataclasses.replace(config.vision, out_width=1024)
    config = dataclasses.replace(config, text=text, vision=vision)
    bf16 = np.dtype(ml_dtypes.bfloat16)
    write_folder(make_checkpoint.Drawn(config, bf16, 0), config, tmp_path, None, bf16, 2**28)
    weights = check_folder(tmp_path)[1].nbytes
    assert weights > 3.5e8
    assert peak(tmp_path) - peak() <= 1.15 * weights + 2**25


def test_published_sizes_have_the_published_parameters():
    """Billions of parameters of the hub's index files (total_size / 2): 3.75, 8.29, 33.45, 73.41."""
    counts = {}
    for size in SIZES:
        leaves = jax.tree.leaves(model.param_shapes(published(size)))
        counts[size] = round(sum(int(np.prod(leaf.shape)) for leaf in leaves) / 1e9, 2)
    assert counts == {"3b": 3.75, "7b": 8.29, "32b": 33.45, "72b": 73.41}
    with pytest.raises(ValueError, match="size '5b': one of 3b, 7b, 32b, 72b"):
        published("5b")
