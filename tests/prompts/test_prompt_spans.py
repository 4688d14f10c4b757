"""Characters to tokens: known failure B38 in both modes, and the edges of spans."""

from __future__ import annotations

import numpy as np
import pytest

from evisrag_jax.prompts.sections import parse_sections
from evisrag_jax.prompts.spans import char_span_to_tokens, char_to_token, find_ids, token_range
from evisrag_jax.prompts.tokenizer import decode_with_offsets, encode_plain

RESPONSE = (
    "<observe>o</observe>\n<evidence>\n[1]: 5\n</evidence>\n"
    "<think>The x</think>\n<answer>5</answer>"
)
SPANS = {
    ("think", None): (21, 34),
    (None, "think"): (0, 20),
    ("think", "answer"): (21, 27),
    (None, "evidence"): (0, 6),
}
"""B38: first and last token of each scope, by characters."""


def edges(mask):
    """First and last index of a mask that must be one run."""
    index = np.flatnonzero(mask)
    assert len(index) == index[-1] - index[0] + 1
    return int(index[0]), int(index[-1])


@pytest.mark.parametrize("scope", SPANS)
def test_b38_by_characters(qwen, scope):
    """B38: 35 tokens; the scopes by offsets, cut as ranges and as overlaps alike."""
    ids = encode_plain(qwen, RESPONSE)
    assert len(ids) == 35
    text, offsets = decode_with_offsets(qwen, ids)
    start, end = (None if tag is None else text.index(f"<{tag}>") for tag in scope)
    assert edges(token_range(offsets, start, end)) == SPANS[scope]
    assert edges(char_span_to_tokens(offsets, start or 0, end)) == SPANS[scope]


def test_b38_by_token_ids(qwen):
    """B38: the released search finds only `<answer>`, at 28: think-to-answer would be 0..27."""
    ids = encode_plain(qwen, RESPONSE)
    found = {
        tag: find_ids(ids, encode_plain(qwen, f"<{tag}>"))
        for tag in ("think", "evidence", "answer")
    }
    assert found == {"think": -1, "evidence": -1, "answer": 28}
    assert find_ids(encode_plain(qwen, "\n<think>Based on"), [13708, 766, 29]) == 1


def test_end_token_belongs_to_open_spans(qwen):
    """The end token has no characters; it is in every span that runs to the response's end."""
    _, offsets = decode_with_offsets(qwen, [*encode_plain(qwen, RESPONSE), 151645])
    start, section = RESPONSE.index("<think>"), parse_sections(RESPONSE)["answer"]
    assert edges(char_span_to_tokens(offsets, start)) == (21, 35)
    assert edges(token_range(offsets, start)) == (21, 35)
    assert edges(char_span_to_tokens(offsets, section.start, section.end)) == (28, 34)


def test_straddling_token(qwen):
    """`><` closes one section and opens the next: overlaps share it, ranges give it to the later."""
    text = "<evidence>x</evidence><think>y</think>"
    ids = encode_plain(qwen, text)
    shared = ids.index(1784)
    _, offsets = decode_with_offsets(qwen, ids)
    sections, cut = parse_sections(text), text.index("<think>")
    evidence, think = (sections[tag] for tag in ("evidence", "think"))
    assert char_span_to_tokens(offsets, evidence.start, evidence.end)[shared]
    assert char_span_to_tokens(offsets, think.start, think.end)[shared]
    assert char_to_token(offsets, cut) == shared
    assert not token_range(offsets, None, cut)[shared]
    both = token_range(offsets, None, cut).astype(int) + token_range(offsets, cut, None)
    assert (both == 1).all()


def test_hand_made_offsets():
    """Tokens: special, `ab`, special, `c`, two parts of one character, special at the end."""
    offsets = np.array([[0, 0], [0, 2], [2, 2], [2, 3], [3, 4], [3, 4], [4, 4]], np.int32)

    def span(*args):
        return np.flatnonzero(char_span_to_tokens(offsets, *args)).tolist()

    assert span(0) == [0, 1, 2, 3, 4, 5, 6]
    assert span(0, 4) == [0, 1, 2, 3, 4, 5]
    assert span(1, 3) == [1, 2, 3]
    assert span(2, 3) == [3]
    assert span(3, 4) == [4, 5]
    assert span(2) == [3, 4, 5, 6]
    assert span(2, 2) == []
    assert span(3, 1) == []
    assert span(0, 0) == []
    assert span(4) == []
    assert [char_to_token(offsets, c) for c in range(5)] == [1, 1, 3, 4, 7]
    assert np.flatnonzero(token_range(offsets, 2, 3)).tolist() == [3]
    assert np.flatnonzero(token_range(offsets, None, 2)).tolist() == [0, 1, 2]
    assert np.flatnonzero(token_range(offsets)).tolist() == list(range(7))


def test_no_tokens():
    offsets = np.zeros((0, 2), np.int32)
    assert char_span_to_tokens(offsets, 0).shape == (0,)
    assert token_range(offsets, 0, None).shape == (0,)
    assert char_to_token(offsets, 0) == 0


def test_find_ids_edges():
    assert find_ids([1, 2, 1, 2, 3], [1, 2]) == 0
    assert find_ids(np.array([1, 2, 1, 2, 3]), np.array([2, 3])) == 3
    assert find_ids([1, 1, 2], [1, 2]) == 1
    assert find_ids([1], [1, 2]) == -1
    assert find_ids([], [1]) == -1
    with pytest.raises(ValueError, match="no ids"):
        find_ids([1], [])
