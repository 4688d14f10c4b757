"""Normalisers and matchers: released values, and what a reader would call the same answer."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from evisrag_jax.rewards.text import (
    contains,
    contains_tokens,
    exact,
    extract_tag,
    extract_tags,
    f1_multiset,
    f1_set,
    normalize,
    parse_number,
    relaxed_match,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "rewards.json"
EXACT = 1e-12


def test_golden_matchers():
    for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["matchers"]:
        prediction, gold = case["pred"], case["gold"]
        for mode in ("code", "paper"):
            assert normalize(prediction, mode) == case["norm_pred"]
            assert normalize(gold, mode) == case["norm_gold"]
            assert f1_set(prediction, gold, mode) == pytest.approx(case["f1_match"], abs=EXACT)
            assert contains(prediction, gold, mode) == case["em_match"]


@pytest.mark.parametrize(
    "prediction, gold, want",
    [
        ("3.5", "35", 1.0),
        ("-5", "5", 1.0),
        ("1,000", "1000", 1.0),
        ("50%", "50", 1.0),
        ("10 million", "10", 2 / 3),
        ("2020", "2020 and 2021", 0.5),
        ("5 5 5", "5", 1.0),
    ],
)
def test_b58_code_mode_loses_sign_and_point(prediction, gold, want):
    """B58: the released normaliser, reproduced (set F1)."""
    assert f1_set(prediction, gold, "code") == pytest.approx(want, abs=EXACT)


@pytest.mark.parametrize(
    "text, want",
    [
        ("3.5", "3.5"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("(-5)", "-5"),
        ("-$1,234.50", "-1234.50"),
        ("1,000", "1000"),
        ("1,234,567 units", "1234567 units"),
        ("0,1", "0 1"),
        ("1,000,5", "1 000 5"),
        ("1/2", "1 2"),
        ("\u00bd", "1 2"),
        ("12.5%", "12.5"),
        (".5", ".5"),
        ("2019\u20132020", "2019 2020"),
        ("covid-19", "covid 19"),
        ("10:30", "10 30"),
        ("state-of-the-art", "state of art"),
        ("don't, U.S.A.", "dont usa"),
        ("The end.", "end"),
        ("A", "a"),
        ("the", "the"),
        ("US$5", "us 5"),
    ],
)
def test_b58_strict_keeps_numbers_apart(text, want):
    """B58: sign and point kept, thousands joined, other punctuation separates."""
    assert normalize(text, "strict") == want


def test_b58_strict_scores():
    """B58: 3.5 is not 35, -5 is not 5, 1,000 is 1000, the pair 0,1 is not 01."""
    for prediction, gold, want in (
        ("3.5", "35", 0.0),
        ("-5", "5", 0.0),
        ("12.5%", "125", 0.0),
        ("1/2", "12", 0.0),
        ("0,1", "01", 0.0),
        ("1,000", "1000", 1.0),
        ("$1,000", "1000", 1.0),
    ):
        assert f1_multiset(prediction, gold) == exact(prediction, gold) == want
    assert f1_multiset("5 5 5", "5") == pytest.approx(0.5)  # 1/3 precise, all recalled


def test_b59_percent_and_relaxed_numbers():
    """B59: 5 % of the target; a swap of the arguments, years and zero are all told apart."""
    assert exact("2%", "2", "code") == 1.0
    assert relaxed_match("104", "100") and not relaxed_match("105.2", "100")
    assert relaxed_match(
        "100", "105.2"
    )  # 4.94 % of the target: only the right order separates them
    assert not relaxed_match("2008", "2010") and relaxed_match("2010", "2010")
    assert relaxed_match("0", "0") and not relaxed_match("0.001", "0")
    assert relaxed_match("2%", "2") and relaxed_match("2%", "0.02") and relaxed_match("0.02", "2%")
    assert relaxed_match("$1,020", "1000") and not relaxed_match("-1000", "1000")
    assert relaxed_match("1,990", "2,010")  # a thousands separator: a count, not a year
    assert relaxed_match("Yes.", "yes") and not relaxed_match("yes", "5")
    assert not relaxed_match("10 million", "10")


def test_numbers_are_read_whole_or_not_at_all():
    assert parse_number("\u221212.5 %") == (-12.5, True)
    assert parse_number("\u20ac 1\u202f234") == (1234.0, False)
    assert parse_number("1e3") == (1000.0, False)
    for text in ("", "5 kg", "1,000,5", "nan", "inf", "1 2"):
        assert parse_number(text) is None


def test_b61_substring_credit():
    """B61: "5" is found in "15" by characters only; a refusal at the end of a claim likewise."""
    claim = "The chart shows 5. no relevant information"
    assert contains("15", "5") == 1.0 and contains(claim, "no relevant information") == 1.0
    assert contains_tokens("15", "5") == 0.0
    assert exact(claim, "no relevant information", "strict") == 0.0
    assert contains_tokens("about 5 ships", "5") == 1.0
    assert contains_tokens("no information is relevant", "no relevant information") == 0.0
    assert contains("anything", "") == 1.0 and contains_tokens("anything", "") == 0.0
    assert contains_tokens("", "") == 1.0


def test_b67_unicode():
    """B67: curly quotes, full-width digits, composed accents, thin spaces; odd scripts survive."""
    pairs = [("\u201cYes\u201d", "Yes"), ("\uff15\uff10", "50"), ("e\u0301tat", "\u00e9tat")]
    for prediction, gold in pairs:
        assert f1_set(prediction, gold, "code") == 0.0
        assert exact(prediction, gold, "strict") == f1_multiset(prediction, gold) == 1.0
    assert exact("1\u00a0000", "1000", "strict") == exact("1\u202f000", "1000", "strict") == 1.0
    assert exact("2020 100", "2020100", "strict") == 0.0  # an ordinary space joins nothing
    for text in ("\u05e9\u05dc\u05d5\u05dd \u200f5", "\U0001f642\u200d\U0001f680", "\ud800", "ﷺ"):
        assert normalize(text, "strict") == normalize(normalize(text, "strict"), "strict")
    assert exact("Stra\u00dfe", "STRASSE", "strict") == 1.0


def test_normalisers_are_idempotent():
    """Random strings of the characters that the rules treat specially."""
    draw = random.Random(0)
    alphabet = "aAthe 5019.,,.--/%$'()[]\u2013\u2212\u00a0\u202f\u201c\u00bd\u00e9\u0301\u0130ſ\n"
    for _ in range(3000):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 12)))
        for mode in ("code", "strict"):
            once = normalize(text, mode)
            assert normalize(once, mode) == once, (text, mode)


def test_multiset_f1_epsilon_of_the_released_evaluation():
    """2PR / (P + R + 1e-7): a perfect match is 0.99999995."""
    assert f1_multiset("a b", "b a", "code", epsilon=1e-7) == pytest.approx(0.99999995, abs=1e-9)
    assert f1_multiset("x x y", "x y y", "code") == pytest.approx(2 / 3)
    assert f1_multiset("", "", "code") == f1_set("", "", "code") == 0.0


def test_b63_first_and_last_block():
    """B63: the first block by default, the last on request; blocks may lack their closing tag."""
    text = "<answer>3</answer> ... <answer>5</answer>"
    assert extract_tag("answer", text) == "3"
    assert extract_tag("answer", text, which="last") == "5"
    assert extract_tags("answer", text) == ["3", "5"]
    assert extract_tag("answer", "<answer>5") == "5"
    assert extract_tag("answer", "5</answer>") is None
    assert extract_tag("answer", "</answer>x<answer>42 sites") == "42 sites"
    assert extract_tag("a", "<a>one<a>two</a>") == "one"
    with pytest.raises(ValueError, match="which='second'"):
        extract_tag("answer", text, which="second")


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown text mode 'loose'; one of code, paper, strict"):
        normalize("x", "loose")


def test_rewards_do_not_import_jax():
    """Data-loading workers import the rewards: they must not start JAX."""
    code = (
        "import sys, evisrag_jax.rewards.evisrag, evisrag_jax.rewards.gold; "
        "sys.exit('jax' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
