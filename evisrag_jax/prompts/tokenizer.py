"""The Qwen2.5 tokenizer: exact loading, encoding without injected tokens, decoding with offsets.

Two rules are kept everywhere. Text that comes from a user never yields an added token, whatever it
spells; and the ids that a model sampled are never replaced by a re-tokenisation of their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from evisrag_jax.prompts.detokenize import join_bytes, join_decoded, token_bytes

QWEN_BASE_ENTRIES = 151_643
"""Byte-pair entries that Qwen generations share; a vocabulary this large must be Qwen2.5's."""

QWEN25_ENTRIES = 151_665
QWEN25_THINK = [13708, 766, 29]
QWEN25_IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens that lay out a prompt; the field `name` is the id of ``<|name|>``."""

    im_start: int
    im_end: int
    endoftext: int
    vision_start: int
    vision_end: int
    vision_pad: int
    image_pad: int
    video_pad: int

    @classmethod
    def from_tokenizer(cls, tok: PreTrainedTokenizerFast) -> SpecialIds:
        """Read the ids from a tokenizer; ValueError names the tokens that it lacks."""
        ids = {f.name: tok.backend_tokenizer.token_to_id(f"<|{f.name}|>") for f in fields(cls)}
        missing = [f"<|{name}|>" for name, index in ids.items() if index is None]
        if missing:
            raise ValueError(f"tokenizer {tok.name_or_path!r} lacks {', '.join(missing)}")
        return cls(**ids)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load ``tokenizer.json`` of a model folder exactly as the file says, from local files only.

    The plain fast class is used on purpose: the class that AutoTokenizer picks for Qwen2 rebuilds
    the pre-tokeniser from its own defaults. A chat layout in ``chat_template.jinja`` or
    ``chat_template.json`` goes before the one in ``tokenizer_config.json``, as in the HF processor.

    Raises FileNotFoundError if the folder has no tokenizer.json, and ValueError if the vocabulary
    is of another Qwen generation (known failure B91), lacks a layout token, or has no chat layout.
    """
    folder = Path(folder)
    source = folder / "tokenizer.json"
    if not source.is_file():
        raise FileNotFoundError(
            f"{source}: no such file; give the folder of a downloaded or exported checkpoint"
        )
    tok = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    tok.backend_tokenizer.no_truncation()
    tok.backend_tokenizer.no_padding()
    legacy = folder / "chat_template.json"
    if legacy.is_file() and not (folder / "chat_template.jinja").is_file():
        tok.chat_template = json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    check_generation(tok, source)
    SpecialIds.from_tokenizer(tok)
    if not tok.chat_template:
        raise ValueError(f"{folder}: no chat template in tokenizer_config.json or chat_template.*")
    return tok


def check_generation(tok: PreTrainedTokenizerFast, source: str | Path = "tokenizer") -> None:
    """Refuse a Qwen vocabulary that is not Qwen2.5's; smaller vocabularies of another kind pass.

    The later generations encode ordinary text alike but hold ``<think>`` as one added token, a row
    that Qwen2.5 weights were never trained on (known failure B91). ValueError states both numbers.
    """
    backend = tok.backend_tokenizer
    entries = backend.get_vocab_size(with_added_tokens=True)
    if entries < QWEN_BASE_ENTRIES:
        return
    faults = []
    if entries != QWEN25_ENTRIES:
        faults.append(f"it has {entries:,} entries, Qwen2.5 has {QWEN25_ENTRIES:,}")
    think = backend.encode("<think>", add_special_tokens=False).ids
    if think != QWEN25_THINK:
        faults.append(f"<think> encodes to {think}, in Qwen2.5 to {QWEN25_THINK}")
    for token, expected in QWEN25_IDS.items():
        found = backend.token_to_id(token)
        if found != expected:
            faults.append(f"{token} is {found}, in Qwen2.5 {expected}")
    if faults:
        raise ValueError(
            f"{source}: not the tokenizer of Qwen2.5: {'; '.join(faults)}. "
            "Use the tokenizer files that came with the Qwen2.5-VL checkpoint."
        )


def added_tokens(tok: PreTrainedTokenizerFast) -> dict[str, tuple[int, bool]]:
    """Added tokens as text → (id, special); special ones are left out of decoded text."""
    table = tok.backend_tokenizer.get_added_tokens_decoder()
    return {token.content: (index, token.special) for index, token in table.items()}


def split_at_tokens(text: str, contents: Sequence[str]) -> list[tuple[str, bool]]:
    """Cut `text` at the given token strings: the pieces, each with True where it is a token."""
    if not contents:
        return [(text, False)] if text else []
    pattern = "|".join(re.escape(c) for c in sorted(contents, key=len, reverse=True))
    pieces = re.split(f"({pattern})", text)
    return [(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def encode_plain(tok: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode text from outside: a special or added token's spelling is encoded letter by letter.

    No id of an added token comes out (known failure B14), but for added tokens that are white space
    only, which are no markup. Where no such string occurs, the ids are those of the ordinary
    encoder. A word-level vocabulary that knows the spelling only as a token gives its unknown
    token, and ValueError names the string if it has none.
    """
    table = added_tokens(tok)
    blank = [content for content in table if not content.strip()]
    markup = {content: index for content, (index, _) in table.items() if content.strip()}
    ids = []
    for piece, is_token in split_at_tokens(text, blank):
        ids.extend([table[piece][0]] if is_token else _spell(tok.backend_tokenizer, piece, markup))
    return ids


def _spell(backend: Tokenizer, text: str, markup: dict[str, int]) -> list[int]:
    """Ids of `text` by the encoder if it holds no markup, else by the stages below its matcher."""
    normalised = backend.normalizer.normalize_str(text) if backend.normalizer else text
    if not any(content in text or content in normalised for content in markup):
        return backend.encode(text, add_special_tokens=False).ids
    pieces = [normalised]
    if backend.pre_tokenizer:
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normalised)]
    refused = set(markup.values())
    unknown = getattr(backend.model, "unk_token", None)
    ids = []
    for piece in pieces:
        for token in backend.model.tokenize(piece):
            if token.id not in refused or token.value == unknown:
                ids.append(token.id)
            elif unknown is not None:
                ids.append(backend.token_to_id(unknown))
            else:
                raise ValueError(f"the vocabulary has no plain spelling of {token.value!r}")
    return ids


def encode_response(tok: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode a target response: added tokens that decoding shows are kept, others spelled out.

    In Qwen2.5 the section tags are ordinary text, so this is `encode_plain` for them; a small
    vocabulary may hold each tag as one non-special added token, which a target must contain.
    """
    table = added_tokens(tok)
    shown = [content for content, (_, special) in table.items() if not special]
    ids = []
    for piece, is_token in split_at_tokens(text, shown):
        ids.extend([table[piece][0]] if is_token else encode_plain(tok, piece))
    return ids


def decode_with_offsets(
    tok: PreTrainedTokenizerFast,
    ids: Sequence[int] | np.ndarray,
    special: Literal["skip", "keep"] = "skip",
) -> tuple[str, Int32[np.ndarray, "T 2"]]:
    """Decode sampled ids to text, with the characters [start, end) of each token in it.

    The text equals the tokenizer's own decoding. A token covers every character that it holds a
    byte of, so the tokens of a split character share it. Special tokens (left out unless `special`
    is "keep") and ids beyond the vocabulary get an empty span where they stand. The ids are never
    encoded anew: offsets follow from them alone (known failures B38, B43).
    """
    if special not in ("skip", "keep"):
        raise ValueError(f"special={special!r}: expected 'skip' or 'keep'")
    ids = [int(i) for i in ids]
    backend = tok.backend_tokenizer
    hidden = set()
    if special == "skip":
        hidden = {index for index, is_special in added_tokens(tok).values() if is_special}
    if isinstance(backend.decoder, decoders.ByteLevel):
        pieces = [b"" if i in hidden else token_bytes(backend.id_to_token(i)) for i in ids]
        return join_bytes(pieces)
    return join_decoded(backend, ids, hidden)


def stop_ids(folder: str | Path, tok: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Ids that end a response, in order: generation_config.json, config.json, then the tokenizer.

    All sources are joined, without repeats: one file alone often names only one of the two that
    Qwen2.5 ends with, and a response would then run on (known failure B40). From the tokenizer come
    its end-of-sequence token, ``<|im_end|>`` (ends a turn) and ``<|endoftext|>`` (ends a document).
    ValueError names a file whose ``eos_token_id`` is no id of the vocabulary.
    """
    entries = tok.backend_tokenizer.get_vocab_size(with_added_tokens=True)
    special = SpecialIds.from_tokenizer(tok)
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        for part in (content, content.get("text_config") or {}):
            value = part.get("eos_token_id")
            for index in value if isinstance(value, list) else [value]:
                if index is None:
                    continue
                if not isinstance(index, int) or not 0 <= index < entries:
                    raise ValueError(
                        f"{path}: eos_token_id {index!r}, expected an id below {entries}"
                    )
                found.append(index)
    if tok.eos_token_id is not None:
        found.append(tok.eos_token_id)
    found.extend([special.im_end, special.endoftext])
    return tuple(dict.fromkeys(found))
