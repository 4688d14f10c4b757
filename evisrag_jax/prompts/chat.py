"""One user turn as token ids: the checkpoint's own chat layout, image slots, static batches.

Only the chat template places image slots and layout tokens. The layout is rendered once with marks
in place of the user's words, so that what came from outside is known and can be encoded as plain
text:

    layout     <|im_start|> user\\n  ···  <|vision_start|> <|image_pad|> <|vision_end|> <|im_end|> …
    encoded    id           `user\\n` + the user's text   id   id × merged tokens  id    id
                            one plain run, encoded together

Encoding each plain run as a whole gives the very ids of HF's ``apply_chat_template`` whenever the
user's text spells no added token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerFast

from evisrag_jax.prompts.positions import merged_grid, mrope_positions
from evisrag_jax.prompts.tokenizer import SpecialIds, added_tokens, encode_plain, split_at_tokens


class PromptTooLong(ValueError):
    """A prompt over its limit: refused, never cut. Has .name, .needed and .limit (tokens)."""

    def __init__(self, name: str, needed: int, limit: int):
        self.name, self.needed, self.limit = name, needed, limit
        super().__init__(
            f"record {name or '(unnamed)'}: the prompt needs {needed} tokens, over the limit of "
            f"{limit}; raise the limit, or lower the pixel budget or the number of images"
        )

    def __reduce__(self):
        return type(self), (self.name, self.needed, self.limit)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt of L tokens, images expanded to their merged tokens; arrays are read-only.

    ids: token ids.  positions: time, row, column of each token.  next_position: index of the first
    response token on all axes.  image_slot: the image a token belongs to, -1 for text.
    image_token: its merged token inside that image in reading order, 0 for text.  grids: (rows,
    cols) in patches, one an image.  text: the layout as rendered, with one image-pad token an
    image.  sha256: hex digest of the ids as little-endian int32, for telling whether two runs used
    the same prompt.  pad_id: the id that a batch pads with.  name: the record, for messages.
    """

    ids: Int32[np.ndarray, " L"]
    positions: Int32[np.ndarray, "3 L"]
    next_position: int
    image_slot: Int32[np.ndarray, " L"]
    image_token: Int32[np.ndarray, " L"]
    grids: tuple[tuple[int, int], ...]
    text: str
    sha256: str
    pad_id: int
    name: str = ""


class PromptArrays(NamedTuple):
    """P prompts padded on the right to L tokens.

    image_index counts in the flattened image features of a row (slot * tokens_per_image + token)
    and is -1 for text and padding; next_position is the position of the first response token.
    """

    tokens: Int32[np.ndarray, "P L"]
    positions: Int32[np.ndarray, "P 3 L"]
    lengths: Int32[np.ndarray, " P"]
    image_index: Int32[np.ndarray, "P L"]
    next_position: Int32[np.ndarray, " P"]


def build_prompt(
    tok: PreTrainedTokenizerFast,
    text: str,
    grids: Sequence[tuple[int, int]],
    *,
    images_first: bool = False,
    system: str | None = None,
    max_length: int | None = None,
    name: str = "",
    merge: int = 2,
) -> Prompt:
    """Lay out one user turn with its images and the opening of the assistant's turn.

    `text` is the user's text (an instruction with its question); `grids` holds (rows, cols) in
    patches for each image, in prompt order. The text comes before the images as at inference
    (EVisRAG section 9) unless `images_first`. Without `system` the template's default system line
    stands. Strings in `text` and `system` that spell layout tokens or image marks stay plain text
    (known failure B14).

    Raises PromptTooLong above `max_length` (equal is accepted; known failure B15), and ValueError
    if a grid is no multiple of `merge` or the chat template drops, alters or repeats the text or an
    image.
    """
    special = SpecialIds.from_tokenizer(tok)
    grids = tuple((int(rows), int(cols)) for rows, cols in grids)
    counts = [int(np.prod(merged_grid(grid, merge))) for grid in grids]
    rendered, runs = _layout_runs(tok, text, len(grids), images_first, system)

    ids: list[int] = []
    slots: list[int] = []
    image_tokens: list[int] = []
    image = 0
    for run in runs:
        if isinstance(run, str):
            new, slot, within = encode_plain(tok, run), -1, None
        elif run == special.image_pad and image < len(counts):
            new, slot, within = [run] * counts[image], image, range(counts[image])
            image += 1
        else:
            new, slot, within = [run], -1, None
        ids.extend(new)
        slots.extend([slot] * len(new))
        image_tokens.extend(within if within is not None else [0] * len(new))
    placed = sum(run == special.image_pad for run in runs)
    if placed != len(grids):
        raise ValueError(
            f"record {name or '(unnamed)'}: the chat template of {tok.name_or_path!r} places "
            f"{placed} image slots for {len(grids)} images"
        )
    if max_length is not None and len(ids) > max_length:
        raise PromptTooLong(name, len(ids), max_length)

    array = _frozen(ids)
    positions, next_position = mrope_positions(array, grids, special, merge)
    return Prompt(
        ids=array,
        positions=_frozen(positions),
        next_position=next_position,
        image_slot=_frozen(slots),
        image_token=_frozen(image_tokens),
        grids=grids,
        text=rendered,
        sha256=hashlib.sha256(array.astype("<i4").tobytes()).hexdigest(),
        pad_id=special.endoftext,
        name=name,
    )


def extend_prompt(prompt: Prompt, ids: Sequence[int] | np.ndarray) -> Prompt:
    """The prompt with the opening of the response: plain text tokens behind it, on all axes in line."""
    new = np.asarray(ids, np.int32)
    array = _frozen(np.concatenate([prompt.ids, new]))
    places = np.broadcast_to(
        prompt.next_position + np.arange(len(new), dtype=np.int32), (3, len(new))
    )
    return replace(
        prompt,
        ids=array,
        positions=_frozen(np.concatenate([prompt.positions, places], axis=1)),
        next_position=prompt.next_position + len(new),
        image_slot=_frozen(np.concatenate([prompt.image_slot, np.full(len(new), -1, np.int32)])),
        image_token=_frozen(np.concatenate([prompt.image_token, np.zeros(len(new), np.int32)])),
        sha256=hashlib.sha256(array.astype("<i4").tobytes()).hexdigest(),
    )


def _frozen(values: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, np.int32)
    array.setflags(write=False)
    return array


def _layout_runs(
    tok: PreTrainedTokenizerFast, text: str, images: int, images_first: bool, system: str | None
) -> tuple[str, list[str | int]]:
    """Render the chat layout, and its runs: plain text (str) or the id of a layout token (int)."""

    def render(user_text: str, system_text: str | None) -> str:
        parts = [{"type": "text", "text": user_text}]
        pictures = [{"type": "image"} for _ in range(images)]
        content = [*pictures, *parts] if images_first else [*parts, *pictures]
        messages = [{"role": "user", "content": content}]
        if system_text is not None:
            messages.insert(0, {"role": "system", "content": system_text})
        return tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    outside = {_unused_mark("user", text, system): text}
    if system is not None:
        outside[_unused_mark("system", text, system)] = system
    marked = render(*list(outside), *([None] if system is None else []))
    rendered = render(text, system)
    pieces = re.split("(" + "|".join(map(re.escape, outside)) + ")", marked)
    if (
        sorted(pieces[1::2]) != sorted(outside)
        or "".join(outside.get(p, p) for p in pieces) != rendered
    ):
        raise ValueError(
            f"the chat template of {tok.name_or_path!r} drops, alters or repeats the message text"
        )
    table = added_tokens(tok)
    runs: list[str | int] = []
    for piece in pieces:
        if piece in outside:
            parts = [(outside[piece], False)]
        else:
            parts = split_at_tokens(piece, list(table))
        for part, is_token in parts:
            if is_token:
                runs.append(table[part][0])
            elif runs and isinstance(runs[-1], str):
                runs[-1] += part
            else:
                runs.append(part)
    return rendered, runs


def _unused_mark(role: str, *texts: str | None) -> str:
    """A private-use string that occurs in none of the texts."""
    mark = f"\ue000{role}\ue001"
    while any(mark in text for text in texts if text):
        mark = f"\ue000{mark}\ue001"
    return mark


def batch_prompts(prompts: Sequence[Prompt], *, length: int, tokens_per_image: int) -> PromptArrays:
    """Stack P prompts into right-padded arrays of a fixed length.

    Padding has the prompts' pad id, position 0 and image index -1. Raises PromptTooLong for a
    prompt over `length`, and ValueError (naming the record) for an image of more than
    `tokens_per_image` merged tokens, for a prompt that is already padded on either side (known
    failure B23), for prompts of different vocabularies, or for an empty list.
    """
    if not prompts:
        raise ValueError("no prompts to batch")
    pad_id, count = prompts[0].pad_id, len(prompts)
    tokens = np.full((count, length), pad_id, np.int32)
    positions = np.zeros((count, 3, length), np.int32)
    lengths = np.zeros(count, np.int32)
    image_index = np.full((count, length), -1, np.int32)
    next_position = np.zeros(count, np.int32)
    for p, prompt in enumerate(prompts):
        label, size = f"record {prompt.name or p}", len(prompt.ids)
        if prompt.pad_id != pad_id:
            raise ValueError(f"{label}: pads with {prompt.pad_id}, the first prompt with {pad_id}")
        if size > length:
            raise PromptTooLong(prompt.name or str(p), size, length)
        for side, edge in (("left", prompt.ids[:1]), ("right", prompt.ids[-1:])):
            if pad_id in edge:
                raise ValueError(
                    f"{label}: already padded on the {side}; give unpadded prompts, the batch pads "
                    "them on the right"
                )
        in_image = prompt.image_slot >= 0
        largest = int(prompt.image_token[in_image].max(initial=-1)) + 1
        if largest > tokens_per_image:
            raise ValueError(
                f"{label}: an image has {largest} merged tokens, its bucket {tokens_per_image}"
            )
        index = prompt.image_slot * tokens_per_image + prompt.image_token
        tokens[p, :size] = prompt.ids
        positions[p, :, :size] = prompt.positions
        lengths[p] = size
        image_index[p, :size] = np.where(in_image, index, -1)
        next_position[p] = prompt.next_position
    return PromptArrays(tokens, positions, lengths, image_index, next_position)
