"""``evisrag ask PAGES… "question"``: sections on the terminal, one answer a run folder."""

import json

import pytest

from evisrag_jax.cli.main import main
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.methods.base import Prediction
from evisrag_jax.methods.one_call import OneCall

TAGGED = (
    "<observe> three pages</observe>\n<evidence>\n[1]: Elba tea 28\n[2]: no relevant information\n"
    "</evidence>\n<think> page 1</think>\n<answer> 28</answer>"
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """(pages, question) of a generated record."""
    path = write_dataset(tmp_path_factory.mktemp("data"), 1, "test")
    row = json.loads(path.read_text())
    return [str(path.parent / name) for name in row["images"]], row["question"]


@pytest.fixture
def answer(monkeypatch):
    """The method answers with a text of the test's choice, and keeps the records it was asked."""

    def make(text, finish="stop"):
        records = []

        def call(self, given, engine):
            records.extend(given)
            return [Prediction(r.id, text, "28", finish, 40) for r in given]

        monkeypatch.setattr(OneCall, "__call__", call)
        return records

    return make


def test_a_real_answer_is_printed(tiny_model, asked, capsys):
    """The random model writes no sections, so no panel of one is drawn; an empty text is said."""
    pages, question = asked
    assert main(["ask", *pages, question, "--model", str(tiny_model)]) == 0
    text = capsys.readouterr().out
    assert text.strip() and "╭" not in text


def test_sections_are_shown_by_name(tiny_model, asked, answer, capsys):
    pages, question = asked
    records = answer(TAGGED)
    assert main(["ask", *pages, question, "--model", str(tiny_model)]) == 0
    text = capsys.readouterr().out
    places = [text.index(part) for part in ("observe", "evidence", "think", "answer")]
    assert places == sorted(places)
    assert "[1]: Elba tea 28" in text and "did not end" not in text
    assert list(records[0].images) == pages and records[0].question == question


def test_out_holds_the_last_answer(tiny_model, asked, answer, tmp_path, capsys):
    """A run folder with its report; asked again, the answer is replaced; another run's folder is left."""
    pages, question = asked
    answer(TAGGED)
    command = ["ask", *pages, question, "--model", str(tiny_model), f"--out={tmp_path / 'run'}"]
    assert main(command) == 0
    answer("no page", "length")
    assert main(command) == 0
    assert "did not end by itself (length)" in capsys.readouterr().out
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in rows] == ["no page"] and rows[0]["images"] == pages
    summary = json.loads((run / "summary.json").read_text())
    assert summary["command"] == "ask" and summary["question"] == question
    assert question in (run / "report.html").read_text()
    summary["command"] = "eval"
    (run / "summary.json").write_text(json.dumps(summary))
    assert main(command) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "ask needs pages and a question"),
        (["what is it?"], "ask needs pages and a question"),
        (["missing.png", "what is it?"], "missing.png: no such page image"),
    ],
)
def test_wrong_usage_is_one_line(refused, argv, message):
    refused(["ask", *argv], message)


def test_a_page_that_is_no_image_is_named(tiny_model, tmp_path, refused):
    (tmp_path / "page.png").write_bytes(b"not a picture")
    refused(["ask", "page.png", "what?", "--model", str(tiny_model)], "page.png: not an image", 1)
