"""Token pieces to text, with the characters of each: the arithmetic of decode_with_offsets.

A byte-level vocabulary cuts text between bytes, so one character may lie in several tokens (an
emoji often does). Each of them is then given the whole character:

    bytes     h   f0 9f   98 80   !          text   h  😀  !
    tokens    0   1       2       3          spans  (0,1) (1,2) (1,2) (2,3)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE's letters → byte values: Latin-1 where it prints, else letters from 256 on."""
    prints = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0)]
    table = {chr(b): b for b in prints}
    table.update({chr(256 + n): b for n, b in enumerate(sorted(set(range(256)) - set(prints)))})
    return table


_BYTE_OF_LETTER = _byte_of_letter()


def token_bytes(token: str | None) -> bytes:
    """Bytes that a byte-level token string stands for; none for None (an id without a token)."""
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:  # an added token outside the byte alphabet stands for its own text
        return token.encode("utf-8")


def join_bytes(pieces: Sequence[bytes]) -> tuple[str, Int32[np.ndarray, "T 2"]]:
    """Text of the joined bytes, and the characters that each piece has a byte of."""
    data = b"".join(pieces)
    text, char_of_byte = decode_utf8(data)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    offsets = np.zeros((len(pieces), 2), np.int32)
    place = 0  # characters begun so far: where an empty piece stands
    for t, piece in enumerate(pieces):
        if piece:
            offsets[t] = char_of_byte[ends[t] - len(piece)], char_of_byte[ends[t] - 1] + 1
            place = offsets[t, 1]
        else:
            offsets[t] = place
    return text, offsets


def decode_utf8(data: bytes) -> tuple[str, Int32[np.ndarray, " N"]]:
    """UTF-8 text with U+FFFD for each broken part, and the character index of every byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    else:
        starts = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
        return text, np.cumsum(starts, dtype=np.int32) - np.int32(1)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    chars, char_of_byte, waiting = [], [], 0
    for i in range(len(data)):
        new = decoder.decode(data[i : i + 1])
        # At most two characters appear: a broken one for the bytes that waited, then this byte's.
        pending = len(decoder.getstate()[0])
        done = waiting + 1 - pending
        for k in range(done):
            last = k == done - 1 and len(new) == 2
            char_of_byte.append(len(chars) + (1 if last else 0))
        chars.extend(new)
        waiting = pending
    new = decoder.decode(b"", final=True)
    char_of_byte.extend([len(chars)] * waiting)
    chars.extend(new)
    return "".join(chars), np.asarray(char_of_byte, np.int32)


def join_decoded(
    backend: Tokenizer, ids: Sequence[int], hidden: set[int]
) -> tuple[str, Int32[np.ndarray, "T 2"]]:
    """Offsets for any other decoder: each token's own text where that adds up, else by prefixes."""
    shown = [i for i in ids if i not in hidden]
    text = backend.decode(shown, skip_special_tokens=False)
    own = ["" if i in hidden else backend.decode([i], skip_special_tokens=False) for i in ids]
    ends = np.cumsum([len(piece) for piece in own], dtype=np.int64)
    if "".join(own) != text:
        ends, prefix, place = np.zeros(len(ids), np.int64), [], 0
        for t, index in enumerate(ids):
            if index not in hidden:
                prefix.append(index)
                so_far = backend.decode(prefix, skip_special_tokens=False)
                agree = len(text) if so_far == text else _common_prefix(so_far, text)
                place = max(place, agree)
            ends[t] = place
    offsets = np.zeros((len(ids), 2), np.int32)
    offsets[:, 1] = ends
    offsets[1:, 0] = ends[:-1]
    return text, offsets


def _common_prefix(a: str, b: str) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
