"""Sections and evidence records by character offsets."""

from __future__ import annotations

import pytest

from evisrag_jax.prompts.sections import evidence_records, find_section, parse_sections

GOOD = (
    "<observe>o</observe>\n<evidence>\n[1]: 5\n[2]: no relevant information\n</evidence>\n"
    "<think>The x</think>\n<answer>5</answer>"
)


def test_well_formed():
    sections = parse_sections(GOOD)
    assert list(sections) == ["observe", "evidence", "think", "answer"]
    texts = {tag: s.text for tag, s in sections.items()}
    assert texts["think"] == "The x"
    assert texts["evidence"] == "\n[1]: 5\n[2]: no relevant information\n"
    for tag, s in sections.items():
        assert GOOD[s.start : s.end] == f"<{tag}>{s.text}</{tag}>"
        assert GOOD[s.inner_start : s.inner_end] == s.text
        assert s.closed


def extract(tag, text):
    """EVisRAG section 1.3, literally: the piece after the first tag, cut at a close in it."""
    pieces = text.split(f"<{tag}>")
    return pieces[1].split(f"</{tag}>")[0] if len(pieces) > 1 else None


@pytest.mark.parametrize(
    ("text", "inner", "closed"),
    [
        ("<think>a</think>b</think>", "a", True),
        ("<think>a<think>b</think>", "a", False),
        ("<think>a", "a", False),
        ("</think><think>a b", "a b", False),
        ("<think></think>", "", True),
        ("<think>", "", False),
        ("x<think>a</answer>y</think>z", "a</answer>y", True),
        ("<THINK>a</THINK>", None, None),
        ("< think>a</think>", None, None),
        ("", None, None),
    ],
)
def test_missing_unclosed_and_repeated_tags(text, inner, closed):
    """EVisRAG section 1.3, each way a tag goes wrong."""
    section = find_section(text, "think")
    assert extract("think", text) == inner
    if inner is None:
        assert section is None
        return
    assert (section.text, section.closed) == (inner, closed)
    assert text[section.inner_start : section.inner_end] == inner
    tail = "</think>" if closed else ""
    assert text[section.start : section.end] == f"<think>{inner}{tail}"


def test_absent_sections_are_left_out_and_order_is_not_needed():
    sections = parse_sections("<answer>a <think>t</think></answer>")
    assert list(sections) == ["think", "answer"]
    assert sections["answer"].text == "a <think>t</think>"


def test_records_of_a_response():
    records = evidence_records(GOOD)
    assert [(r.index, r.text) for r in records] == [(1, "5"), (2, "no relevant information")]
    assert [GOOD[r.start : r.end] for r in records] == [
        "[1]: 5\n",
        "[2]: no relevant information\n",
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("[1]: a [2] b\n[2]: c", {1: "a [2] b", 2: "c"}),
        ("[1]: a [2]: b\n", {1: "a [2]: b"}),
        ("[2]: b\n[1]: a", {1: "a", 2: "b"}),
        ("[1]: a\n[1]: again\n[2]: c", {1: "a", 2: "c"}),
        ("  [1]: a\n\t[3]:c\nmore\n\nlines", {1: "a", 3: "c\nmore\n\nlines"}),
        ("[1] a\n[2]: b", {2: "b"}),
        ("[1]:\n[2]: ", {1: "", 2: ""}),
        ("no record", {}),
        ("", {}),
    ],
)
def test_records_begin_at_line_starts(body, expected):
    """The strict reading of EVisRAG section 3.2, the tag right before the first record or not."""
    for text in (body, f"<evidence>{body}</evidence> [9]: outside", f"x\n<evidence>\n{body}"):
        records = evidence_records(text)
        assert {r.index: r.text for r in records} == expected
        for r in records:
            assert text[r.start : r.end].startswith(f"[{r.index}]:")
            assert r.text == text[r.start : r.end].split(":", 1)[1].strip()
