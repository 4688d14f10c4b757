"""Instruction templates."""

from __future__ import annotations

import pytest

from evisrag_jax.prompts.sections import INSUFFICIENT, NO_EVIDENCE, TAGS
from evisrag_jax.prompts.template import NAMES, Template, load_template


@pytest.mark.parametrize("name", NAMES)
def test_named_templates(name):
    template = load_template(name)
    assert template.name == name
    last = "{notes}" if name == "ddcot_look" else "{question}"
    assert template.text.count(last) == 1
    assert template.text.rstrip("\n").endswith(last)
    assert "\r" not in template.text


def test_evidence_cot_asks_for_the_four_sections():
    """EVisRAG section 9: the tags in order, both fixed phrases, the question in the last line."""
    text = load_template("evidence_cot").render("How many?")
    places = [text.index(f"<{tag}>") for tag in TAGS]
    assert places == sorted(places)
    assert all(f"</{tag}>" in text for tag in TAGS)
    assert f"[i]: {NO_EVIDENCE}\n" in text
    assert INSUFFICIENT in text
    assert text.endswith("\nQuestion: How many?\n")


def test_mini_is_the_bare_question():
    assert load_template("mini").render("Q") == "Q"


def test_other_braces_and_the_question_are_literal(tmp_path):
    path = tmp_path / "own.txt"
    path.write_bytes(b'{"a": {0}} {question} {{question}\r\n')
    rendered = load_template(path).render("{question} {x} \\1 %s")
    assert rendered == '{"a": {0}} {question} {x} \\1 %s {{question} {x} \\1 %s\r\n'
    assert load_template(str(path)).name == str(path)


def test_refusals_name_the_template(tmp_path):
    with pytest.raises(FileNotFoundError, match="'absent'.*evidence_cot, evidence_cot_one_shot"):
        load_template("absent")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff{question}")
    with pytest.raises(ValueError, match=r"bad\.txt.*not UTF-8"):
        load_template(bad)
    with pytest.raises(ValueError, match=r"'x' has no \{question\}"):
        Template("x", "nothing here")
