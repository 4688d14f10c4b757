"""Where a text stands on a page: the runs of words that are closest to it in edit distance.

The page's symbols (see ``symbols``) are one long row and a match is a stretch of it that starts and
ends with whole words, so words that a line's end or the recogniser broke need no rule of their own.
With w the weight of a symbol, the distance of a text and a stretch is the cheapest way from one to
the other by leaving symbols out (w), putting some in (w) and reading a letter as another (w);
numbers of the text can only be met by the same number. The score is

    1 - distance / max(weight of the text, weight of the stretch)        1 = equal

Source: spec 1.9 (word boxes: normalised, fuzzy at least 0.8, numbers exact). The table of distances
is that of approximate substring search: a stretch may start at any word for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from evisrag_jax.pages.symbols import LETTER, Symbol, text_symbols, word_symbols
from evisrag_jax.pages.words import Word

THRESHOLD = 0.8

# A cell is distance * _STEP + (symbols of the page - start): the least distance wins, then the
# latest start, which is the shortest stretch.
_STEP = 1 << 22
_NEVER = np.int64(1 << 34) * _STEP


@dataclass(frozen=True)
class Alignment:
    """A match of a text on a page.

    Attributes:
        words: indices of the page's words, a run in reading order.
        score: see the head of this module.
    """

    words: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class WordIndex:
    """A page's words made ready for many look-ups; N symbols.

    Attributes:
        ids: number of each symbol; equal symbols have equal numbers.
        numbers: whether a symbol is a number.
        owners: the word each symbol belongs to.
        cost: weights of all symbols before each place.
        starts, ends: places where a match may start and end.
        known: numbers of the symbols by key.
    """

    ids: Int64[np.ndarray, " N"]
    numbers: Bool[np.ndarray, " N"]
    owners: Int64[np.ndarray, " N"]
    cost: Int64[np.ndarray, " N1"]
    starts: Bool[np.ndarray, " N1"]
    ends: Bool[np.ndarray, " N1"]
    known: dict[tuple[str, bool], int]


def index_words(words: Sequence[Word]) -> WordIndex:
    """The index of a page's words, which must stand in reading order."""
    symbols: list[Symbol] = []
    owners: list[int] = []
    for place, word in enumerate(words):
        own = word_symbols(word.text)
        symbols += own
        owners += [place] * len(own)
    if len(symbols) >= _STEP:
        raise ValueError(f"a page has {len(symbols)} letters; the limit is {_STEP - 1}")
    known: dict[tuple[str, bool], int] = {}
    ids = [known.setdefault((s.key, s.number), len(known)) for s in symbols]
    return WordIndex(
        ids=np.array(ids, np.int64),
        numbers=np.array([s.number for s in symbols], bool),
        owners=np.array(owners, np.int64),
        cost=np.concatenate([[0], np.cumsum([s.weight for s in symbols])]).astype(np.int64),
        starts=np.array([*(s.start for s in symbols), False], bool),
        ends=np.array([False, *(s.end for s in symbols)], bool),
        known=known,
    )


def align_words(
    text: str, words: Sequence[Word] | WordIndex, *, threshold: float | int = THRESHOLD
) -> tuple[Alignment, ...]:
    """The best matches of `text` among the words of a page.

    Args:
        text: an evidence line or an answer.
        words: the page's words in reading order, or their index (`index_words`) for many texts.
        threshold: least score, above 0.5 and at most 1; ValueError otherwise.

    Returns:
        All matches of the best score, which share no word, in reading order. Empty where no match
        reaches the threshold, where a number of the text is not on the page, and for a text
        without letters and numbers.
    """
    if not 0.5 < threshold <= 1:  # below, an empty stretch could be the closest one
        raise ValueError(f"threshold={threshold} is not above 0.5 and at most 1")
    index = words if isinstance(words, WordIndex) else index_words(words)
    sought = text_symbols(text)
    if not any(symbol.weight >= LETTER for symbol in sought) or not len(index.ids):
        return ()
    if any(symbol.number and (symbol.key, True) not in index.known for symbol in sought):
        return ()
    places = np.flatnonzero(index.ends)
    distance, starts = _distances(sought, index)
    distance, starts = distance[places], starts[places]
    weight = sum(symbol.weight for symbol in sought)
    longest = np.maximum(weight, index.cost[places] - index.cost[starts])
    scores = 1.0 - distance / longest
    if scores.max() < threshold - 1e-9:
        return ()
    found: list[Alignment] = []
    for at in np.flatnonzero(scores >= scores.max() - 1e-9):
        first, last = index.owners[starts[at]], index.owners[places[at] - 1]
        if not found or first > found[-1].words[-1]:
            run = tuple(range(int(first), int(last) + 1))
            found.append(Alignment(run, float(scores[at])))
    return tuple(found)


def _distances(
    sought: Sequence[Symbol], index: WordIndex
) -> tuple[Int64[np.ndarray, " N1"], Int64[np.ndarray, " N1"]]:
    """Least distance to a stretch that ends at each place of the page, and where it starts.

    Row i of the table has the first i symbols of the text. A place is reached from the row above
    (symbol of the text left out), from the row above and the place before (met or misread), or from
    the place before (symbol of the page put in); the last is a running minimum, as putting in costs
    the same whatever came before: min over k <= j of row[k] + cost[j] - cost[k].
    """
    count = len(index.ids)
    cost = index.cost * _STEP
    row = np.where(index.starts, count - np.arange(count + 1), _NEVER)
    row = np.minimum.accumulate(row - cost) + cost
    letters = ~index.numbers & (np.diff(index.cost) == LETTER)
    never = np.full(count, _NEVER)
    misread = np.where(letters, LETTER * _STEP, never)
    met: dict[tuple[str, int, bool], np.ndarray] = {}  # cost of meeting a symbol, at each place
    for symbol in sought:
        swap = misread if not symbol.number and symbol.weight == LETTER else never
        known = index.known.get((symbol.key, symbol.number), -1)
        if symbol[:3] not in met:
            met[symbol[:3]] = np.where(index.ids == known, 0, swap)
        step = np.empty_like(row)
        step[0] = _NEVER
        np.add(row[:-1], met[symbol[:3]], out=step[1:])
        if not symbol.number:
            np.minimum(step, row + symbol.weight * _STEP, out=step)
        step -= cost
        np.minimum.accumulate(step, out=step)
        step += cost
        row = np.minimum(step, _NEVER)
    distance = row // _STEP
    starts = np.where(row < _NEVER, count - row % _STEP, 0)
    return distance, starts
