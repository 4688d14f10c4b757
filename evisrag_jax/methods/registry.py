"""The methods by name: what `evisrag eval --method NAME` knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from evisrag_jax.methods.base import Method
from evisrag_jax.methods.chain import Chain, Stage
from evisrag_jax.methods.one_call import OneCall
from evisrag_jax.methods.visrag_gen import PageConcat, WeightedSelection
from evisrag_jax.pages.plan import PixelBudget


@dataclass(frozen=True)
class Entry:
    """summary: a line.  template: of its (last) call.  make: OneCall settings → method."""

    summary: str
    template: str
    make: Callable[[OneCall], Method]


def _one(base: OneCall) -> Method:
    return base


def _direct(base: OneCall) -> Method:
    return replace(base, whole=True)


def _concat(axis: str) -> Callable[[OneCall], Method]:
    def make(base: OneCall) -> Method:
        return PageConcat(**vars(base) | {"axis": axis, "whole": True, "features": None})

    return make


def _chain(*stages: Stage) -> Callable[[OneCall], Method]:
    """Calls before the last one with their own templates; a template that replaces the method's replaces
    all of them (a model that knows one prompt only)."""

    def make(base: OneCall) -> Method:
        names = [stage.template for stage in stages]
        own = base.template.name in names
        used = stages if own else tuple(replace(stage, template=base.template) for stage in stages)
        return Chain(used, base, name=base.name)

    return make


METHODS: dict[str, Entry] = {
    "evidence_cot": Entry(
        "observe, evidence a page, think, answer (EVisRAG)", "evidence_cot", _one
    ),
    "evidence_cot_one_shot": Entry("the same with a worked example", "evidence_cot_one_shot", _one),
    "generic_cot": Entry("think, answer", "generic_cot", _one),
    "direct": Entry("the answer alone", "direct", _direct),
    "cocot": Entry("likenesses and differences of the pages, answer", "cocot", _one),
    "ccot": Entry("scene graphs and answer in one call", "ccot", _one),
    "ddcot": Entry("sub-questions and answer in one call", "ddcot", _one),
    "ccot_two_call": Entry(
        "scene graphs, then the answer from graphs and pages",
        "ccot_answer",
        _chain(Stage("ccot_graph"), Stage("ccot_answer")),
    ),
    "ddcot_multi": Entry(
        "sub-questions without pages, looking them up, joining without pages",
        "ddcot_join",
        _chain(Stage("ddcot_split", False), Stage("ddcot_look"), Stage("ddcot_join", False)),
    ),
    "page_concat": Entry("pages side by side as one picture", "direct", _concat("horizontal")),
    "page_concat_vertical": Entry("pages below each other as one", "direct", _concat("vertical")),
    "weighted_selection": Entry(
        "an answer a page, the best by retrieval score and likelihood",
        "direct",
        lambda base: WeightedSelection(replace(base, whole=True)),
    ),
}


def make_method(name: str, *, budget: PixelBudget, template: Any = "", **settings: Any) -> Method:
    """A method by name. template: replaces its own unless ""; settings: further ones of `OneCall`.

    ValueError that lists the names for an unknown one.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r}; one of {', '.join(METHODS)}")
    entry = METHODS[name]
    base = OneCall(template=template or entry.template, budget=budget, name=name, **settings)
    return entry.make(base)


def describe() -> str:
    """A line a method, for help texts."""
    width = max(map(len, METHODS))
    return "\n".join(f"  {name:{width}}  {entry.summary}" for name, entry in METHODS.items())
