"""Every reason for which a response is dropped, each on a response that lacks nothing else."""

import pytest

from evisrag_jax.construction.contexts import ContextConfig, make_contexts
from evisrag_jax.construction.filters import (
    REASONS,
    Trajectory,
    answers_right,
    check,
    evidence_lines,
)
from tests.construction.made import question, tagged

INSUFFICIENT = "insufficient to answer"
GOOD = tagged([None, "revenue 42"], "42")


def context(sufficient=True):
    """Pages a, b; b is relevant. Insufficient: a third page, which is not shown, is relevant too."""
    raw = question(
        retrieved="ab", relevant="b" if sufficient else "bz", answers=("42", "forty-two")
    )
    return make_contexts(raw, ContextConfig(ks=(2,)))[0]


def reason(text, *, sufficient=True, tokens=5, failure=None):
    drop = check(context(sufficient), Trajectory(text, tokens, failure=failure), max_tokens=50)
    return None if drop is None else drop.reason


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  {GOOD}\n",
        tagged([None, "revenue 42"], " Forty-Two. "),
        tagged(["No relevant information.", "revenue 42"], "42"),
        tagged([None, "as [1] has it: 42"], "42"),
    ],
)
def test_right_answers_with_the_right_evidence_are_kept(text):
    assert reason(text) is None


def test_a_refusal_with_the_evidence_there_is_kept_where_pages_do_not_suffice():
    assert reason(tagged([None, "half of it"], INSUFFICIENT), sufficient=False) is None
    assert reason(tagged([None, "half of it"], "Insufficient to answer."), sufficient=False) is None


CASES = {
    "teacher_failed": [(GOOD, {"failure": "timed out"})],
    "truncated": [("<observe>on and on", {"tokens": 50})],
    "bad_format": [
        ("42", {}),
        ("", {}),
        (GOOD.replace("<think>so</think>\n", ""), {}),
        (GOOD + "<answer>42</answer>", {}),
        (f"Well. {GOOD}", {}),
        (tagged([None], "42"), {}),
        (tagged([None, "x", None], "42"), {}),
        (GOOD.replace("[2]:", "[3]:"), {}),
        (GOOD.replace("[2]: revenue", "[1]: again\n[2]: revenue"), {}),
        (GOOD.replace("revenue 42", ""), {}),
        (GOOD.replace("[1]: no relevant information\n", "[1]:\n"), {}),
        ("<observe>on and on", {"tokens": 49}),
    ],
    "refused_sufficient": [
        (tagged([None, "revenue 42"], INSUFFICIENT), {}),
        (tagged([None, None], "no relevant information"), {}),
    ],
    "wrong_answer": [
        (tagged([None, "revenue 42"], "43"), {}),
        (tagged([None, "revenue 42"], "42 million"), {}),
        (tagged([None, "revenue 42"], "-42"), {}),
        (tagged([None, "revenue 42"], ""), {}),
    ],
    "other_refusal": [
        (tagged([None, "half of it"], "no relevant information"), {"sufficient": False}),
        (tagged([None, "half of it"], f"{INSUFFICIENT} the question"), {"sufficient": False}),
    ],
    "answered_insufficient": [
        (tagged([None, "half of it"], "42"), {"sufficient": False}),
        (tagged([None, "half of it"], f"{INSUFFICIENT}, but 42"), {"sufficient": False}),
    ],
    "missing_evidence": [
        (tagged([None, None], "42"), {}),
        (tagged(["revenue 42", None], "42"), {}),
        (tagged([None, None], INSUFFICIENT), {"sufficient": False}),
    ],
    "extra_evidence": [
        (tagged(["also 42", "revenue 42"], "42"), {}),
        (tagged(["and more", "half of it"], INSUFFICIENT), {"sufficient": False}),
    ],
}


@pytest.mark.parametrize(
    ("wanted", "text", "facts"),
    [(wanted, *case) for wanted, cases in CASES.items() for case in cases],
)
def test_each_reason(wanted, text, facts):
    assert reason(text, **facts) == wanted


def test_every_reason_has_a_case():
    assert list(CASES) == list(REASONS)


def test_the_detail_says_what_was_found():
    def detail(text, **facts):
        return check(context(**facts), Trajectory(text), 50).detail

    assert detail(tagged(["x", "y"], "42")) == "page 1"
    assert detail(tagged([None, None], "42")) == "page 2"
    assert detail(tagged([None, "y"], " 43 ")) == "43"
    assert "[1]" in detail(tagged([None], "42")) and "2 page(s)" in detail(tagged([None], "42"))


def test_right_for_difficulty_looks_at_the_answer_alone():
    assert answers_right(context(), "<answer>42</answer>")
    assert not answers_right(context(), "<answer>42") and not answers_right(context(), "42")
    assert not answers_right(context(), f"<answer>{INSUFFICIENT}</answer>")
    assert answers_right(context(False), f"<answer>{INSUFFICIENT}</answer>")
    assert not answers_right(context(False), "<answer>42</answer>")


def test_an_empty_answer_is_never_right():
    (dash,) = make_contexts(question(answers=("-",)), ContextConfig(ks=(1,)))
    assert not answers_right(dash, "<answer> </answer>") and not answers_right(dash, "no tags")
    assert answers_right(dash, "<answer>-</answer>")


def test_evidence_lines():
    assert evidence_lines(tagged([None, "a b", "No relevant information"], "x")) == (
        None,
        "a b",
        None,
    )
    assert evidence_lines("nothing") == ()
