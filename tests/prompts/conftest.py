"""Tokenizers for the prompt tests: Qwen2.5's own, and a word-level one with tags as tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.qwen_vocab import load_tool, qwen_tokenizer_folder  # noqa: F401

LAYOUT = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TAGS = [f"<{slash}{t}>" for t in ("observe", "evidence", "think", "answer") for slash in ("", "/")]
WORDS = "system user assistant You are a helpful what is the price of Tea ? . [1]: [2]: 42 17 no"


@pytest.fixture(scope="session")
def qwen(qwen_tokenizer_folder):  # noqa: F811
    """The Qwen2.5 tokenizer, loaded by the package."""
    from evisrag_jax.prompts.tokenizer import load_tokenizer

    return load_tokenizer(qwen_tokenizer_folder)


@pytest.fixture(scope="session")
def mini_folder(tmp_path_factory) -> Path:
    """A word-level tokenizer folder: layout tokens special; tags and newline added, not special."""
    words = ["<unk>", " ", "\n", *WORDS.split()]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|[^\s?.]+|[?.]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in LAYOUT])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*TAGS, "\n")])
    tok = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=load_tool().CHAT_TEMPLATE,
    )
    folder = tmp_path_factory.mktemp("mini-tokenizer")
    tok.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mini(mini_folder):
    """The small word-level tokenizer, loaded by the package."""
    from evisrag_jax.prompts.tokenizer import load_tokenizer

    return load_tokenizer(mini_folder)
