"""Checks of a whole file: the failures users met, each made here on disk."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.data import schema
from evisrag_jax.data.schema import Record
from evisrag_jax.data.validate import validate_file
from evisrag_jax.prompts.chat import PromptTooLong


def picture(path, size=(64, 48), seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def row(number, images, **changes):
    return {
        "id": f"q{number}",
        "question": "Q?",
        "images": images,
        "answers": ["1"],
        "is_sufficient": True,
        **changes,
    }


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture
def eight(tmp_path):
    """Eight records; rows 3, 5 and 8 name a cut JPEG, an empty file and a web page."""
    for i in range(1, 9):
        picture(tmp_path / f"{i}.jpg", seed=i)
    data = (tmp_path / "3.jpg").read_bytes()
    (tmp_path / "3.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "5.jpg").write_bytes(b"")
    (tmp_path / "8.jpg").write_bytes(b"<!DOCTYPE html><html><body>404</body></html>")
    return write(tmp_path / "set.jsonl", [row(i, [f"{i}.jpg"]) for i in range(1, 9)])


def test_decoding_finds_the_three_bad_files(eight):
    """B12: the cut JPEG opens without complaint; only a full decode finds it."""
    assert Image.open(eight.parent / "3.jpg").size == (64, 48)
    report = validate_file(eight)
    assert [(f.row, f.id, f.kind) for f in report.errors] == [
        (3, "q3", "broken"),
        (5, "q5", "empty"),
        (8, "q8", "not_image"),
    ]
    assert all(f.path in f.reason and f.path.endswith(f"{f.row}.jpg") for f in report.errors)
    assert (report.rows, report.good, report.images, report.decoded) == (8, 5, 8, True)
    assert not report.ok and report.counts() == {"broken": 1, "empty": 1, "not_image": 1}


def test_looking_up_only_finds_what_the_file_system_knows(eight):
    report = validate_file(eight, decode=False)
    assert [(f.row, f.kind) for f in report.errors] == [(5, "empty")]
    assert not report.decoded


def test_report_is_written_and_can_stop_a_run(eight, tmp_path):
    """B12: a strict run ends before its first step, by name."""
    report = validate_file(eight)
    report.write(tmp_path / "rejected.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [(r["row"], r["id"], r["stage"], r["reason"]) for r in rows] == [
        (3, "q3", "validate", "broken"),
        (5, "q5", "validate", "empty"),
        (8, "q8", "validate", "not_image"),
    ]
    assert all("jpg" in r["detail"] and r["severity"] == "error" for r in rows)
    with pytest.raises(ValueError, match=r"3 error\(s\) in 8 row\(s\)\n  row 3 \(q3\): .*3\.jpg"):
        report.require_ok()
    with pytest.raises(ValueError, match="and 2 more"):
        report.require_ok(shown=1)


def test_wrong_and_unsafe_paths_are_each_reported_with_their_row(tmp_path, monkeypatch):
    """B71: six rows, five problems, without opening one picture."""
    picture(tmp_path / "a.jpg")
    (tmp_path / "._a.jpg").write_bytes(b"\0\5\26\7")
    rows = [
        row(1, ["/home/author/data/a.jpg"]),
        row(2, ["a.jpg"]),
        row(3, ["file:///data/a.jpg"]),
        row(4, ["missing.jpg"]),
        row(5, ["._a.jpg"]),
        row(6, ["../../etc/passwd"]),
    ]
    path = write(tmp_path / "set.jsonl", rows)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("a picture was opened"))
    report = validate_file(path, decode=False)
    assert [(f.row, f.id, f.kind) for f in report.errors] == [
        (1, "q1", "path"),
        (3, "q3", "path"),
        (4, "q4", "missing"),
        (5, "q5", "path"),
        (6, "q6", "path"),
    ]
    assert report.good == 1


def test_golds_of_unexpected_type_are_reported_with_row_and_reason(tmp_path):
    """B66."""
    picture(tmp_path / "a.jpg")
    golds = ["5", ["5", "five"], 5, None, "", []]
    path = write(tmp_path / "s.jsonl", [row(i, ["a.jpg"], answers=g) for i, g in enumerate(golds)])
    report = validate_file(path)
    assert [(f.row, f.kind) for f in report.errors] == [
        (3, "type"),
        (4, "type"),
        (5, "value"),
        (6, "value"),
    ]
    assert all("field 'answers'" in f.reason for f in report.errors)


def test_every_image_is_decoded_once_and_progress_is_told(tmp_path):
    picture(tmp_path / "a.jpg")
    path = write(tmp_path / "s.jsonl", [row(i, ["a.jpg"]) for i in range(5)])
    told = []
    report = validate_file(path, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 1)] and report.ok and report.good == 5


def test_prompt_lengths_are_checked_before_a_run(tmp_path):
    """B06: five pages of 4,956 tokens do not fit 15,000; the record is named, nothing is cut."""
    picture(tmp_path / "a.jpg")
    rows = [row(count, ["a.jpg"], question="x" * count) for count in (3, 5)]
    path = write(tmp_path / "s.jsonl", rows)

    def tokens(record):
        return 4956 * len(record.question)

    report = validate_file(path, tokens=tokens, max_tokens=15_000)
    assert [(f.id, f.kind) for f in report.errors] == [("q5", "too_long")]
    assert "24780 tokens, the limit is 15000" in report.errors[0].reason
    assert report.tokens == {"q3": 14_868, "q5": 24_780}

    def refuse(record):
        raise PromptTooLong(record.id, 24_780, 15_000)

    report = validate_file(path, tokens=refuse)
    assert [f.kind for f in report.errors] == ["too_long", "too_long"]
    with pytest.raises(ValueError, match="needs a tokens function"):
        validate_file(path, max_tokens=5)


def test_doubtful_content_is_a_warning(tmp_path):
    picture(tmp_path / "a.jpg")
    rows = [
        row(1, []),
        row(2, ["a.jpg", "a.jpg"]),
        row(3, ["a.jpg"], evidence=[None]),
        row(4, ["a.jpg"], answers=["Insufficient to answer."]),
        row(5, ["a.jpg"], note="kept elsewhere"),
    ]
    report = validate_file(write(tmp_path / "s.jsonl", rows))
    assert report.ok
    assert [(f.row, f.severity) for f in report.findings] == [(i, "warning") for i in range(1, 6)]
    assert "note" in report.findings[-1].reason


def test_an_empty_file_is_not_ok(tmp_path):
    report = validate_file(write(tmp_path / "s.jsonl", []))
    assert not report.ok and report.errors == ()
    with pytest.raises(ValueError, match="no rows"):
        report.require_ok()


def test_unreadable_files_are_findings(tmp_path):
    folder = tmp_path / "page.jpg"
    folder.mkdir()
    record = Record("a", "q", (str(folder),), ("1",), True)
    schema.write_records(tmp_path / "s.jsonl", [record])
    for decode in (True, False):
        report = validate_file(tmp_path / "s.jsonl", decode=decode)
        assert [f.kind for f in report.errors] == ["missing"], os.fspath(folder)
