#!/usr/bin/env python
"""Makes a Qwen2.5-VL checkpoint with random weights: of a published size, to try memory and time at the true
shapes, or a small one around a real tokenizer, to try the plumbing. Its answers are noise.

    python tools/make_checkpoint.py --size 3b --out model-3b            7.5 GB of bfloat16, in half a minute
    python tools/make_qwen_tokenizer.py tok && python tools/make_checkpoint.py --size small --tokenizer tok --out model

Architecture, vocabulary and file format are those of the published files. A file's tensors are in memory at a
time (--shard-gib).
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.model import param_shapes
from evisrag_jax.models.qwen25vl.sizes import SIZES, published
from evisrag_jax.models.qwen25vl.tensors import Entry, entries
from evisrag_jax.models.qwen25vl.weights import tensor_shape, write_folder

BLOCK = 2**22 + 3  # random numbers that are made; tensors repeat them from places of their own
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


def small() -> Qwen25VLConfig:
    """The 3B model's vocabulary and settings with four blocks in each tower, 64 wide."""
    whole = published("3b")
    vision = dataclasses.replace(
        whole.vision, depth=4, width=64, mlp=128, heads=2, out_width=64, full_attention=(1, 3)
    )
    sizes = {"width": 64, "mlp": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16}
    text = dataclasses.replace(whole.text, mrope_section=(2, 3, 3), **sizes)
    return dataclasses.replace(whole, text=text, vision=vision)


class Drawn:
    """Random tensors by name: norms are 1, everything else is Gaussian with a standard deviation of 0.02."""

    def __init__(self, config: Qwen25VLConfig, dtype: np.dtype, seed: int):
        self.shapes = param_shapes(config)
        rng = np.random.default_rng(seed)
        self.block = (0.02 * rng.standard_normal(BLOCK, np.float32)).astype(dtype)

    def __call__(self, entry: Entry) -> np.ndarray:
        """The tensor as the files hold it."""
        ours = tensor_shape(self.shapes, entry)
        shape = entry.save(np.broadcast_to(np.zeros((), np.int8), ours)).shape
        if entry.path[-1] == "scale":
            return np.ones(shape, self.block.dtype)
        block = np.roll(self.block, zlib.crc32(entry.name.encode()) % BLOCK)
        return np.resize(block, shape)


def main() -> int:
    """Writes the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("small", *SIZES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder whose files are put beside the weights"
    )
    parser.add_argument("--shard-gib", type=float, default=1.0, help="GiB a file (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = small() if args.size == "small" else published(args.size)
    dtype, shapes = DTYPES[args.dtype], param_shapes(config)
    needed = sum(np.prod(tensor_shape(shapes, e)) * dtype.itemsize for e in entries(config))
    args.out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.out).free
    if free < needed:
        print(
            f"{args.out}: needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB",
            file=sys.stderr,
        )
        return 1
    drawn = Drawn(config, dtype, args.seed)
    write_folder(drawn, config, args.out, None, dtype, int(args.shard_gib * 2**30))
    for path in args.tokenizer.iterdir() if args.tokenizer else ():
        if path.name != "config.json" and path.is_file():
            (args.out / path.name).write_bytes(path.read_bytes())
    print(f"{args.out}: {needed / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
