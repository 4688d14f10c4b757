"""Host randomness from names: numpy's counter-based Philox, seeded by a tuple. Never imports jax.

Device keys are in :mod:`evisrag_jax.runtime.prng`, from the same tuples. Python's ``hash`` is
salted per process and is used nowhere; texts enter as their CRC-32.
"""

from __future__ import annotations

import operator
import zlib

import numpy as np

SEED_LIMIT = 2**32


def text_hash(text: str) -> int:
    """CRC-32 of the UTF-8 bytes of ``text``: an integer in [0, 2**32), equal on every machine."""
    return zlib.crc32(text.encode("utf-8"))


def check_seed(seed: int) -> int:
    """Return ``seed`` as a plain int; ValueError unless 0 <= seed < 2**32."""
    number = operator.index(seed)
    if not 0 <= number < SEED_LIMIT:
        raise ValueError(f"seed {number} is out of range: a seed is an integer in [0, 2**32)")
    return number


def philox(seed: int, *parts: int | str) -> np.random.Generator:
    """A generator that depends on ``(seed, *parts)`` and on nothing else.

    Args:
        seed: the run's seed, in [0, 2**32).
        parts: what the draw belongs to, e.g. ``("shuffle", epoch)`` or ``(step, prompt_id)``.
            Integers must not be negative; strings enter as :func:`text_hash`.

    Two tuples of different length never share a stream: the length is part of the entropy.
    """
    words = [check_seed(seed), len(parts)]
    for part in parts:
        number = text_hash(part) if isinstance(part, str) else operator.index(part)
        if number < 0:
            raise ValueError(f"philox: part {part!r} of {parts!r} is negative")
        # Two words each, so that a large integer cannot look like two small parts.
        if number >= 2**64:
            raise ValueError(f"philox: part {part!r} of {parts!r} does not fit in 64 bits")
        words += [number & 0xFFFFFFFF, number >> 32]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
