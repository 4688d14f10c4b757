"""The ways to answer beside EvidenceCoT: templates, several calls, pages put together, and the registry."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.data.schema import Record
from evisrag_jax.methods.base import Method, MethodError, last_boxed, read_answer
from evisrag_jax.methods.chain import Chain, Stage
from evisrag_jax.methods.one_call import OneCall
from evisrag_jax.methods.registry import METHODS, describe, make_method
from evisrag_jax.methods.visrag_gen import PageConcat, WeightedSelection, concat_pages, select
from evisrag_jax.pages.plan import BUDGETS
from evisrag_jax.prompts.sections import TAGS
from evisrag_jax.prompts.template import NAMES, Template, load_template
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.rollout.sampling import SamplingConfig

SHORT = SamplingConfig(temperature=0.0, max_tokens=8)
BARE = Template("bare", "{question}")
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "retriever.json").read_text())


class Scripted(Engine):
    """Answers by request id, (text, log-prob a token); keeps what it was asked."""

    def __init__(self, real, answers):
        self.tokenizer, self.layout, self.buckets = real.tokenizer, real.layout, real.buckets
        self.answers, self.asked = answers, []

    def generate(self, requests, sampling, *, group=1, seed=0, step=0, params=None):
        self.asked += requests
        return [[_completion(*self.answers[r.id])] for r in requests]


def _completion(text, logp=-0.5):
    n = max(1, len(text))
    offsets = np.stack([np.arange(n), np.arange(1, n + 1)], 1).astype(np.int32)
    return Completion(np.zeros(n, np.int32), np.full(n, logp, np.float32), text, offsets, "stop", n)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages")
    for i, size in enumerate([(84, 56), (56, 56)]):
        pixels = np.random.default_rng(i).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path / f"{i}.png")
    return [str(path / f"{i}.png") for i in range(2)]


def record(pages, name="q", **fields):
    return Record(name, "what?", tuple(pages), ("42",), True, **fields)


@pytest.mark.parametrize(
    ("text", "answer", "whole"),
    [
        ("<think>x</think><answer> 5 </answer>", "5", "5"),
        (r"so \boxed{5 \text{ kg}} it is", r"5 \text{ kg}", r"5 \text{ kg}"),
        (r"\boxed{1} then \boxed{2}", "2", "2"),
        (r"<answer>7</answer> \boxed{2}", "7", "7"),
        (r"\boxed{open", "", r"\boxed{open"),
        (" just 5 ", "", "just 5"),
    ],
)
def test_answers_are_read_from_tags_boxes_or_the_whole(text, answer, whole):
    assert read_answer(text) == answer and read_answer(text, whole=True) == whole
    assert last_boxed("none") is None


@pytest.mark.parametrize("name", [n for n in NAMES if n != "mini"])
def test_templates_fill_in_and_ask_for_what_is_read(name):
    template = load_template(name)
    text = template.render("How {notes} much?", "a {question} b")
    assert ("How {notes} much?" in text) == ("{question}" in template.text)
    assert ("a {question} b" in text) == ("{notes}" in template.text)
    entries = [entry for entry in METHODS.values() if entry.template == name]
    if entries and name != "direct":
        assert "<answer>" in text and "insufficient to answer" in text


def test_the_worked_example_has_the_format_it_teaches():
    from evisrag_jax.prompts.sections import evidence_records, parse_sections

    text = load_template("evidence_cot_one_shot").render("Q?")
    example = text.split("Question: How much more")[1]
    sections = parse_sections(example)
    assert tuple(sections) == TAGS
    assert [r.index for r in evidence_records(example)] == [1, 2, 3]
    assert evidence_records(example)[1].text == "no relevant information"
    assert text.rstrip().endswith("Question: Q?")


def test_every_method_is_made_by_name_and_called_so():
    for name in METHODS:
        method = make_method(name, budget=BUDGETS["mini"])
        assert isinstance(method, Method) and method.name == name and name in describe()
    with pytest.raises(
        ValueError, match="method 'cot'; one of evidence_cot, evidence_cot_one_shot"
    ):
        make_method("cot", budget=BUDGETS["mini"])


def test_two_calls_see_the_pages_and_the_first_ones_notes(make_engine, pages):
    stages = (
        Stage(Template("a", "graph {question}")),
        Stage(Template("b", "{notes} of {question}")),
    )
    base = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s")
    engine = Scripted(make_engine(), {"q#call-1": (" G ",), "q": ("<answer>5</answer>",)})
    (got,) = Chain(stages, base, name="two")([record(pages[:1])], engine)
    first, second = engine.asked
    assert "graph what?" in first.prompt.text and "G of what?" in second.prompt.text
    assert len(first.pages) == len(second.pages) == 1
    assert (got.answer, got.calls, got.generated) == ("5", 2, 3 + len("<answer>5</answer>"))
    assert got.visual_tokens == 2 * len(first.pages[0].merged_index) and got.id == "q"


def test_three_calls_show_pages_in_the_middle_one_alone(make_engine, pages):
    """DDCoT: sub-questions from the text alone, looked up on pages, joined without them; a page that
    cannot be read costs its own question."""
    method = make_method("ddcot_multi", budget=BUDGETS["mini"], sampling=SHORT, on_error="record")
    assert [(s.text.name, s.sees) for s in method.stages] == [
        *(("ddcot_split", False), ("ddcot_look", True), ("ddcot_join", False)),
    ]
    short = tuple(Stage(Template(s.text.name, "{question} {notes}"), s.sees) for s in method.stages)
    answers = {"q#call-1": ("1",), "q#call-2": ("2",), "q": (r"\boxed{3}",), "bad#call-1": ("1",)}
    engine = Scripted(make_engine(), answers)
    base = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s", on_error="record")
    good, bad = Chain(short, base)([record(pages[:1]), record(["gone.png"], "bad")], engine)
    assert [len(r.pages) for r in engine.asked if r.id.startswith("q")] == [0, 1, 0]
    assert "what? 1\n\n2" in engine.asked[-1].prompt.text
    assert good.answer == "3" and good.calls == 3
    assert bad.finish == "error" and "gone.png" in bad.error
    with pytest.raises(MethodError, match=r"gone\.png"):
        Chain(short, OneCall(BARE, BUDGETS["mini"], sampling=SHORT))(
            [record(["gone.png"], "bad")], engine
        )


@pytest.mark.parametrize("case", GOLDEN["page_concat"], ids=lambda case: case["kind"])
def test_golden_page_concat(case):
    """Sizes and offsets of the released function; the page that sets the side is copied pixel for pixel."""
    axis = case["kind"].split("_")[0]
    colours = [(200, 10, 10), (10, 200, 10), (10, 10, 200)]
    sizes = case["sizes"]
    pages = [Image.new("RGB", tuple(s), c) for s, c in zip(sizes, colours, strict=False)]
    got = concat_pages(pages, axis)
    assert list(got.size) == case["canvas"]
    for paste, colour in zip(case["pastes"], colours, strict=False):
        (x, y), (w, h) = paste["offset"], paste["size"]
        for corner in ((x, y), (x + w - 1, y + h - 1)):
            assert got.getpixel(corner) == colour


def test_pages_are_one_picture_in_the_prompt(make_engine, pages):
    method = PageConcat(BARE, BUDGETS["mini"], sampling=SHORT, system="s", axis="vertical")
    engine = Scripted(make_engine(), {"q": ("5",)})
    (got,) = method([record(pages[1:] * 2)], engine)
    assert len(engine.asked[0].pages) == 1 and engine.asked[0].prompt.text.count("image_pad") == 1
    assert got.calls == 1 and got.visual_tokens == len(engine.asked[0].pages[0].merged_index)
    with pytest.raises(ValueError, match="axis='diagonal'"):
        PageConcat(BARE, BUDGETS["mini"], axis="diagonal")


@pytest.mark.parametrize("case", GOLDEN["weighted_selection"]["cases"])
def test_golden_weighted_selection(case):
    scores, sequence = np.array(case["doc_scores"]), np.array(case["sequence_scores"])
    assert select(scores, sequence) == case["selected"]


def test_equal_pages_select_the_first():
    assert select(np.array([0.5, 0.5]), np.array([-1.0, -1.0])) == 0


def test_weighted_selection_takes_a_page_answer(make_engine, pages):
    """Page 2 has the lower score and the likelier answer; the mean log-prob counts, not the sum."""
    base = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s", whole=True)
    answers = {"q#page-1": ("one", -1.0), "q#page-2": ("the second", -0.2)}
    engine = Scripted(make_engine(), answers)
    (got,) = WeightedSelection(base)([record(pages, scores=(0.7, 0.6))], engine)
    assert got.answer == "the second" and got.calls == 2 and got.generated == 3 + 10
    assert [len(r.pages) for r in engine.asked] == [1, 1]
    with pytest.raises(MethodError, match="needs the retrieval score of each page"):
        WeightedSelection(base)([record(pages)], engine)
