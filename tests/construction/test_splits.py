"""The split by document: components, the share, nothing on both sides."""

import numpy as np
import pytest

from evisrag_jax.construction.splits import DocumentSplit, SplitConfig, SplitError, check_no_leak
from tests.construction.made import question


def settle(questions, depth=5, **config):
    split = DocumentSplit(SplitConfig(**config), depth)
    for one in questions:
        split.add(one)
    return split, split.settle()


def components(groups):
    """Sets of documents joined by shared members, by repeated merging: an independent reference."""
    merged = []
    for group in map(set, groups):
        apart = [other for other in merged if not other & group]
        joined = [other for other in merged if other & group]
        merged = [*apart, group.union(*joined)]
    return merged


def drawn_questions(count, documents, seed):
    """Questions about one or two of `documents` letters each, with three other pages around."""
    rng = np.random.default_rng(seed)
    letters = [chr(ord("a") + i) for i in range(documents)]
    made = []
    for i in range(count):
        gold = rng.choice(letters, size=1 + int(rng.random() < 0.3), replace=False)
        others = [x for x in rng.permutation(letters) if x not in gold][:3]
        retrieved = "".join(rng.permutation([*gold, *others]))
        made.append(question(f"q{i}", retrieved, "".join(gold)))
    return made


def test_questions_that_share_documents_stay_together():
    """q1 and q3 share nothing with each other, but both share with q2."""
    made = [question("q1", "a", "a"), question("q2", "ab", "ab"), question("q3", "b", "b")]
    made += [question(f"r{i}", "c", "c") for i in range(12)]
    split, report = settle(made, tolerance=0.01)
    assert [split.side(one) for one in made] == ["grpo"] * 3 + ["sft"] * 12
    assert report == {
        "documents": 3,
        "components": 2,
        "largest_component": 12,
        "questions": {"sft": 12, "grpo": 3},
    }


@pytest.mark.parametrize("link", ["gold", "shown"])
def test_components_against_a_reference(link):
    rng = np.random.default_rng(1)
    made = []
    for i in range(40):
        documents = [chr(0x4E00 + int(j)) for j in rng.choice(120, size=2, replace=False)]
        made.append(
            question(f"q{i}", "".join(documents), documents[0] if i % 3 else "".join(documents))
        )
    split, report = settle(made, link=link, tolerance=1.0)
    pages = {"gold": lambda q: q.relevant, "shown": lambda q: q.retrieved}[link]
    found = components([{page.doc_id for page in pages(one)} for one in made])
    assert report["components"] == len(found) and 1 < len(found) < 40
    for one in found:
        assert len({split.side_of(document) for document in one}) == 1


@pytest.mark.parametrize("seed", range(5))
def test_eight_to_two_within_tolerance(seed):
    """Many small groups: the share is met within one percent."""
    made = [question(f"q{i}", chr(0x4E00 + i // 3), chr(0x4E00 + i // 3)) for i in range(300)]
    split, report = settle(made, tolerance=0.01, seed=seed)
    sft = sum(split.side(one) == "sft" for one in made)
    assert report["questions"] == {"sft": sft, "grpo": 300 - sft} and abs(sft - 240) <= 3


def test_the_seed_deals_equal_groups_out_differently_and_the_order_of_rows_does_not_matter():
    made = [question(f"q{i}", chr(0x4E00 + i), chr(0x4E00 + i)) for i in range(50)]

    def sides(questions, seed):
        split, _ = settle(questions, seed=seed)
        return {one.id: split.side(one) for one in questions}

    assert sides(made, 0) == sides(made[::-1], 0) != sides(made, 1)


def test_contexts_show_pages_of_their_own_side_alone():
    """Gold links: a distractor of the other side is passed over, in order, and nothing leaks."""
    made = drawn_questions(60, 26, seed=2)
    split, _ = settle(made, tolerance=1.0)
    shown = {"sft": set(), "grpo": set()}
    cut = 0
    for one in made:
        side, left = split.side(one), split.restrict(one)
        assert set(left.relevant) == set(one.relevant)
        assert {p.doc_id for p in left.relevant} <= {p.doc_id for p in left.retrieved}
        kept = [p for p in one.retrieved if split.side_of(p.doc_id) == side]
        assert list(left.retrieved) == kept
        cut += len(one.retrieved) - len(kept)
        shown[side] |= {p.doc_id for p in left.retrieved}
    assert cut > 0 and not shown["sft"] & shown["grpo"]
    check_no_leak(shown)


def test_a_document_that_no_question_is_about_has_a_side_by_its_name():
    split, _ = settle([question("q", "a", "a")], tolerance=1.0)
    sides = [split.side_of(f"other {i}") for i in range(1000)]
    assert 760 < sides.count("sft") < 840  # 800 wanted, three standard deviations are 38
    assert sides == [split.side_of(f"other {i}") for i in range(1000)]


def test_what_hangs_together_cannot_be_split():
    made = [question(f"q{i}", f"z{chr(0x4E00 + i)}", chr(0x4E00 + i)) for i in range(20)]
    with pytest.raises(SplitError, match=r"largest has 20, around document.*split.link"):
        settle(made, link="shown")
    _, report = settle(made, link="gold")
    assert report["components"] == 20
    # Only what a context may show counts.
    reverse = [question(f"q{i}", f"{chr(0x4E00 + i)}z", chr(0x4E00 + i)) for i in range(20)]
    _, report = settle(reverse, link="shown", depth=1)
    assert report["components"] == 20


def test_a_leak_is_named():
    check_no_leak({"sft": ["a", "b"], "grpo": ["c"]})
    with pytest.raises(SplitError, match="document 'b' has pages in sft and in grpo"):
        check_no_leak({"sft": ["a", "b"], "grpo": ["c", "b"]})


@pytest.mark.parametrize("bad", [{"share": 1.0}, {"link": "all"}, {"tolerance": 2.0}, {"seed": -1}])
def test_settings_that_cannot_be(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SplitConfig(**bad)
