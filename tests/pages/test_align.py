"""Alignment: an exhaustive search as reference, and the traps of numbers and broken words."""

import functools
import time

import numpy as np
import pytest

from evisrag_jax.pages.align import align_words, index_words
from evisrag_jax.pages.symbols import LETTER, text_symbols, word_symbols
from evisrag_jax.pages.words import Word


def page(text):
    return [Word(piece, (10 * n, 0, 8, 10)) for n, piece in enumerate(text.split(" "))]


def found(text, on, **options):
    """The matched words of the page, one text a match."""
    words = page(on)
    matches = align_words(text, words, **options)
    return [" ".join(words[i].text for i in match.words) for match in matches]


SAME = [
    ("1,234", "1234"),
    ("1234.0", "1,234"),
    ("1,234,567.50", "1234567.5"),
    ("0.5", ".50"),
    ("+5", "5"),
    ("-5", "\u22125"),
    ("-$5", "-5"),
    ("-0", "0"),
    ("1\u202f234", "1,234"),
    ("12 percent", "12%"),
    ("30km", "30 km"),
    ("1\u00a0234", "1234"),
    ("CO\u2082", "CO2"),
    ("4U9525", "4u9525"),
    ("3,14", "3,14"),
    ("'19", "19"),
    ("\uff11\uff12", "12"),
    ("(5)", "5"),
]
DIFFERENT = [
    ("12", "120"),
    ("120", "12"),
    ("12", "1.2"),
    ("5", "-5"),
    ("-5", "5"),
    ("1,234", "1,235"),
    ("1,234", "1.234"),
    ("3,14", "314"),
    ("3,14", "3.14"),
    ("7", "007"),
    ("10", "10k"),
    ("10k", "10m"),
    ("320", "A320"),
    ("A320", "B320"),
    ("3", "Q3"),
    ("45", "452"),
    ("452", "45\u00b2"),
    ("212", "2\u00bd"),
    ("2", "2\u00bd"),
    ("12", "1 2"),
    ("120", "12 0"),
    ("2019", "2O19"),
    ("12345678901234567890123456789012", "12345678901234567890123456789013"),
]
PART_OF_MORE = [
    ("19", "COVID-19"),
    ("20", "10-20"),
    ("45", "10:45"),
    ("12", "12/31"),
    ("10", "10\u00b2"),
]


@pytest.mark.parametrize(("text", "on"), SAME)
def test_equal_numbers(text, on):
    assert found(text, f"The {on} items") == [on]
    assert found(f"about {text} of these items", f"so about {on} of these items") == [
        f"about {on} of these items"
    ]


@pytest.mark.parametrize(("text", "on"), DIFFERENT)
def test_different_numbers(text, on):
    assert found(text, on, threshold=0.51) == []
    assert found(text, f"The {on} items") == []


@pytest.mark.parametrize(("text", "on"), PART_OF_MORE)
def test_a_number_is_not_a_part_of_more(text, on):
    assert found(text, f"The {on} items") == []


@pytest.mark.parametrize(("text", "on"), DIFFERENT[:15])
def test_a_long_text_needs_its_number_all_the_same(text, on):
    sentence = "the annual report of the council lists {} separate complaints this year"
    assert found(sentence.format(text), sentence.format(on)) == []


def test_all_numbers_and_in_their_order():
    on = "from 12 to 15 percent of adults"
    assert found("from 12 to 15 percent of adults", on) == [on]
    assert found("from 15 to 12 percent of adults", on) == []
    assert found("from 12 to 12 percent of adults", on) == []
    # A number at the edge is kept although the stretch without it is as close.
    assert found("12 widgets", "see 12 of widgets now") == ["12 of widgets"]


def test_groups_with_plain_spaces():
    """Only a text that is nothing but the number is read so: "3 582 people" may be two numbers."""
    assert found("10 085 207", "of 10,085,207 arrests") == ["10,085,207"]
    assert found("3 582 people", "of 3582 people") == []
    assert found("3 582 people", "of 3 582 people") == ["3 582 people"]


def test_signs_and_currency_are_light():
    """The same writing wins; without it the bare number is found, at a score below 1."""
    assert found("12%", "12 of 12% and") == ["12%"]
    assert found("12", "12% of 12 and") == ["12"]
    (match,) = align_words("65%", page("of 65 adults"))
    assert match.score == pytest.approx(1 - 1 / 9)  # two digits of 4 and a sign of 1
    assert found("$1,200", "cost 1200 in") == ["1200"]
    assert found("5", "all 5% of") == ["5%"]


def test_case_punctuation_and_broken_words():
    assert found("Net revenue", "the NET-REVENUE, rose") == ["NET-REVENUE,"]
    assert found("international law", "in inter- national law we") == ["inter- national law"]
    assert found("net revenue", "our net reve nue fell") == ["net reve nue"]
    assert found("net revenue", "our netrevenue fell") == ["netrevenue"]
    assert found("efficient", "e\ufb03cient") == ["e\ufb03cient"]
    assert found("cooperation", "co\u00adoperation") == ["co\u00adoperation"]


def test_parts_of_a_word():
    """At a colon or bracket a match may start inside a word; the whole word is given."""
    assert found("150", "Fatalities:150") == ["Fatalities:150"]
    assert found("Paris", "City:Paris(France) x") == ["City:Paris(France)"]
    assert found("Paris", "Parisians live") == []
    assert found("Paris", "of\u00a0Paris x") == ["of\u00a0Paris"]


def test_fuzzy():
    assert found("the quick brown fox", "a tbe quiek brown fox jumps") == ["tbe quiek brown fox"]
    assert found("male", "female adults") == []
    assert found("increase", "decrease") == []
    assert found("cat", "cut") == []
    assert found("house", "mouse") == ["mouse"]  # one letter of five is just the threshold
    assert found("house", "mouse", threshold=0.81) == []


def test_nothing_to_find():
    assert found("\u2014 !", "a \u2014 b") == []
    assert found("%", "5 % of") == []
    assert align_words("x", []) == ()
    assert align_words("x", page("!! \u2014")) == ()
    with pytest.raises(ValueError, match="threshold"):
        align_words("x", page("x"), threshold=0.5)


def test_equal_matches_come_in_reading_order():
    words = page("no 7 yes 7 no 70 7")
    assert [match.words for match in align_words("7", words)] == [(1,), (3,), (6,)]
    # An exact match leaves no room for a worse one.
    assert found("brown foxes", "brown foxas and brown foxes") == ["brown foxes"]
    # Matches share no word.
    assert [m.words for m in align_words("ha ha", page("ha ha ha ha ha"))] == [(0, 1), (2, 3)]


ALPHABET = ["ab", "ba", "abc", "c", "12", "1", "12%", "a:b", "-", "$1", "b1", "cab"]


def reference(text, words, threshold):
    """Every run of whole words, or parts of them, by the recursive edit distance."""
    sought = text_symbols(text)
    row = [(s, owner) for owner, word in enumerate(words) for s in word_symbols(word.text)]

    def distance(a, b):
        @functools.cache
        def go(i, j):
            if i == 0 and j == 0:
                return 0
            ways = [float("inf")]
            if i and not a[i - 1].number:
                ways.append(go(i - 1, j) + a[i - 1].weight)
            if j:
                ways.append(go(i, j - 1) + b[j - 1].weight)
            if i and j:
                left, right = a[i - 1], b[j - 1]
                if (left.key, left.number) == (right.key, right.number):
                    ways.append(go(i - 1, j - 1))
                elif not (left.number or right.number) and left.weight == right.weight == LETTER:
                    ways.append(go(i - 1, j - 1) + LETTER)
            return min(ways)

        return go(len(a), len(b))

    weight = sum(s.weight for s in sought)
    best = {}
    for end in range(1, len(row) + 1):
        options = []
        for start in range(end):
            if row[start][0].start and row[end - 1][0].end:
                own = tuple(s for s, _ in row[start:end])
                options.append((distance(sought, own), end - start, sum(s.weight for s in own)))
        if options:
            cost, length, own = min(options)
            best[end] = (1 - cost / max(weight, own), row[end - length][1], row[end - 1][1])
    top = max((score for score, _, _ in best.values()), default=0)
    if top < threshold or not any(s.weight >= LETTER for s in sought):
        return []
    kept = []
    for score, first, last in (best[end] for end in sorted(best)):
        if score > top - 1e-9 and (not kept or first > kept[-1][-1]):
            kept.append(tuple(range(first, last + 1)))
    return [(words, pytest.approx(top, abs=1e-12)) for words in kept]


def test_against_exhaustive_search():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(150):
        words = page(" ".join(rng.choice(ALPHABET, 7)))
        text = " ".join(rng.choice(ALPHABET, int(rng.integers(1, 4))))
        threshold = float(rng.choice([0.51, 0.65, 0.8]))
        expected = reference(text, words, threshold)
        matches = align_words(text, words, threshold=threshold)
        assert [(m.words, m.score) for m in matches] == expected, (text, words)
        hits += bool(expected)
    assert 30 < hits < 140


VOCABULARY = ["harbour", "freight", "tonnes", "annual", "council", "bridge", "permit", "river"]


def test_words_far_away_do_not_matter():
    """Whatever stands around a sentence, and in whatever order, the same words are found."""
    rng = np.random.default_rng(1)
    clean = "exports of timber reached 1,482 crates during the spring"
    sentence = clean.split()
    seen = set()
    for _ in range(20):
        around = list(rng.choice(VOCABULARY, 60)) + [str(n) for n in rng.integers(10, 9999, 20)]
        rng.shuffle(around)
        at = int(rng.integers(len(around)))
        words = page(" ".join([*around[:at], *sentence, *around[at:]]))
        noisy = "exports of tinber reached 1482 crates durlng the spring"
        (match,) = align_words(noisy, words)
        assert match.words == tuple(range(at, at + len(sentence)))
        seen.add(match.score)
    assert len(seen) == 1


def test_long_pages_are_quick():
    """2,000 words and ten sentences of twenty words; about 0.3 s on one core, 3 s allowed."""
    rng = np.random.default_rng(2)
    texts = ["".join(rng.choice(list("etaoinsr"), int(rng.integers(2, 9)))) for _ in range(2000)]
    words = page(" ".join(texts))
    start = time.perf_counter()
    index = index_words(words)
    for at in range(0, 1000, 100):
        (match,) = align_words(" ".join(texts[at : at + 20]), index)
        assert match.words == tuple(range(at, at + 20))
    assert time.perf_counter() - start < 3
