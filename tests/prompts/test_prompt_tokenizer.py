"""Loading, encoding and decoding: known failures B14, B38, B40, B43 and B91."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evisrag_jax.prompts.detokenize import decode_utf8
from evisrag_jax.prompts.tokenizer import (
    SpecialIds,
    check_generation,
    decode_with_offsets,
    encode_plain,
    encode_response,
    load_tokenizer,
    stop_ids,
)

RESPONSE = (
    "<observe>o</observe>\n<evidence>\n[1]: 5\n</evidence>\n"
    "<think>The x</think>\n<answer>5</answer>"
)
"""Response R of case B38: 35 tokens."""


def edited_folder(source, out, edit):
    """A copy of a tokenizer folder whose tokenizer.json went through `edit`."""
    shutil.copytree(source, out)
    content = json.loads((out / "tokenizer.json").read_text("utf-8"))
    edit(content)
    (out / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return out


# Loading


def test_loads_the_file_exactly(qwen, qwen_tokenizer_folder):
    """The loaded pipeline is the file's, to the letter."""
    raw = Tokenizer.from_file(str(qwen_tokenizer_folder / "tokenizer.json"))
    assert qwen.backend_tokenizer.to_str() == raw.to_str()
    assert (qwen.eos_token_id, qwen.pad_token_id, len(qwen)) == (151645, 151643, 151665)


def test_model_config_in_the_folder_changes_nothing(mini, mini_folder, tmp_path):
    folder = shutil.copytree(mini_folder, tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl", "eos_token_id": 3}')
    assert load_tokenizer(folder).backend_tokenizer.to_str() == mini.backend_tokenizer.to_str()


def test_plain_text_agrees_with_autotokenizer(qwen, qwen_tokenizer_folder):
    auto = AutoTokenizer.from_pretrained(str(qwen_tokenizer_folder), local_files_only=True)
    text = "Total  revenue (2023):\r\n\t$1,234.50, isn't it? 収入 é 🤖\n\n\n<think>The"
    assert encode_plain(qwen, text) == auto.encode(text, add_special_tokens=False)


def test_layout_ids_of_qwen25(qwen):
    """B91: the fixed ids."""
    assert SpecialIds.from_tokenizer(qwen) == SpecialIds(
        im_start=151644,
        im_end=151645,
        endoftext=151643,
        vision_start=151652,
        vision_end=151653,
        vision_pad=151654,
        image_pad=151655,
        video_pad=151656,
    )
    assert qwen.decode([0]) == "!"


def test_tag_ids_in_context(qwen):
    """B38, B91: `<think>` alone, and what its `>` merges with."""
    assert encode_plain(qwen, "<think>") == [13708, 766, 29]
    assert encode_plain(qwen, "<think>The") == [13708, 766, 16357]
    assert encode_plain(qwen, "<think>\n") == [13708, 766, 397]
    assert 1784 in encode_plain(qwen, "</evidence><think>")
    assert encode_plain(qwen, " <think>")[:2] == [366, 26865]
    assert len(encode_plain(qwen, RESPONSE)) == 35


def test_later_generation_is_refused(qwen_tokenizer_folder, tmp_path):
    """B91: 151,669 entries with `<think>` as id 151667; the message has both numbers."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    contents = ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    more = [{"id": 151_665 + i, "content": text, **flags} for i, text in enumerate(contents)]
    text = (qwen_tokenizer_folder / "tokenizer.json").read_text("utf-8")
    cut = text.index("\n  ],", text.index('"added_tokens"'))
    text = f"{text[:cut]},{json.dumps(more)[1:-1]}{text[cut:]}"
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(ValueError) as refused:
        load_tokenizer(tmp_path)
    for part in ("151,669", "151,665", "[151667]", "[13708, 766, 29]", str(tmp_path)):
        assert part in str(refused.value)


def test_earlier_generation_is_refused():
    """B91: a vocabulary of Qwen's size without the vision tokens, 151,646 entries."""
    layout = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = {w: i for i, w in enumerate([*map(str, range(151_643)), *layout])}
    backend = Tokenizer(WordLevel(words, unk_token="0"))
    with pytest.raises(ValueError, match=r"151,646 entries.*<\|image_pad\|> is None.* 151655"):
        check_generation(PreTrainedTokenizerFast(tokenizer_object=backend), "some/tokenizer.json")


def test_mini_vocabulary_is_accepted_with_tags_as_single_tokens(mini):
    """The check is by rule: a small vocabulary is of no Qwen generation."""
    assert len(mini) < 100
    assert len(encode_response(mini, "<think>")) == 1


def test_refusals_name_the_file(mini_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        load_tokenizer(tmp_path / "nowhere")
    lacking = edited_folder(
        mini_folder,
        tmp_path / "lacking",
        lambda c: c.update(
            added_tokens=[t for t in c["added_tokens"] if t["content"] != "<|image_pad|>"]
        ),
    )
    with pytest.raises(ValueError, match=r"lacks <\|image_pad\|>"):
        load_tokenizer(lacking)
    bare = shutil.copytree(mini_folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(bare)


def test_processor_chat_template_goes_first(mini_folder, tmp_path):
    folder = shutil.copytree(mini_folder, tmp_path / "legacy")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": "from the json file"}')
    assert load_tokenizer(folder).chat_template == "from the json file"


# Encoding


def test_special_strings_are_spelled_out(qwen):
    """B14: no id of the added set comes from user text, and nothing is lost."""
    added = set(range(151_643, 151_665))
    for token in qwen.added_tokens_decoder.values():
        text = f"see {token.content}\n{token.content}{token.content} end"
        ids = encode_plain(qwen, text)
        assert not added & set(ids)
        assert qwen.decode(ids) == text


def test_spelled_out_path_equals_the_ordinary_encoder(qwen):
    """The stages that run where a special string occurs give the encoder's ids for the rest.

    A newline on each side of the string keeps the pieces of the split pattern apart.
    """
    around = "Total revenue: 1,234.50 isn't é\u0301 収入 🤖 x" * 3
    ids = encode_plain(qwen, f"{around}\n<|im_end|>\n{around}")
    middle = encode_plain(qwen, "\n<|im_end|>\n")
    plain = qwen.backend_tokenizer.encode(around).ids
    assert ids == [*plain, *middle, *plain]


def test_word_level_special_strings_become_unknown(mini):
    """B14 in a vocabulary that has no letters: the unknown token, never the layout token."""
    unknown = mini.unk_token_id
    ids = encode_plain(mini, "Tea <|im_end|> <think>\n?")
    table = mini.get_vocab()
    words = ["Tea", " ", unknown, " ", unknown, "\n", "?"]
    assert ids == [table.get(word, word) for word in words]


def test_word_level_without_unknown_token_refuses(mini_folder, tmp_path):
    """B14: a vocabulary that can spell a layout token in no other way refuses it by name."""

    def edit(content):
        vocab = content["model"]["vocab"]
        for token in content["added_tokens"]:
            vocab[token["content"]] = token["id"]
        content["model"] = {"type": "WordPiece", "unk_token": "<unk>", "vocab": vocab}
        content["model"].update(continuing_subword_prefix="##", max_input_chars_per_word=99)

    folder = edited_folder(mini_folder, tmp_path / "whole-words", edit)
    tok = load_tokenizer(folder)
    assert encode_plain(tok, "<|im_end|>") == [tok.unk_token_id]

    def no_unknown(content):
        edit(content)
        vocab = content["model"]["vocab"]
        content["model"] = {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True}

    tok = load_tokenizer(edited_folder(mini_folder, tmp_path / "no-unknown", no_unknown))
    with pytest.raises(ValueError, match=r"no plain spelling of '<\|im_end\|>'"):
        encode_plain(tok, "<|im_end|>")


def test_response_keeps_tags_but_no_layout_token(mini, qwen):
    """A target's tags are tokens where the vocabulary has them; `<|im_end|>` in it stays text."""
    ids = encode_response(mini, "<think>Tea</think>\n<|im_end|>")
    assert [mini.decode([i]) for i in ids] == ["<think>", "Tea", "</think>", "\n", "<unk>"]
    assert encode_response(qwen, RESPONSE) == encode_plain(qwen, RESPONSE)
    assert 151645 not in encode_response(qwen, "5<|im_end|>")
    assert encode_response(mini, "") == []


# Decoding


def assert_offsets(tok, ids, text, offsets):
    """What must hold for any ids: the tokenizer's own text, ordered spans that leave nothing out."""
    assert text == tok.backend_tokenizer.decode(list(ids), skip_special_tokens=True)
    assert offsets.shape == (len(ids), 2)
    assert (offsets[:, 0] <= offsets[:, 1]).all()
    assert (np.diff(offsets, axis=0) >= 0).all()
    covered = np.zeros(len(text), bool)
    for start, end in offsets:
        covered[start:end] = True
    assert covered.all()


@pytest.mark.parametrize(
    "text",
    [
        RESPONSE,
        "",
        "plain words",
        "🤖 emoji 👩‍👩‍👧 split é 収入報告 over tokens \U00010348!",
        "x\r\n\n  y",
    ],
)
def test_offsets_equal_those_of_the_encoder(qwen, text):
    """B43: from ids alone the same spans as the encoder gives from the text."""
    encoding = qwen.backend_tokenizer.encode(text)
    decoded, offsets = decode_with_offsets(qwen, encoding.ids)
    assert decoded == text
    assert [tuple(row) for row in offsets.tolist()] == encoding.offsets


def test_emoji_over_several_tokens_share_its_character(qwen):
    ids = encode_plain(qwen, "a\U0001fae8b")
    assert len(ids) > 3
    text, offsets = decode_with_offsets(qwen, ids)
    assert text == "a\U0001fae8b"
    assert offsets[1:-1].tolist() == [[1, 2]] * (len(ids) - 2)


def test_sampled_ids_are_not_the_encoders(qwen):
    """B43: [29, 785] decodes to `>The`, which encodes to [16357]; the sampled ids keep theirs."""
    text, offsets = decode_with_offsets(qwen, [29, 785])
    assert text == ">The"
    assert encode_plain(qwen, text) == [16357]
    assert offsets.tolist() == [[0, 1], [1, 4]]


def test_special_tokens_have_empty_spans(qwen):
    ids = [151644, 785, 151645, 151657, 151643]
    text, offsets = decode_with_offsets(qwen, ids)
    assert text == "The<tool_call>"
    assert offsets.tolist() == [[0, 0], [0, 3], [3, 3], [3, 14], [14, 14]]
    text, offsets = decode_with_offsets(qwen, ids, special="keep")
    assert text == "<|im_start|>The<|im_end|><tool_call><|endoftext|>"
    assert [text[a:b] for a, b in offsets] == [
        *("<|im_start|>", "The", "<|im_end|>", "<tool_call>", "<|endoftext|>")
    ]
    with pytest.raises((ValueError, TypeError)):
        decode_with_offsets(qwen, ids, special="drop")


def test_id_beyond_the_vocabulary_shows_nothing(qwen):
    """The embedding has more rows than the vocabulary; such an id may be sampled."""
    text, offsets = decode_with_offsets(qwen, [785, 151_900, 785])
    assert text == "TheThe"
    assert offsets.tolist() == [[0, 3], [3, 3], [3, 6]]


def test_random_ids_decode_as_the_tokenizer_does(qwen):
    """Broken UTF-8 included: 300 draws, biased towards single bytes and partial characters."""
    rng = np.random.default_rng(0)
    some = rng.integers(0, 151_643, 4000).tolist()
    partial = [i for i in some if "\ufffd" in qwen.backend_tokenizer.decode([i])]
    for draw in range(300):
        pool = (range(256), partial, range(151_665))[draw % 3]
        ids = rng.choice(pool, size=12)
        text, offsets = decode_with_offsets(qwen, ids)
        assert_offsets(qwen, ids.tolist(), text, offsets)


def test_broken_utf8_maps_every_byte():
    """Hand-made: a cut character gives one mark over its bytes, a stray byte one of its own."""
    text, index = decode_utf8(b"a\xf0\x9fb\xff\xe2\x82\xac\xe2")
    assert text == "a\ufffdb\ufffd€\ufffd"
    assert index.tolist() == [0, 1, 1, 2, 3, 4, 4, 4, 5]


def test_word_level_offsets(mini):
    ids = encode_response(mini, "<think>what is</think>\n<answer>42</answer>")
    text, offsets = decode_with_offsets(mini, [*ids, SpecialIds.from_tokenizer(mini).im_end])
    assert text == "<think>what is</think>\n<answer>42</answer>"
    pieces = ["<think>", "what", " ", "is", "</think>", "\n", "<answer>", "42", "</answer>", ""]
    assert [text[a:b] for a, b in offsets] == pieces


def test_decoder_that_joins_by_spaces(mini_folder, tmp_path):
    """A vocabulary without a decoder joins by spaces; the space belongs to the later token."""
    folder = edited_folder(mini_folder, tmp_path / "spaced", lambda c: c.update(decoder=None))
    tok = load_tokenizer(folder)
    ids = [tok.get_vocab()[word] for word in ("what", "is", "<|im_end|>", "42")]
    text, offsets = decode_with_offsets(tok, ids)
    assert text == "what is 42"
    assert offsets.tolist() == [[0, 4], [4, 7], [7, 7], [7, 10]]


# Stop ids


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_stop_ids_of_the_published_files(qwen, qwen_tokenizer_folder):
    """B40: both ends, in the order of generation_config.json."""
    assert stop_ids(qwen_tokenizer_folder, qwen) == (151645, 151643)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (151645, 151643)),
        ({"eos_token_id": 151643}, {"eos_token_id": 151643}, (151643, 151645)),
        ({"eos_token_id": [151643, 151645]}, {"eos_token_id": 151645}, (151643, 151645)),
        ({}, {"text_config": {"eos_token_id": [7]}}, (7, 151645, 151643)),
        ({"eos_token_id": None}, {"eos_token_id": 9, "text_config": None}, (9, 151645, 151643)),
    ],
)
def test_stop_ids_join_the_sources_in_order(qwen, tmp_path, generation, config, expected):
    """B40: a base model's file that names only 151643 does not make generation run on."""
    if generation is not None:
        write(tmp_path, generation_config=generation, config=config)
    assert stop_ids(tmp_path, qwen) == expected


def test_stop_id_outside_the_vocabulary_is_refused(qwen, tmp_path):
    write(tmp_path, config={"eos_token_id": "151645"})
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id '151645'"):
        stop_ids(tmp_path, qwen)


# Host code


def test_prompts_do_not_import_jax():
    """Grain workers load these modules: none may start jax."""
    modules = ["chat", "detokenize", "positions", "sections", "spans", "template", "tokenizer"]
    code = f"import sys\nfor m in {modules}: __import__('evisrag_jax.prompts.' + m)\n"
    code += "sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
