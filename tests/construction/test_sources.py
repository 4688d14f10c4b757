"""Raw questions from the three layouts, and rows that are none."""

import json

import pytest

from evisrag_jax.construction.sources import Page, RawQuestion, iter_questions
from evisrag_jax.data.paths import RecordError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def corpus(folder, *questions):
    pages = [{"page_id": p, "file": f"{p}.png", "doc_id": d} for p, d in ("aA", "bA", "cB")]
    write(folder / "corpus.jsonl", pages)
    base = {
        "id": "q1",
        "question": "Q?",
        "answers": ["5"],
        "answerable": True,
        "relevant_page_ids": ["b"],
        "candidate_page_ids": ["a", "b"],
    }
    write(folder / "questions.jsonl", [base | changes for changes in questions])
    return folder


def test_page_corpus(tmp_path):
    folder = corpus(
        tmp_path,
        {"dataset": "Charts", "retrieved": ["c", "b"], "retrieved_scores": [2, 1.5]},
        {"id": "q2"},
        {"id": "q3", "answerable": False, "relevant_page_ids": [], "doc_id": "A"},
        {"id": "q4", "answerable": False, "relevant_page_ids": []},
    )
    first, second, third, fourth = iter_questions(folder)
    a, b, c = (str(tmp_path / f"{name}.png") for name in "abc")
    assert first == RawQuestion(
        id="q1",
        question="Q?",
        answers=("5",),
        retrieved=(Page(c, "B", 2.0), Page(b, "A", 1.5)),
        relevant=(Page(b, "A"),),
        answerable=True,
        family="Charts",
    )
    # Without a ranking the candidates stand in for it.
    assert second.retrieved == (Page(a, "A"), Page(b, "A"))
    assert first.anchors == ("A",)
    assert third.anchors == ("A",) and third.documents == ("A",)
    assert fourth.anchors == ("A",)  # of its first page


def test_ranked_rows(tmp_path):
    rows = [
        {
            "id": 7,
            "question": "Q?",
            "answers": "x",
            "retrieved": ["p/a.png", {"image": "p/b.png", "doc_id": "B", "score": 0.5}],
            "relevant": [{"image": "p/z.png", "doc_id": "B"}],
            "family": "slides",
        },
        {
            "id": "u",
            "question": "Q?",
            "answers": ["x"],
            "retrieved": ["p/a.png"],
            "relevant": [],
            "answerable": False,
        },
    ]
    first, second = iter_questions(write(tmp_path / "raw.jsonl", rows))
    a, b, z = (str(tmp_path / "p" / f"{name}.png") for name in "abz")
    assert first.retrieved == (Page(a, a), Page(b, "B", 0.5)) and first.relevant == (Page(z, "B"),)
    assert (first.id, first.answers, first.answerable, first.family) == (
        "7",
        ("x",),
        True,
        "slides",
    )
    assert not second.answerable and second.anchors == (a,)
    (moved, _) = iter_questions(tmp_path / "raw.jsonl", image_root=tmp_path / "p" / "..")
    assert moved.retrieved == first.retrieved


def test_record_files(tmp_path):
    """Images in prompt order are the ranking; pages with an evidence line are the relevant ones."""
    row = {
        "id": "r",
        "question": "Q?",
        "images": ["a.png", "b.png"],
        "answers": ["1"],
        "is_sufficient": True,
        "evidence": [None, "one"],
        "doc_ids": ["A", "B"],
        "scores": [2, 1],
    }
    bare = {k: row[k] for k in ("question", "images", "answers", "is_sufficient")} | {"id": "s"}
    first, second = iter_questions(write(tmp_path / "set.jsonl", [row, bare]))
    a, b = (str(tmp_path / f"{name}.png") for name in "ab")
    assert first.retrieved == (Page(a, "A", 2.0), Page(b, "B", 1.0))
    assert first.relevant == (Page(b, "B", 1.0),) and first.answerable
    assert second.relevant == () and second.retrieved == (Page(a, a), Page(b, b))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retrieved": ["a", "zz"]}, "field 'retrieved': names page 'zz', which corpus.jsonl"),
        ({"relevant_page_ids": ["zz"]}, "field 'relevant_page_ids': names page 'zz'"),
        ({"retrieved": ["a", "a"]}, "a.png twice"),
        ({"retrieved": []}, "field 'retrieved': is an empty list"),
        ({"retrieved": "a"}, "field 'retrieved': is 'a' (str); write a list of ids"),
        ({"retrieved": ["a"], "retrieved_scores": [1, 2]}, "field 'retrieved_scores'"),
        ({"retrieved": ["a"], "retrieved_scores": ["x"]}, "holds the score 'x' (str)"),
        ({"answerable": "yes"}, "field 'answerable': is 'yes' (str)"),
        ({"answers": [5]}, "field 'answers': holds 5 (int)"),
        ({"question": " "}, "field 'question': is empty"),
        ({"id": "q0"}, "field 'id': is already used in row 1"),
    ],
)
def test_rows_that_are_none_are_named_and_passed_over(tmp_path, changes, message):
    good, bad, last = iter_questions(
        corpus(tmp_path, {"id": "q0"}, {"id": "bad"} | changes, {"id": "q9"})
    )
    assert (good.id, last.id) == ("q0", "q9") and isinstance(bad, RecordError)
    assert str(bad).startswith(f"{tmp_path / 'questions.jsonl'}:2: ") and message in str(bad)


def test_ranked_paths_may_not_leave_the_root(tmp_path):
    row = {"id": "a", "question": "Q", "answers": ["1"], "relevant": []}
    rows = [row | {"retrieved": ["../x.png"]}, row | {"retrieved": [5]}, {"id": "b"}]
    path = write(tmp_path / "raw.jsonl", rows)
    errors = [str(error) for error in iter_questions(path)]
    assert "outside the data root" in errors[0] and "an image is 5 (int)" in errors[1]
    assert "field 'retrieved': is missing" in errors[2]
