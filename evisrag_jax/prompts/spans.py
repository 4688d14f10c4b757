"""From characters to tokens: spans of a decoded response as masks over the sampled ids.

Two ways exist to find a tag. By characters (the default of this project): find it in the decoded
text and follow the offsets. By token ids (the released code): search the ids of the tag encoded
alone. The second misses most tags, because byte-pair merging joins a tag's last ``>`` with what
follows:

    text     </evidence> \\n <think> The x          ids of "<think>" alone: 13708 766 29
    tokens   …  idence  >\\n  <th  ink  >The  " x"   in context:             13708 766 16357
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Integer


def char_span_to_tokens(
    offsets: Integer[np.ndarray, "T 2"], start: int, end: int | None = None
) -> Bool[np.ndarray, " T"]:
    """Tokens that hold a character of [start, end); `end=None` is the end of the response.

    A token that straddles an edge counts, so ``>\\n`` belongs to the section that its ``>`` closes.
    A token without characters (a special token) counts only where both its neighbours may: strictly
    inside the span, or beyond an open side (`start` 0 or `end` None), so an end token belongs to
    every span that runs to the end. For spans that must not overlap use `token_range`.
    """
    first, last = offsets.astype(np.int64).T
    stop = np.iinfo(np.int64).max if end is None else end
    overlaps = (np.maximum(first, start) < np.minimum(last, stop)) & (first < last)
    after_start = (first > start) | (start <= 0)
    inside = (first == last) & after_start & (last < stop) & (start < stop)
    return overlaps | inside


def char_to_token(offsets: Integer[np.ndarray, "T 2"], char: int) -> int:
    """Index of the first token that reaches beyond character `char`; T where none does.

    This is the token that holds the character, so a tag's start maps to the token of its ``<`` even
    where that token begins earlier (``><``).
    """
    beyond = np.flatnonzero(offsets[:, 1] > char)
    return int(beyond[0]) if len(beyond) else len(offsets)


def token_range(
    offsets: Integer[np.ndarray, "T 2"], start: int | None = None, end: int | None = None
) -> Bool[np.ndarray, " T"]:
    """Tokens from the one that holds character `start` up to, not with, the one that holds `end`.

    None is the response's own edge. Ranges that meet at a character share no token and leave none
    out: a token that straddles the edge belongs to the later one, which is how scopes are cut
    (EVisRAG section 2: a start tag's tokens are in, an end tag's are not).
    """
    length = len(offsets)
    low = 0 if start is None else char_to_token(offsets, start)
    high = length if end is None else char_to_token(offsets, end)
    index = np.arange(length)
    return (index >= low) & (index < high)


def find_ids(ids: Sequence[int] | np.ndarray, tag_ids: Sequence[int] | np.ndarray) -> int:
    """Index of the first exact occurrence of `tag_ids` in `ids`, or -1: the released code's search.

    ValueError for an empty tag, which would be found everywhere.
    """
    row, tag = np.asarray(ids, np.int64), np.asarray(tag_ids, np.int64)
    if len(tag) == 0:
        raise ValueError("the tag has no ids")
    if len(row) < len(tag):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(row, len(tag))
    hits = np.flatnonzero((windows == tag).all(axis=1))
    return int(hits[0]) if len(hits) else -1
