"""Text matching for rewards and metrics: normalisers, F1, containment, numbers, tag extraction.

Every matcher takes the prediction first and the gold text second, and names its normaliser:

    mode      rule                                                      "-3.5" "1,000" "“Yes”"
    "code"    ASCII punctuation and articles deleted (released code)     35     1000    “yes”
    "paper"   the same; only the channels differ                         35     1000    “yes”
    "strict"  NFKC, Unicode punctuation, numbers keep sign and point     -3.5   1000    yes
"""

import re
import string
import unicodedata
from collections import Counter

MODES = ("code", "paper", "strict")
YEARS = (1800, 2100)  # a bare four-digit target in this range is compared exactly

_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE_WORDS = re.compile(r"\b(a|an|the)\b")
_ARTICLES = frozenset(("a", "an", "the"))
# Thousands groups written with a no-break, figure, thin or narrow no-break space.
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[\u00a0\u2007\u2009\u202f]\d{3})+(?!\d)")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_DELETED = frozenset("'`\u2018\u2019\u02bc.")  # between two letters: don't, U.S.
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?")


def check_mode(mode: str) -> str:
    """Return `mode`, or raise ValueError when it is not one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"unknown text mode {mode!r}; one of {', '.join(MODES)}")
    return mode


def normalize(text: str, mode: str) -> str:
    """Normalised text, words separated by single spaces.

    "code" and "paper": lower-case, delete the 32 ASCII punctuation characters, replace the whole
    words a, an, the by a space, collapse white space (EVisRAG's reward and evaluation rule).
    "strict": see `_normalize_strict`. Both are idempotent. Raises ValueError on another mode.
    """
    check_mode(mode)
    if mode == "strict":
        return _normalize_strict(text)
    bare = text.lower().translate(_ASCII_PUNCTUATION)
    return " ".join(_ARTICLE_WORDS.sub(" ", bare).split())


def words(text: str, mode: str) -> list[str]:
    """The words of the normalised text, in order."""
    return normalize(text, mode).split()


def _normalize_strict(text: str) -> str:
    """What a reader would call the same answer.

    NFKC and case folding; thousands separators (comma, no-break and thin spaces) removed; a sign
    and a decimal point that belong to a number kept; apostrophes and points inside words deleted;
    all other Unicode punctuation, currency and ASCII symbols become a space, so "1/2" is not "12"
    and "0,1" is the pair 0 and 1; format characters (zero width, direction marks) deleted; articles
    removed unless nothing else is left (the answer "A" stays).
    """
    text = _SPACED_THOUSANDS.sub(lambda m: re.sub(r"\D", "", m.group()), text)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept: list[str] = []
    for char in text:  # one kind of dash; no currency signs, no invisible characters
        category = unicodedata.category(char)
        if category == "Pd" or char == "\u2212":
            kept.append("-")
        elif category == "Sc":
            if kept and kept[-1].isalnum():
                kept.append(" ")
        elif category not in ("Cf", "Cc", "Cs") or char.isspace():
            kept.append(char)
    text = _COMMA_THOUSANDS.sub(lambda m: m.group().replace(",", ""), "".join(kept))
    out = []
    for index, char in enumerate(text):
        before = text[index - 1] if index else " "
        after = text[index + 1] if index + 1 < len(text) else " "
        point = char == "." and after.isdigit() and (before.isdigit() or not before.isalnum())
        sign = char == "-" and _starts_number(text, index + 1) and _before_sign(before)
        if point or sign or not _is_punctuation(char):
            out.append(char)
        elif not (char in _DELETED and before.isalpha() and after.isalpha()):
            out.append(" ")
    found = "".join(out).split()
    return " ".join([word for word in found if word not in _ARTICLES] or found)


def _is_punctuation(char: str) -> bool:
    """ASCII punctuation and symbols, Unicode punctuation, and the slash of a fraction."""
    return char in string.punctuation + "\u2044" or unicodedata.category(char).startswith("P")


def _starts_number(text: str, index: int) -> bool:
    return text[index : index + 1].isdigit() or (
        text[index : index + 1] == "." and text[index + 1 : index + 2].isdigit()
    )


def _before_sign(char: str) -> bool:
    """True where a dash that follows `char` can be a sign: not after a word, a digit or a dash."""
    return not (char.isalnum() or char in "-.)]}%")


def f1_set(prediction: str, gold: str, mode: str = "code") -> float:
    """F1 over the sets of words, 0 where nothing is shared (as the released reward has it)."""
    left, right = set(words(prediction, mode)), set(words(gold, mode))
    return _f1(len(left & right), len(left), len(right))


def f1_multiset(prediction: str, gold: str, mode: str = "strict", epsilon: float = 0.0) -> float:
    """F1 over the bags of words; `epsilon` is added to precision + recall (1e-7 in eval.py)."""
    left, right = Counter(words(prediction, mode)), Counter(words(gold, mode))
    return _f1((left & right).total(), left.total(), right.total(), epsilon)


def _f1(shared: int, predicted: int, gold: int, epsilon: float = 0.0) -> float:
    if shared == 0:
        return 0.0
    precision, recall = shared / predicted, shared / gold
    return 2 * precision * recall / (precision + recall + epsilon)


def exact(prediction: str, gold: str, mode: str = "strict") -> float:
    """1.0 when the normalised texts are equal."""
    return float(normalize(prediction, mode) == normalize(gold, mode))


def contains(prediction: str, gold: str, mode: str = "code") -> float:
    """1.0 when the normalised gold is a character substring of the normalised prediction.

    An empty gold is contained in everything, and "35" in "1357": the released rule for short gold.
    """
    return float(normalize(gold, mode) in normalize(prediction, mode))


def contains_tokens(prediction: str, gold: str, mode: str = "strict") -> float:
    """1.0 when the gold's words stand in the prediction as a run of whole words.

    An empty gold is contained in an empty prediction only.
    """
    line, run = words(prediction, mode), words(gold, mode)
    if not run:
        return float(not line)
    return float(any(line[i : i + len(run)] == run for i in range(len(line) - len(run) + 1)))


def parse_number(text: str) -> tuple[float, bool] | None:
    """(value, had a percent sign) of a text that is one number, else None.

    Thousands separators, a currency sign and a percent sign are read over; no other unit is.
    """
    text = _SPACED_THOUSANDS.sub(lambda m: re.sub(r"\D", "", m.group()), text)
    text = unicodedata.normalize("NFKC", text).strip().lower().replace("\u2212", "-")
    text = "".join(char for char in text if unicodedata.category(char) != "Sc").strip()
    percent = text.endswith("%")
    text = _COMMA_THOUSANDS.sub(
        lambda m: m.group().replace(",", ""), text.removesuffix("%").strip()
    )
    return (float(text), percent) if _NUMBER.fullmatch(text) else None


def relaxed_match(prediction: str, target: str, tolerance: float = 0.05) -> bool:
    """Numeric agreement within `tolerance` of the TARGET, else equality of the strict texts.

    Exact where 5 % would be wrong: a target of zero, and a bare whole number that reads as a year
    (`YEARS`). When only one side has a percent sign, both readings of it (2 and 0.02) are accepted.
    """
    guess, gold = parse_number(prediction), parse_number(target)
    if guess is None or gold is None:
        return normalize(prediction, "strict") == normalize(target, "strict")
    (value, percent), (wanted, wanted_percent) = guess, gold
    bare_year = re.fullmatch(r"\d{4}", target.strip()) and YEARS[0] <= wanted <= YEARS[1]
    if wanted == 0.0 or bare_year:
        return value == wanted
    values, targets = [value], [wanted]
    if percent and not wanted_percent:
        values.append(value / 100.0)
    if wanted_percent and not percent:
        targets.append(wanted / 100.0)
    return any(abs(v - t) <= tolerance * abs(t) for v in values for t in targets)


def extract_tag(tag: str, text: str, which: str = "first") -> str | None:
    """The text of one tagged block, or None without an opening tag. Case-sensitive.

    From the first (or, `which="last"`, the last) `<tag>` to the next `<tag>` or the first `</tag>`
    after it, whichever comes sooner; to the end of the text when neither follows.
    """
    if which not in ("first", "last"):
        raise ValueError(f"which={which!r}; first or last")
    pieces = text.split(f"<{tag}>")
    if len(pieces) == 1:
        return None
    return pieces[1 if which == "first" else -1].split(f"</{tag}>")[0]


def extract_tags(tag: str, text: str) -> list[str]:
    """The texts of all blocks of a tag, in order (see `extract_tag` for where each one ends)."""
    return [piece.split(f"</{tag}>")[0] for piece in text.split(f"<{tag}>")[1:]]
