"""What of a text counts when it is looked for among the words of a page.

A text becomes a row of symbols: letters (NFKC, case folded), each number as one symbol, and light
signs (percent and currency). Spaces, punctuation, hyphens and invisible characters do not count, so
words broken at a line's end or by the recogniser read as one.

    "The 1,234.0 inter-"  ->  t h e (1234) i n t e r
    "−5 % of Q3, $12k"    ->  (-5) % o f (q3) $ (12k)

A number's identity is exact:

    same             1,234 = 1234 = 1,234.0    .5 = 0.50    +5 = 5    −5 = -5    12 percent = 12%
    never the same   12 and 120    5 and -5    12 and 12k    320 and A320    7 and 007    3,14 and 314

* A comma is a thousands separator in groups of three digits only (so are no-break and thin spaces,
  and plain ones in a text that is one number and nothing else: 10 085 207); other digits joined by
  commas and points (3,14 or 1.2.3) are the same only when written the same.
* A magnitude (k, m, mm, mn, b, bn, t, tn) written onto a number, and one or two letters right before
  it (Q3, FY19, CO2), belong to it; other letters (30km, 3rd) are letters. So does a minus sign that
  follows no word; a dash between numbers (10-20) separates them.
* Digits of one number over two words (12 | 0) are two numbers: whether they belong together cannot
  be known.
* Signs are light: 12% and 12 differ by a quarter of a letter, so the same writing is preferred and
  the other still found.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import NamedTuple

#: Weight of a letter or a digit, and of a light sign.
LETTER, LIGHT = 4, 1

_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[\u00a0\u2007\u2009\u202f]\d{3})+(?!\d)")
_SPACED_ALONE = re.compile(r"\W{0,2}\d{1,3}(?: \d{3})+(?:[.,]\d+)?\W{0,2}")
_PERCENT_WORD = re.compile(r"(?<![^\W\d_])percent(?![^\W\d_])")
_CURRENCY = "$€£¥₹"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}%-])-[{_CURRENCY}]?(?=\.?\d))?"
    r"(?P<prefix>(?<![^\W\d_])[^\W\d_]{1,2}(?=\d))?"
    r"(?P<digits>\d+(?:[.,]\d+)*|(?<![\w.])\.\d+)"
    r"(?P<suffix>(?:k|mm|mn|m|bn|b|tn|t)(?![^\W\d_]))?"
)
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PLAIN = re.compile(r"\d*(?:\.\d+)?")
#: A part of a word may be a match of its own at these, unless they stand between digits.
_BREAKS = frozenset(':;,()[]{}=|\u2022"\u201c\u201d')


class Symbol(NamedTuple):
    """One thing that counts.

    Attributes:
        key: the letter or sign, or a number's identity; equal keys are equal symbols.
        weight: what leaving it out costs, `LETTER` a character and `LIGHT` a sign.
        number: whether it must be matched exactly.
        start, end: whether a match may start before it and end after it.
    """

    key: str
    weight: int
    number: bool
    start: bool
    end: bool


def join_groups(text: str) -> str:
    """A text that is one number in groups of three digits, 10 085 207, with narrow no-break spaces
    for plain ones, so that it stays one word; any other text unchanged."""
    return text.replace(" ", "\u202f") if _SPACED_ALONE.fullmatch(text) else text


def text_symbols(text: str) -> tuple[Symbol, ...]:
    """The symbols of a text of several words; empty for one of punctuation alone."""
    text = _SPACED_THOUSANDS.sub(_digits, join_groups(text.strip()))
    return tuple(symbol for word in text.split() for symbol in word_symbols(word))


@functools.lru_cache(maxsize=1 << 16)
def word_symbols(word: str) -> tuple[Symbol, ...]:
    """The symbols of one word of a page. Its ends, and those of its parts, are where matches may
    start and end: "Total:150" has the parts "total" and 150."""
    text = _plain_text(word)
    found: list[tuple[str, int, bool]] = []
    cuts = {0}  # numbers of symbols before which a part starts
    at = 0
    while at < len(text):
        number = _NUMBER.match(text, at)
        char = text[at]
        if number:
            found.append(_number(number))
            at = number.end()
            continue
        if char.isalpha() or unicodedata.category(char)[0] in "MN":
            found.append((char, LETTER, False))
        elif char in "%\u2030" or unicodedata.category(char) == "Sc":
            found.append((char, LIGHT, False))
        elif char.isspace() or (
            char in _BREAKS
            and not (text[at - 1 : at].isdigit() and text[at + 1 : at + 2].isdigit())
        ):
            cuts.add(len(found))
        at += 1
    cuts.add(len(found))
    return tuple(
        Symbol(key, weight, number, index in cuts, index + 1 in cuts)
        for index, (key, weight, number) in enumerate(found)
    )


def _digits(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match.group())


def _plain_text(word: str) -> str:
    """NFKC and case folding, one kind of dash, no format characters, "percent" as its sign."""
    word = _SPACED_THOUSANDS.sub(_digits, word)
    chars: list[str] = []
    for char in word:
        # NFKC would glue a footnote's mark or a fraction to the number before it: 45² is not 452.
        if unicodedata.category(char) == "No" and chars and chars[-1].isdigit():
            chars.append("'")  # counts for nothing, and is no break
        chars.append(char)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", "".join(chars)).casefold())
    kept = []
    for char in text:
        category = unicodedata.category(char)
        if category == "Pd" or char == "\u2212":
            kept.append("-")
        elif category not in ("Cf", "Cs", "Cn", "Cc") or char.isspace():
            kept.append(char)
    return _PERCENT_WORD.sub("%", "".join(kept))


def _number(match: re.Match[str]) -> tuple[str, int, bool]:
    digits = match["digits"]
    plain = digits.replace(",", "") if _GROUPED.fullmatch(digits) else digits
    if _PLAIN.fullmatch(plain):
        whole, _, fraction = plain.partition(".")
        # A leading zero makes a code of it: 007 is not 7.
        plain = ".".join(part for part in (whole or "0", fraction.rstrip("0")) if part)
    prefix, suffix = match["prefix"] or "", match["suffix"] or ""
    sign = "-" if match["sign"] and plain.strip("0.") else ""
    weight = LETTER * (len(prefix) + len(digits) + len(suffix))
    return f"{sign}{prefix}{plain}{suffix}", weight, True
