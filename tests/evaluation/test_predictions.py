"""The predictions file: interrupted, resumed, repeated."""

import json

import pytest

from evisrag_jax.evaluation.predictions import PredictionWriter, match_predictions
from evisrag_jax.runtime.json_files import JsonFileError


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_rows_are_on_disk_before_the_next_and_finished_at_once(tmp_path):
    """B68: nothing at the final path until the file is whole."""
    path = tmp_path / "run" / "predictions.jsonl"
    with PredictionWriter(path) as writer:
        writer.write({"id": "b", "prediction": "état"})
        writer.write({"id": "a", "prediction": "שלום"})
        assert [row["id"] for row in lines(writer.partial)] == ["b", "a"]
        assert not path.exists()
        writer.finalise(order=["a", "b", "c"])
    assert [(row["id"], row["prediction"]) for row in lines(path)] == [("a", "שלום"), ("b", "état")]
    assert "état" in path.read_text("utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["predictions.jsonl"]


def test_a_torn_last_line_is_dropped_and_written_again(tmp_path):
    """B68: killed in the middle of a row."""
    path = tmp_path / "predictions.jsonl"
    first = PredictionWriter(path)
    first.write({"id": "a"})
    first.close()
    with first.partial.open("a", encoding="utf-8") as file:
        file.write('{"id": "b", "predic')
    second = PredictionWriter(path)
    assert second.done_ids == {"a"}
    second.write({"id": "b"})
    assert [row["id"] for row in lines(second.partial)] == ["a", "b"]
    second.finalise()
    assert [row["id"] for row in lines(path)] == ["a", "b"]


def test_a_finished_file_can_be_extended(tmp_path):
    path = tmp_path / "predictions.jsonl"
    for id in ("a", "b"):
        writer = PredictionWriter(path)
        writer.write({"id": id})
        writer.finalise()
    assert [row["id"] for row in lines(path)] == ["a", "b"]
    unfinished = PredictionWriter(path)
    unfinished.write({"id": "c"})
    unfinished.close()
    assert len(lines(path)) == 2  # the finished file stays whole
    assert PredictionWriter(path).done_ids == {"a", "b", "c"}


def test_one_row_an_id(tmp_path):
    """B68: running twice appends nothing twice."""
    writer = PredictionWriter(tmp_path / "predictions.jsonl")
    writer.write({"id": "a"})
    with pytest.raises(JsonFileError, match="'a' has a prediction already"):
        writer.write({"id": "a"})
    for row in ({}, {"id": ""}, {"id": 3}):
        with pytest.raises(JsonFileError, match="needs an id"):
            writer.write(row)
    writer.close()
    with pytest.raises(JsonFileError, match="closed"):
        writer.write({"id": "b"})
    assert len(lines(writer.partial)) == 1


@pytest.mark.parametrize("content", ['{"id": "a"}\n{"id": "a"}\n', '{"id": "a"}\nnot json\n'])
def test_a_damaged_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "predictions.jsonl"
    path.write_text(content)
    with pytest.raises(JsonFileError, match=r"predictions\.jsonl.*2"):
        PredictionWriter(path)


def test_missing_duplicate_and_unknown_rows():
    """B68: ten questions, rows for seven of them, two twice."""
    ids = [f"q{i}" for i in range(10)]
    rows = [{"id": id, "n": 1} for id in ids[:7]] + [{"id": "q2", "n": 2}, {"id": "q5", "n": 2}]
    chosen, coverage = match_predictions(ids, rows)
    assert (coverage.n_expected, coverage.n_predicted) == (10, 7)
    assert (coverage.n_missing, coverage.n_duplicate) == (3, 2)
    assert coverage.missing == ("q7", "q8", "q9") and coverage.duplicate == ("q2", "q5")
    assert chosen["q2"]["n"] == 1 and list(chosen) == ids[:7]
    with pytest.raises(ValueError, match="3 of 10 questions have no prediction and 2 have several"):
        coverage.require_complete()
    match_predictions(ids[:7], rows[:7])[1].require_complete()
    with pytest.raises(ValueError, match="p.jsonl: row 2: question 'zz' is not in the set"):
        match_predictions(ids, [rows[0], {"id": "zz"}], source="p.jsonl")
    with pytest.raises(ValueError, match="more than once"):
        match_predictions(["a", "a"], [])
