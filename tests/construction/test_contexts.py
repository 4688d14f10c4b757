"""Contexts of a ranked list, labelled by the page rule."""

import pytest

from evisrag_jax.construction.contexts import ContextConfig, make_contexts
from tests.construction.made import question


def shown(contexts):
    return [(c.id, c.k, c.sufficient, c.relevant) for c in contexts]


def test_the_page_rule_by_rank():
    """Relevant pages at ranks 2 and 4 of 5: what is shown, and what it suffices for."""
    contexts = make_contexts(question(retrieved="abcde", relevant="bd"), ContextConfig())
    f, t = False, True
    assert shown(contexts) == [
        ("q-top1", 1, f, (f,)),
        ("q-top2", 2, f, (f, t)),
        ("q-top3", 3, f, (f, t, f)),
        ("q-top4", 4, t, (f, t, f, t)),
        ("q-top5", 5, t, (f, t, f, t, f)),
    ]


def test_a_gold_page_that_was_not_retrieved_leaves_every_context_insufficient():
    contexts = make_contexts(question(retrieved="abc", relevant="az"), ContextConfig())
    assert [c.sufficient for c in contexts] == [False] * 3
    assert [c.relevant for c in contexts] == [(True,), (True, False), (True, False, False)]


def test_a_short_list_gives_no_context_of_more_pages():
    contexts = make_contexts(question(retrieved="ab"), ContextConfig(ks=(3, 2)))
    assert [c.id for c in contexts] == ["q-top2"]
    assert make_contexts(question(retrieved="ab"), ContextConfig(ks=(3,))) == []


def test_questions_without_gold_pages():
    """Unanswerable ones are insufficient; answerable ones have no label and give nothing."""
    config = ContextConfig(ks=(1, 2))
    contexts = make_contexts(question(relevant="", answerable=False), config)
    assert [(c.sufficient, any(c.relevant)) for c in contexts] == [(False, False)] * 2
    assert make_contexts(question(relevant=""), config) == []


@pytest.mark.parametrize(
    ("limit", "ids"),
    [
        (-1, ["q-top1", "q-top2", "q-top3", "q-top4"]),
        (0, ["q-top4"]),
        (1, ["q-top3", "q-top4"]),
        (9, ["q-top1", "q-top2", "q-top3", "q-top4"]),
    ],
)
def test_the_number_of_insufficient_contexts_is_limited(limit, ids):
    config = ContextConfig(ks=(1, 2, 3, 4), insufficient=limit)
    assert [c.id for c in make_contexts(question(retrieved="abcd", relevant="d"), config)] == ids


def test_the_record_of_a_context():
    (context,) = make_contexts(question(retrieved="ba", family="slides"), ContextConfig(ks=(2,)))
    record = context.record(evidence=(None, "x"), id="other")
    assert (record.id, record.family, record.scores) == ("other", "slides", None)
    assert record.images == ("/x/b.png", "/x/a.png") and record.doc_ids == ("B", "A")
    assert record.is_sufficient and record.evidence == (None, "x") and record.answers == ("42",)


@pytest.mark.parametrize("bad", [{"ks": ()}, {"ks": (0,)}, {"ks": (1, 1)}, {"insufficient": -2}])
def test_settings_that_cannot_be(bad):
    with pytest.raises(ValueError, match=f"contexts.{next(iter(bad))}"):
        ContextConfig(**bad)
