"""The mini model's word-level tokenizer and the other small files of its Hugging Face folder.

One id a word. A word carries its leading space as a marker, so decoding is exact for text whose
words are parted by single spaces; the section tags, the newline and the record labels `[1]:` are
added tokens of their own, after which the marker is put back: `<answer>42` and `<answer> 42` are
the same ids. A space before `?` or `,` is optional.

    python -m experiments.mini.tokenizer FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from evisrag_jax.data.miniworld import world

MARK = "\u2581"  # stands for the space before a word
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
UNKNOWN = "<unk>"
TAGS = tuple(f"<{s}{t}>" for t in ("observe", "evidence", "think", "answer") for s in ("", "/"))
NUMBERED = 9  # pages that have a label; more of them can be drawn than named
LABELS = tuple(f"[{i}]:" for i in range(1, NUMBERED + 1))
CHAT_WORDS = ("system", "user", "assistant", "You", "are", "a", "helpful", "assistant.", "Picture")
MODEL_MAX_LENGTH = 1024

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MIN_PIXELS, MAX_PIXELS = 784, 50176

# Renders what Qwen2.5-VL's own template renders: default system line, text parts unchanged, one pad
# token a picture.
CHAT_TEMPLATE = """\
{%- set seen = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{%- set seen.images = seen.images + 1 -%}
{%- if add_vision_id -%}{{- 'Picture ' ~ seen.images ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{%- set seen.videos = seen.videos + 1 -%}
{%- if add_vision_id -%}{{- 'Video ' ~ seen.videos ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def _words() -> list[str]:
    """All words in the order of their ids; new ones go to the end, so that ids never move."""
    wordings = (
        world.LOOKUP_QUESTIONS
        + world.COMPARE_QUESTIONS
        + world.READ_QUESTIONS
        + world.WHICH_QUESTIONS
        + (
            world.INSUFFICIENT,
            world.NOT_RELEVANT,
            "is more than",
            "no page shows of",
            ", ? .",
            "yes",
        )
    )
    words = [w for text in wordings for w in text.split() if not w.startswith("{")]
    words += [str(i) for i in range(1, NUMBERED + 1)]
    words += [f"{i}:" for i in range(1, NUMBERED + 1)]
    groups = (world.ENTITIES, world.FIELDS, map(str, world.VALUES), CHAT_WORDS, words)
    return list(dict.fromkeys(w for group in groups for w in group))


def vocabulary(more: Sequence[str] = ()) -> list[str]:
    """All tokens, the index being the id: specials, <unk>, newline, tags, labels, the bare space,
    then marked words, at last those of `more` that another experiment adds.

    ValueError for a word of `more` that is there already or holds a space.
    """
    words = _words()
    if wrong := [w for w in more if w in words or not w or w.split() != [w]]:
        raise ValueError(f"tokenizer: {wrong} are no single words, or have ids already")
    if len(set(more)) != len(more):
        raise ValueError("tokenizer: a further word is given twice")
    return [*SPECIALS, UNKNOWN, "\n", *TAGS, *LABELS, MARK, *(MARK + w for w in [*words, *more])]


def word_ids(more: Sequence[str] = ()) -> dict[str, int]:
    """Id of each word without its marker (what the reading and place losses have as classes)."""
    return {t[1:]: i for i, t in enumerate(vocabulary(more)) if t.startswith(MARK) and len(t) > 1}


def make_tokenizer(more: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer as the `tokenizers` library knows it."""
    vocab = {token: i for i, token in enumerate(vocabulary(more))}
    tok = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tok.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(rf" *\{c}"), f" {c}") for c in "?,"]
    )
    tok.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always", split=True)
    tok.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.Fuse()])
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    tok.add_special_tokens([AddedToken(UNKNOWN, normalized=False, special=True)])
    tok.add_tokens([AddedToken(t, normalized=False) for t in ("\n", *TAGS, *LABELS)])
    return tok


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build(folder: str | Path, more: Sequence[str] = ()) -> Path:
    """Writes the mini model's folder but for weights and config.json; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tok = make_tokenizer(more)
    tok.save(str(folder / "tokenizer.json"))
    ids = {t: i for i, t in enumerate(vocabulary(more))}
    added = {
        str(ids[t]): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t in SPECIALS or t == UNKNOWN,
        }
        for t in (*SPECIALS, UNKNOWN, "\n", *TAGS, *LABELS)
    }
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": UNKNOWN}
    extra = [t for t in SPECIALS if t not in names.values()]
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": added,
            "additional_special_tokens": extra,
            "bos_token": None,
            **names,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MODEL_MAX_LENGTH,
            "padding_side": "right",
            "split_special_tokens": False,
        },
    )
    _write(
        folder / "special_tokens_map.json",
        {**names, "additional_special_tokens": extra},
    )
    _write(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD,
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
            "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        },
    )
    _write(
        folder / "generation_config.json",
        {
            "do_sample": False,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m experiments.mini.tokenizer FOLDER")
    print(f"{build(sys.argv[1])}: {len(vocabulary())} tokens")
