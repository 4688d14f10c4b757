"""Readers of the official and other layouts, on rows written by hand."""

import json
import sys
import types
from pathlib import Path

import pytest

from evisrag_jax.data import sources
from evisrag_jax.data.paths import RecordError
from evisrag_jax.data.schema import Record

GOLD = (
    "<observe>Look.</observe>\n<evidence>\n[1]: The bar shows 42 (see [2]).\n"
    "[2]: No relevant information.\n</evidence>\n<think>So.</think>\n<answer>42</answer>"
)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def training(**changes):
    row = {
        "prompt": "Four steps. <image><image>\nQuestion: How many?\n",
        "answer": GOLD,
        "image": ["a.png", "b.png"],
    }
    return {**row, **changes}


def test_official_test_file(tmp_path):
    """Fields of the released test sets (EVisRAG section 9)."""
    rows = [
        {"qid": 3, "image": ["a.png"], "query": "Q?", "answer": ["x", "y"], "is_sufficient": True},
        {"qid": "k", "image": "b.png", "query": "R?", "answer": "12", "is_sufficient": 0},
    ]
    records = sources.read_records(write(tmp_path / "top3_test.jsonl", rows))
    assert records == [
        Record("3", "Q?", (str(tmp_path / "a.png"),), ("x", "y"), True),
        Record("k", "R?", (str(tmp_path / "b.png"),), ("12",), False),
    ]


def test_official_training_file(tmp_path):
    """Fields of the released training set (EVisRAG section 6); gold evidence line by line."""
    (record,) = sources.read_records(write(tmp_path / "grpo.jsonl", [training()]))
    assert record == Record(
        id="grpo-000001",
        question="How many?",
        images=(str(tmp_path / "a.png"), str(tmp_path / "b.png")),
        answers=("42",),
        is_sufficient=True,
        evidence=("The bar shows 42 (see [2]).", None),
        response=GOLD,
    )


def test_training_gold_without_reasoning_on_one_line_and_insufficient(tmp_path):
    gold = (
        "<evidence>[1]: no relevant information [2]: no relevant information</evidence>"
        "<answer>Insufficient to answer.</answer>"
    )
    rows = [training(answer=gold, prompt="<image><image>Why?", qid="z")]
    (record,) = sources.read_records(write(tmp_path / "grpo.jsonl", rows))
    assert record.id == "z" and record.question == "Why?"
    assert record.evidence == (None, None) and not record.is_sufficient
    assert record.response is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answer": "5"}, "no <evidence> and <answer> section"),
        ({"answer": ["5", "five"]}, "one tagged string"),
        ({"answer": 5}, "5 (int)"),
        ({"answer": None}, "null"),
        ({"answer": ""}, "no <evidence> and <answer>"),
        ({"answer": GOLD.replace("42</answer>", "</answer>")}, "empty <answer>"),
        ({"answer": GOLD.replace("[2]: No", "[3]: No")}, "found [1], [3]"),
        ({"answer": GOLD.replace("No relevant information.", "")}, "empty evidence record [2]"),
        ({"image": ["a.png"]}, "2 <image> marker(s) for 1 image(s)"),
        ({"image": [b"x".hex(), 4]}, "4 (int)"),
        ({"prompt": ["<image>"]}, "not a string"),
        ({"prompt": "<image><image>\nQuestion:  "}, "is empty"),
    ],
)
def test_training_golds_are_checked_at_load_with_their_row(tmp_path, changes, reason):
    """B66: the gold that would crash a reward worker at step k is refused before step 1."""
    path = write(tmp_path / "grpo.jsonl", [training(), training(**changes)])
    with pytest.raises(RecordError) as caught:
        sources.read_records(path)
    assert str(caught.value).startswith(f"{path}:2: ") and reason in str(caught.value)


def test_on_error_collects_and_the_rest_is_read(tmp_path):
    rows = [training(), training(answer="5"), training(id="c")]
    errors = []
    path = write(tmp_path / "grpo.jsonl", rows)
    records = sources.read_records(path, on_error=errors.append)
    assert [r.id for r in records] == ["grpo-000001", "c"]
    assert [(e.row, e.field) for e in errors] == [(2, "answer")]


def test_a_test_file_whose_row_lacks_a_field_names_the_official_field(tmp_path):
    good = {"qid": 1, "image": [], "query": "Q", "answer": ["x"], "is_sufficient": True}
    path = write(tmp_path / "t.jsonl", [good, {k: v for k, v in good.items() if k != "query"}])
    with pytest.raises(RecordError, match="'query': is missing"):
        sources.read_records(path)


def test_repeated_ids_are_refused_with_both_rows(tmp_path):
    row = {"id": "a", "question": "q", "images": [], "answers": ["1"], "is_sufficient": True}
    path = write(tmp_path / "s.jsonl", [row, {**row, "id": "b"}, row])
    with pytest.raises(RecordError, match=r"s\.jsonl:3: record 'a'.*already used in row 1"):
        sources.read_records(path)


def test_json_list_blank_lines_bom_and_bytes(tmp_path):
    row = {"id": "a", "question": "q", "images": [], "answers": ["1"], "is_sufficient": True}
    listed = tmp_path / "s.json"
    listed.write_text(json.dumps([row, {**row, "id": "b"}]), encoding="utf-8")
    assert [r.id for r in sources.read_records(listed)] == ["a", "b"]
    lines = tmp_path / "s.jsonl"
    lines.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\r\n\n\xff\xfe\n")
    errors = []
    assert [r.id for r in sources.read_records(lines, on_error=errors.append)] == ["a"]
    assert [(e.row, e.kind) for e in errors] == [(3, "json")]
    listed.write_text("{}", encoding="utf-8")
    with pytest.raises(RecordError, match="not a list of rows"):
        sources.read_records(listed)


def test_image_root_moves_the_start_and_the_border(tmp_path):
    folder = tmp_path / "lists"
    folder.mkdir()
    row = {"qid": 1, "image": ["p/a.png"], "query": "Q", "answer": ["x"], "is_sufficient": True}
    (record,) = sources.read_records(write(folder / "t.jsonl", [row]), image_root=tmp_path)
    assert record.images == (str(tmp_path / "p/a.png"),)


class _FakeParquet(types.ModuleType):
    """Stands in for pyarrow.parquet: the calls this reader makes, on rows kept in memory."""

    rows: list = []

    class ParquetFile:
        def __init__(self, path):
            self.path = path

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def iter_batches(self, batch_size):
            for start in range(0, len(_FakeParquet.rows), 1):
                batch = _FakeParquet.rows[start : start + 1]
                yield types.SimpleNamespace(to_pylist=lambda batch=batch: batch)


def parquet_rows(tmp_path, monkeypatch, rows):
    """A parquet file of ``rows``: a real one where pyarrow is installed, else through the fake."""
    path = tmp_path / "set.parquet"
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        package = types.ModuleType("pyarrow")
        package.parquet = _FakeParquet("pyarrow.parquet")
        monkeypatch.setitem(sys.modules, "pyarrow", package)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", package.parquet)
        monkeypatch.setattr(_FakeParquet, "rows", rows)
        path.touch()
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_parquet_with_pictures_as_bytes(tmp_path, monkeypatch):
    row = training(image=[{"bytes": b"picture", "path": None}, {"bytes": None, "path": "b.png"}])
    path = parquet_rows(tmp_path, monkeypatch, [row])
    with pytest.raises(RecordError, match="extract_to"):
        sources.read_records(path)
    (record,) = sources.read_records(path, extract_to=tmp_path / "pages")
    first, second = record.images
    assert second == str(tmp_path / "b.png")
    assert Path(first).read_bytes() == b"picture"
    assert sources.read_records(path, extract_to=tmp_path / "pages") == [record]
    assert len(list((tmp_path / "pages").iterdir())) == 1


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "set.parquet").touch()
    with pytest.raises(ImportError, match="pip install pyarrow"):
        sources.read_records(tmp_path / "set.parquet")


def corpus(tmp_path, **changes):
    pages = [
        {"page_id": "d-p1", "file": "pages/1.jpg", "doc_id": "d", "text": "one"},
        {"page_id": "d-p2", "file": "pages/2.jpg", "doc_id": "d"},
        {"page_id": "c", "file": "pages/c.png"},
    ]
    question = {
        "id": "q1",
        "dataset": "Charts",
        "question": "Q?",
        "answers": ["5"],
        "answerable": True,
        "relevant_page_ids": ["d-p2"],
        "candidate_page_ids": ["c", "d-p2"],
        "split": "dev",
        "scope": "page",
    }
    questions = [
        {**question, **changes},
        {**question, "id": "q2", "candidate_page_ids": ["c", "d-p1"], "split": "test"},
        {**question, "id": "q3", "answerable": False, "relevant_page_ids": []},
        {**question, "id": "q4", "relevant_page_ids": []},
    ]
    write(tmp_path / "corpus.jsonl", pages)
    write(tmp_path / "questions.jsonl", questions)
    return tmp_path


def test_page_corpus(tmp_path):
    """Sufficiency by the page rule: answerable, and every relevant page among the candidates."""
    records = sources.read_corpus_questions(corpus(tmp_path))
    assert [(r.id, r.is_sufficient) for r in records] == [
        ("q1", True),
        ("q2", False),
        ("q3", False),
        ("q4", True),
    ]
    assert records[0] == Record(
        id="q1",
        question="Q?",
        images=(str(tmp_path / "pages/c.png"), str(tmp_path / "pages/2.jpg")),
        answers=("5",),
        is_sufficient=True,
        doc_ids=("c", "d"),
        family="Charts",
    )
    assert sources.read_records(tmp_path) == records


def test_page_corpus_by_split_and_its_errors(tmp_path):
    records = sources.read_corpus_questions(corpus(tmp_path), split="test", scope="page")
    assert [r.id for r in records] == ["q2"]
    with pytest.raises(ValueError, match="none of 4 questions has split=val"):
        sources.read_corpus_questions(tmp_path, split="val")
    corpus(tmp_path, candidate_page_ids=["zz"])
    with pytest.raises(RecordError, match=r"questions\.jsonl:1: record 'q1'.*'zz'"):
        sources.read_corpus_questions(tmp_path)
    write(tmp_path / "corpus.jsonl", [{"page_id": "a", "file": "../../etc/passwd"}])
    with pytest.raises(RecordError, match=r"corpus\.jsonl:1.*outside the data root"):
        sources.read_corpus_questions(tmp_path)
