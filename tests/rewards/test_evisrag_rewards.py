"""EVisRAG channels: released scores to 1e-12, paper and strict by hand, gold text and its refusals."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from evisrag_jax.rewards.evisrag import (
    CODE_CHANNELS,
    PAPER_CHANNELS,
    RewardConfig,
    format_score,
    overall,
    overlong,
    score_response,
)
from evisrag_jax.rewards.gold import GoldError, check_gold, gold_text

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "rewards.json"
EXACT = 1e-12
CODE, PAPER, STRICT = (RewardConfig(mode=mode) for mode in ("code", "paper", "strict"))


def response(evidence="[1]: 35%", answer="35%", think="so", observe="a chart"):
    return (
        f"<observe>{observe}</observe>\n<evidence>\n{evidence}\n</evidence>\n"
        f"<think>{think}</think>\n<answer>{answer}</answer>"
    )


def gold(evidence="[1]: 35%", *answers):
    blocks = "".join(f"<answer>{answer}</answer>" for answer in answers or ("35%",))
    return f"<evidence>\n{evidence}\n</evidence>\n{blocks}"


def record(**changes):
    fields = {"id": "q7", "answers": ["35%"], "evidence": ["35%", None], "is_sufficient": True}
    return {**fields, **changes}


def golden():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", golden()["cases"], ids=lambda case: case["name"])
def test_golden_code_scores(case):
    got = score_response(case["response"], case["ground_truth"], case["response_length"], CODE)
    assert tuple(got) == CODE_CHANNELS
    want = dict(case["scores"])
    assert overall(got) == pytest.approx(want.pop("overall"), abs=EXACT)
    assert got == pytest.approx(want, abs=EXACT)
    for name, value in case["unweighted"].items():
        assert got[name] / 3 == pytest.approx(value, abs=EXACT)


def test_golden_gold_without_tags_is_refused():
    """The release stops with an IndexError; here the missing tag is named."""
    for case in golden()["error_cases"]:
        assert case["raises"] == "IndexError"
        with pytest.raises(GoldError, match=f"no <{case['name'].split('_')[2]}>"):
            score_response(case["response"], case["ground_truth"], case["response_length"], CODE)


def test_golden_overlong_settings_are_the_defaults():
    args = golden()["overlong_args"]
    assert (args["max"], args["buffer"], args["min"]) == (
        CODE.overlong_max,
        CODE.overlong_buffer,
        CODE.overlong_min,
    )


def test_b46_length_penalty_and_cut_answers():
    """B46: -1 under 200 tokens, 0 to 1024, falling to -1 at 1536 and above; a cut answer earns
    neither accuracy nor format."""
    for length in (0, 1, 199):
        assert overlong(length, CODE) == -1.0
    for length in (200, 600, 1024):
        assert overlong(length, CODE) == 0.0
    for length, want in ((1025, -0.001953125), (1280, -0.5), (1536, -1), (1537, -1), (9999, -1)):
        assert overlong(length, CODE) == want
    small = RewardConfig(mode="code", overlong_max=64, overlong_buffer=16, overlong_min=4)
    assert [overlong(n, small) for n in (3, 4, 48, 56, 64, 65)] == [-1, 0, 0, -0.5, -1, -1]
    cut = response().removesuffix("</answer>")
    got = score_response(cut, gold(), 1536, CODE)
    assert got["accuracy"] == got["format"] == 0.0
    for config in (PAPER, STRICT):
        got = score_response(cut, gold(), 1536, config)
        assert got["derivation"] == got["format"] == 0.0 and got["perception"] == 1.0


def test_b63_several_answer_blocks():
    """B63: the first block counts as released; the last on request; strict wants a single one."""
    two = response(answer="3</answer> then <answer>5")
    code = score_response(two, gold("[1]: x", "5"), 300, CODE)
    assert code["accuracy"] == code["format"] == 0.0
    last = RewardConfig(mode="code", answer_block="last")
    assert score_response(two, gold("[1]: x", "5"), 300, last)["accuracy"] == 3.0
    wants = {None: 0.0, "first": 1.0, "last": 0.0, "single": 0.0}
    for block, want in wants.items():
        config = RewardConfig(mode="strict", answer_block=block)
        assert score_response(two, gold("[1]: x", "3"), 300, config)["derivation"] == want
    quoted = response(think="the <answer> tag", answer="d")
    assert all(
        score_response(quoted, gold(), 300, config)["format"] == 0 for config in (CODE, STRICT)
    )
    unclosed = "<answer>35%"
    assert score_response(unclosed, gold(), 300, CODE)["accuracy"] == 0.0


def test_b64_white_space_around_the_answer():
    """B64: the released full match allows none; strip=true (and strict) does; an end token fails."""
    good = response()
    joined = good.replace(">\n<", "><")
    for text, bare, stripped in (
        (good, 1, 1),
        (good + "\n", 0, 1),
        (" " + good, 0, 1),
        (good + "<|im_end|>", 0, 0),
        (joined, 1, 1),
        (good.replace("</observe>\n", "</observe>x"), 0, 0),
    ):
        assert format_score(text) == bare and format_score(text, strip=True) == stripped
        for config in (CODE, PAPER, RewardConfig(mode="strict", strip=False)):
            assert score_response(text, gold(), 300, config)["format"] == bare
        for config in (STRICT, RewardConfig(mode="code", strip=True)):
            assert score_response(text, gold(), 300, config)["format"] == stripped


def test_paper_channels_by_hand():
    """Eq. 11-13: weights 3 and 1; F1 for relevant pages, normalised equality for the others."""
    target = gold("[1]: total sales of 40 ships\n[2]: no relevant information", "40 ships")
    words = "[1]: sales 40 ships in May\n[2]: No relevant information."
    got = score_response(response(words, "about 40 ships"), target, 9, PAPER)
    assert tuple(got) == PAPER_CHANNELS
    assert got["perception"] == pytest.approx((3 * 0.6 + 1) / 4)  # 3 of 5 words on both sides
    assert got["derivation"] == pytest.approx(0.8) and got["format"] == 1.0
    equal_weights = RewardConfig(k_pos=1.0)
    got = score_response(response(words), target, 9, equal_weights)
    assert got["perception"] == pytest.approx((0.6 + 1) / 2)
    wrapped = response("[1]: total sales of 40 ships\n[2]: there is no relevant information here")
    assert score_response(wrapped, target, 9, PAPER)["perception"] == pytest.approx(3 / 4)
    assert score_response(wrapped, target, 9, CODE)["evidence"] == pytest.approx(3.0)
    assert score_response("<think>t</think>", target, 9, PAPER)["perception"] == 0.0


def test_all_gold_records_are_normalised_outside_code():
    """Six full records: 54 in the release, 1 in paper and strict; max_records bounds all modes."""
    lines = "\n".join(f"[{i}]: fact number {i}" for i in range(1, 7))
    text, target = response(lines, "yes"), gold(lines, "yes")
    assert score_response(text, target, 300, CODE)["evidence"] == 54.0
    for mode in ("paper", "strict"):
        assert score_response(text, target, 300, RewardConfig(mode=mode))["perception"] == 1.0
    half = response("[1]: fact number 1", "yes")
    assert score_response(half, target, 300, RewardConfig(max_records=2))["perception"] == 0.5
    capped = RewardConfig(mode="code", max_records=5)
    assert score_response(text, target, 300, capped)["evidence"] == 3.0
    skipping = gold("[1]: five words stand right here\n[3]: five words stand over there")
    one = response("[1]: five words stand right here")
    assert score_response(one, skipping, 300, PAPER)["perception"] == 0.5


def test_strict_reads_records_and_matches_as_a_reader():
    """Strict: markers open a line, whole-word containment for short gold, bag-of-words F1 for
    longer, the gold's own spelling of "no relevant information" does not matter."""
    target = gold("[1]: 35\n[2]: No relevant information.", "3.5")
    mention = response("[1]: see page [2] where 35 is given\n[2]: no relevant information", "35")
    got = score_response(mention, target, 9, STRICT)
    assert got["perception"] == 1.0 and got["derivation"] == 0.0
    assert score_response(mention, target, 9, PAPER)["derivation"] == 1.0
    # paper: F1 of seven words against one; released: the record is cut at "[2]" and misses
    assert score_response(mention, target, 9, PAPER)["perception"] == pytest.approx(1.75 / 4)
    assert score_response(mention, target, 9, CODE)["evidence"] == pytest.approx(3 * 3 / 6)
    inside = response("[1]: value 1357\n[2]: The chart shows 5. no relevant information")
    assert score_response(inside, target, 9, STRICT)["perception"] == 0.0
    repeated = response("[1]: the the sales sales rose by nine percent")
    long_gold = gold("[1]: the sales rose by nine percent")
    assert score_response(repeated, long_gold, 9, PAPER)["perception"] == 1.0
    assert score_response(repeated, long_gold, 9, STRICT)["perception"] == pytest.approx(10 / 11)


def test_several_answers_mean_any_of():
    """B66: a list of answers scores by the best one (paper, strict); the release reads one."""
    text, target = response(answer="five"), gold_text(record(answers=["5", "five"]))
    assert score_response(text, target, 300, PAPER)["derivation"] == 1.0
    assert score_response(text, target, 300, STRICT)["derivation"] == 1.0
    assert score_response(text, target, 300, CODE)["accuracy"] == 0.0
    texts = [gold("[1]: 35%", "5"), gold("[1]: 36%", "five")]
    got = score_response(text, texts, 300, PAPER)
    assert got == {"perception": 1.0, "derivation": 1.0, "format": 1.0}
    for config, golds in ((CODE, texts), (PAPER, [])):
        with pytest.raises(GoldError, match=f"sequence of {len(golds)} gold texts"):
            score_response(text, golds, 300, config)


def test_gold_text_of_records():
    """Objects and mappings; an insufficient record's answer is the refusal whatever it lists."""
    want = "<evidence>\n[1]: 35%\n[2]: no relevant information\n</evidence>\n<answer>35%</answer>"
    assert gold_text(record()) == gold_text(SimpleNamespace(**record())) == want
    lacking = gold_text(record(is_sufficient=False, answers=[]))
    assert lacking.endswith("<answer>insufficient to answer</answer>")
    spread = gold_text(record(evidence=("two\nlines ",)))
    assert "[1]: two lines\n" in spread
    refusal = response("[1]: no relevant information", "Insufficient to answer.")
    target = gold_text(record(is_sufficient=False, evidence=[None]))
    for config in (CODE, PAPER, STRICT):
        scores = score_response(refusal, target, 300, config)
        assert list(scores.values())[:2] == [3.0, 3.0] if config is CODE else [1.0, 1.0]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"answers": "35%"}, "answers must be a non-empty list of strings, got string '35%'"),
        ({"answers": 5}, "answers must be .* got int 5"),
        ({"answers": None}, "answers must be .* got NoneType"),
        ({"answers": []}, "answers must be a non-empty list"),
        ({"answers": ["5", 5]}, r"answers\[1\] must be text, got 5"),
        ({"answers": [""]}, r"answers\[0\] must be text, got ''"),
        ({"answers": [None]}, r"answers\[0\] must be text, got None"),
        ({"answers": ["x</answer>"]}, r"answers\[0\] holds a section tag"),
        ({"evidence": "35%"}, "evidence must be a non-empty list"),
        ({"evidence": ()}, "evidence must be a non-empty list"),
        ({"evidence": ["35%", ""]}, r"evidence\[1\] must be text or null, got ''"),
        ({"evidence": ["<think>"]}, r"evidence\[0\] holds a section tag"),
        ({"is_sufficient": None}, "is_sufficient must be true or false, got None"),
    ],
)
def test_b66_records_of_odd_types_are_refused(changes, reason):
    """B66: refused with the record's id and the reason, never compared character by character."""
    with pytest.raises(GoldError, match=rf"record 'q7': {reason}"):
        gold_text(record(**changes))


@pytest.mark.parametrize(
    "value, reason",
    [
        ("5", "no <evidence>: '5'"),
        (["5", "five"], "must be a string, got list"),
        (5, "must be a string, got int 5"),
        (None, "must be a string, got None"),
        ("", "no <evidence>: ''"),
        ("<evidence>x</evidence>", "no <answer>"),
    ],
)
def test_b66_gold_texts_of_odd_types_are_refused(value, reason):
    with pytest.raises(GoldError, match=f"row 12: the gold text .*{reason}"):
        check_gold(value, name="row 12")


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"mode": "fair"}, "unknown text mode 'fair'"),
        ({"k_pos": 0.0}, "k_pos=0.0"),
        ({"overlong_buffer": 0}, "overlong_buffer must be positive"),
        ({"overlong_min": 1100}, "overlong_min=1100 lies inside the penalty zone"),
        ({"max_records": 0}, "max_records=0"),
        ({"answer_block": "best"}, "answer_block='best'"),
    ],
)
def test_bad_settings_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        RewardConfig(**options)
