"""What records are trained to say, and how they share prompts."""

from evisrag_jax.data.schema import Record
from evisrag_jax.sft.targets import group_records, own_targets


def record(id, response="r", *, question="q", answers=("a",), sufficient=True, images=("p.png",)):
    return Record(id, question, images, answers, sufficient, response=response)


def test_own_targets():
    assert own_targets(record("1", "text"), "response") == ("text",)
    assert own_targets(record("1", None), "response") == ()
    assert own_targets(record("1", " \n"), "response") == ()
    assert own_targets(record("1", answers=("a", "b", "a")), "answers") == ("a", "b")
    assert own_targets(record("1", answers=("a",), sufficient=False), "answers") == (
        "insufficient to answer",
    )


def test_records_of_one_prompt_become_a_group():
    """The same question about the same pages in the same order; repeated responses count once."""
    records = [
        record("1", "x"),
        record("2", "y", question="other"),
        record("3", "z"),
        record("4", "x"),
        record("5", "v", images=("o.png",)),
        record("6", None),
    ]
    heads, targets, empty = group_records(records, "response", 4)
    assert [r.id for r in heads] == ["1", "2", "5"] and [r.id for r in empty] == ["6"]
    assert [targets(r) for r in heads] == [("x", "z"), ("y",), ("v",)]
    assert len(targets) == 4 and targets(record("7")) == ()


def test_group_larger_than_g_goes_on_in_another():
    records = [record(str(i), f"r{i}") for i in range(5)]
    heads, targets, _ = group_records(records, "response", 2)
    assert [targets(r) for r in heads] == [("r0", "r1"), ("r2", "r3"), ("r4",)]
