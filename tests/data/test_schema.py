"""The record's file format: round trip, types, paths. Expected values are written out by hand."""

import json
import pickle

import pytest

from evisrag_jax.data import schema
from evisrag_jax.data.paths import RecordError, resolve_image
from evisrag_jax.data.schema import REFUSALS, Record

ROW = {
    "schema_version": 1,
    "id": "q1",
    "question": "How many sites?",
    "images": ["a.png", "sub/b.png"],
    "answers": ["42", "forty-two"],
    "is_sufficient": True,
}


def read(tmp_path, **changes):
    row = {**ROW, **changes}
    return schema.parse_line(json.dumps(row), "set.jsonl", 7, tmp_path)


def test_a_full_row_is_read_field_by_field(tmp_path):
    record = read(
        tmp_path,
        evidence=["The total is 42.", None],
        response="<answer>42</answer>",
        boxes=[[1, 2, 30, 4.5], None],
        doc_ids=["d1", 7],
        family="lookup",
        scores=[0.5, 1],
    )
    assert record == Record(
        id="q1",
        question="How many sites?",
        images=(str(tmp_path / "a.png"), str(tmp_path / "sub/b.png")),
        answers=("42", "forty-two"),
        is_sufficient=True,
        evidence=("The total is 42.", None),
        response="<answer>42</answer>",
        boxes=(((1.0, 2.0, 30.0, 4.5),), ()),
        doc_ids=("d1", "7"),
        family="lookup",
        scores=(0.5, 1.0),
    )


def test_several_boxes_an_image(tmp_path):
    record = read(tmp_path, boxes=[[[0, 0, 1, 1], [2, 2, 3, 3]], []])
    assert record.boxes == (((0.0, 0.0, 1.0, 1.0), (2.0, 2.0, 3.0, 3.0)), ())


def test_refusal_phrases_are_those_of_the_released_evaluation():
    assert REFUSALS == (
        "no relevant information",
        "insufficient to answer",
        "insufficient to answer the question",
    )


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"answers": 5}, "answers", "5 (int)"),
        ({"answers": None}, "answers", "null"),
        ({"answers": []}, "answers", "empty list"),
        ({"answers": ["5", 5]}, "answers", "5 (int)"),
        ({"answers": [""]}, "answers", "empty answer"),
        ({"answers": {"a": 1}}, "answers", "dict"),
        ({"images": 3}, "images", "3 (int)"),
        ({"images": ["a.png", None]}, "images", "null"),
        ({"is_sufficient": 1}, "is_sufficient", "true or false"),
        ({"is_sufficient": "yes"}, "is_sufficient", "true or false"),
        ({"id": ""}, "id", "non-empty"),
        ({"id": True}, "id", "True (bool)"),
        ({"question": None}, "question", "null"),
        ({"question": " "}, "question", "empty"),
        ({"evidence": ["x"]}, "evidence", "1 entries for 2 image(s)"),
        ({"evidence": "ab"}, "evidence", "one an image"),
        ({"evidence": ["x", ""]}, "evidence", "null for no relevant information"),
        ({"evidence": ["x", 0]}, "evidence", "0 (int)"),
        ({"boxes": [[1, 2, 3], None]}, "boxes", "[x, y, width, height]"),
        ({"boxes": [[1, 2, 0, 3], None]}, "boxes", "width, height > 0"),
        ({"scores": [1.0, float("nan")]}, "scores", "nan"),
        ({"schema_version": 2}, "schema_version", "reads version 1"),
        ({"evidense": ["x", None]}, "evidense", "did you mean 'evidence'"),
    ],
)
def test_wrong_types_are_refused_by_file_line_field_and_reason(tmp_path, changes, field, reason):
    """B66: lists mean "any of"; numbers, null and empty golds never reach a reward."""
    with pytest.raises(RecordError) as caught:
        read(tmp_path, **changes)
    assert caught.value.field == field
    text = str(caught.value)
    assert text.startswith("set.jsonl:7: ") and f"field {field!r}" in text and reason in text


def test_a_missing_field_is_named(tmp_path):
    row = {name: value for name, value in ROW.items() if name != "answers"}
    with pytest.raises(RecordError, match=r"'answers': is missing \(fields found: schema_version"):
        schema.parse_line(json.dumps(row), "set.jsonl", 1, tmp_path)


def test_a_bare_string_is_one_answer_and_one_image_never_characters(tmp_path):
    """B66, B71: neither "12" as 1 and 2, nor a path letter by letter."""
    record = read(tmp_path, answers="12", images="a.png")
    assert record.answers == ("12",)
    assert record.images == (str(tmp_path / "a.png"),)


def test_a_row_without_version_and_with_other_fields_is_read(tmp_path):
    row = {name: value for name, value in ROW.items() if name != "schema_version"}
    row |= {"annotator": "k", "evidence": None, "boxes": None}
    record = schema.parse_line(json.dumps(row), "set.jsonl", 1, tmp_path)
    assert record.evidence == () and record.boxes is None
    assert schema.unknown_fields(row) == ["annotator"]


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', '{"id": "\\ud800"}', "[" * 100_000])
def test_lines_that_are_no_record_are_refused(tmp_path, line):
    with pytest.raises(RecordError, match=r"set\.jsonl:3"):
        schema.parse_line(line, "set.jsonl", 3, tmp_path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/home/author/a.png", "outside the data root"),
        ("../../etc/passwd", "outside the data root"),
        ("sub/../../a.png", "outside the data root"),
        ("..", "outside the data root"),
        (".", "outside the data root"),
        ("file:///data/a.png", "URI"),
        ("https://host/a.png", "URI"),
        ("data:image/png;base64,AA", "URI"),
        ("sub/._a.jpg", "companion"),
        ("C:\\data\\a.png", "Windows"),
        ("sub\\a.png", "Windows"),
        ("", "not a path"),
        ("a\0.png", "not a path"),
    ],
)
def test_unsafe_image_paths_are_refused(tmp_path, path, reason):
    """B71."""
    with pytest.raises(RecordError) as caught:
        resolve_image(path, tmp_path)
    assert caught.value.kind == "path" and reason in str(caught.value)


def test_safe_image_paths(tmp_path):
    assert resolve_image("sub/../a.png", tmp_path) == str(tmp_path / "a.png")
    assert resolve_image(str(tmp_path / "x/a.png"), tmp_path) == str(tmp_path / "x/a.png")
    assert resolve_image("bücher/第1页.png", tmp_path) == str(tmp_path / "bücher/第1页.png")
    sibling = tmp_path.with_name(tmp_path.name + "2")
    with pytest.raises(RecordError):
        resolve_image(str(sibling / "a.png"), tmp_path)


def test_unicode_text_is_written_as_utf8_and_read_back_equal(tmp_path):
    """B67: quotes, full width, both forms of é, no-break space, right to left, emoji."""
    answers = ("“Yes”", "５０", "état", "e\u0301tat", "1\u00a0000", "שלום", "👩‍👩‍👧", "a\u2028b\nc")
    record = Record("ü\u2029", "где?", (str(tmp_path / "страница.png"),), answers, False)
    assert schema.write_records(tmp_path / "set.jsonl", [record]) == 1
    raw = (tmp_path / "set.jsonl").read_bytes()
    assert "“Yes”".encode() in raw and raw.count(b"\n") == 1
    line = raw.decode("utf-8")
    assert schema.parse_line(line, "set.jsonl", 1, tmp_path) == record


def test_writing_keeps_every_field_and_relative_paths(tmp_path):
    record = read(
        tmp_path,
        evidence=[None, "x"],
        response="r",
        boxes=[None, [1, 2, 3, 4]],
        doc_ids=["d", "e"],
        family="f",
        scores=[1, 2],
    )
    row = schema.record_to_row(record, tmp_path)
    assert row["images"] == ["a.png", "sub/b.png"]
    assert schema.record_from_row(json.loads(json.dumps(row)), tmp_path) == record


def test_writing_refuses_what_could_not_be_read(tmp_path):
    target = tmp_path / "set.jsonl"
    inside = Record("a", "q", (str(tmp_path / "a.png"),), ("1",), True)
    outside = Record("b", "q", ("/elsewhere/a.png",), ("1",), True)
    for records, reason in (([inside, outside], "outside"), ([inside, inside], "earlier record")):
        with pytest.raises(RecordError, match=reason):
            schema.write_records(target, records)
    assert list(tmp_path.iterdir()) == []


def test_errors_survive_pickling(tmp_path):
    with pytest.raises(RecordError) as caught:
        read(tmp_path, answers=5)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.row == 7 and again.id == "q1"
