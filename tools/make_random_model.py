"""Makes a small Qwen2.5-VL with random weights around a real tokenizer, to try the plumbing.

    python tools/make_qwen_tokenizer.py tok && python tools/make_random_model.py --tokenizer tok --out model

The architecture, vocabulary, processor settings and file format are those of the published 3B model;
only widths and depths are small. Its answers are noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig
from evisrag_jax.models.qwen25vl.model import init_params
from evisrag_jax.models.qwen25vl.weights import save_params

VOCABULARY = 151_936  # rows of the 3B model's embedding; the tokenizer has 151,665


def small_config() -> Qwen25VLConfig:
    """Four vision blocks (two with full attention) and four decoder layers, 64 wide."""
    vision = VisionConfig(
        depth=4, width=64, mlp=128, heads=2, out_width=64, full_attention=(1, 3), window=112
    )
    text = TextConfig(
        vocab=VOCABULARY,
        width=64,
        mlp=128,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=16,
        theta=1e6,
        mrope_section=(2, 3, 3),
        tied=True,
        max_positions=128_000,
    )
    return Qwen25VLConfig(text, vision)


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = small_config()
    save_params(init_params(config, jax.random.key(args.seed)), config, args.out)
    for path in args.tokenizer.iterdir():
        if path.name != "config.json" and path.is_file():
            (args.out / path.name).write_bytes(path.read_bytes())
    print(args.out)


if __name__ == "__main__":
    main()
