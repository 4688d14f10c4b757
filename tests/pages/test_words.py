"""Word files: what is read, what is refused and how the refusal names its place."""

import json
import pickle

import pytest

from evisrag_jax.pages import words as module
from evisrag_jax.pages.align import align_words
from evisrag_jax.pages.words import PageWords, Word, WordsError, read_tesseract, read_words

ROW = {
    "image": "pages/a.png",
    "width": 200,
    "height": 100,
    "words": [
        {"text": "Total", "box": [10, 10, 40, 12], "line": 0},
        {"text": "42", "box": [60, 10, 20, 12]},
    ],
}


def write(folder, rows, name="words.jsonl"):
    path = folder / name
    text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    path.write_text(text, encoding="utf-8")
    return path


def changed(**fields):
    return {**ROW, **fields}


def entry(text="x", box=(0, 0, 10, 10), **more):
    return changed(words=[{"text": text, "box": list(box), **more}])


def test_json_and_jsonl_hold_the_same_pages(tmp_path):
    """The last line needs no newline; keys are the absolute paths that records use."""
    rows = [ROW, changed(image="pages/../b.png")]
    pages = read_words(write(tmp_path, rows))
    assert pages == read_words(write(tmp_path, rows, "words.json"))
    assert list(pages) == [str(tmp_path / "pages/a.png"), str(tmp_path / "b.png")]
    total, number = Word("Total", (10, 10, 40, 12), 0), Word("42", (60, 10, 20, 12))
    assert pages[str(tmp_path / "pages/a.png")] == PageWords((total, number), 200, 100)
    assert read_words(write(tmp_path, ROW, "one.json"), root="/data").keys() == {
        "/data/pages/a.png"
    }


def test_an_ocr_line_is_split_in_proportion(tmp_path):
    page = next(
        iter(read_words(write(tmp_path, [entry("ab  cde", (10, 5, 70, 10), line=3)])).values())
    )
    assert page.words == (Word("ab", (10, 5, 20, 10), 3), Word("cde", (50, 5, 30, 10), 3))
    upright = next(iter(read_words(write(tmp_path, [entry("ab cde", (10, 5, 10, 70))])).values()))
    assert [word.box for word in upright.words] == [(10, 5, 10, 70)] * 2
    # A no-break space may stand inside a number; blank entries are no words.
    number = next(iter(read_words(write(tmp_path, [entry("1\u00a0234")])).values()))
    assert [word.text for word in number.words] == ["1\u00a0234"]
    assert next(iter(read_words(write(tmp_path, [entry(" \u00a0 ")])).values())).words == ()


def test_a_number_in_groups_is_one_word(tmp_path):
    """As statistics print it; several numbers far apart, and other texts, are split."""
    texts = {"10 085 207": 100, "$ 1 385.95": 90, "100 200 300": 400, "in 10 085": 80, "12 0": 40}
    entries = [{"text": t, "box": [10, 10, w, 16]} for t, w in texts.items()]
    (page,) = read_words(write(tmp_path, [changed(width=500, words=entries)])).values()
    assert [word.text for word in page.words] == [
        *("10\u202f085\u202f207", "$\u202f1\u202f385.95", "100", "200", "300"),
        *("in", "10", "085", "12", "0"),
    ]
    matches = [align_words(text, page.words) for text in ("10085207", "1,385.95", "207", "385.95")]
    assert [[m.words for m in found] for found in matches] == [[(0,)], [(1,)], [], []]


def test_boxes_are_cut_to_the_page_and_scale_with_it(tmp_path):
    page = next(iter(read_words(write(tmp_path, [entry(box=(-1, 90, 10, 11))])).values()))
    assert page.words[0].box == (0, 90, 9, 10)
    half = page.scaled(100, 50)
    assert half == PageWords((Word("x", (0, 45, 4.5, 5)),), 100, 50)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1], "is a list"),
        (changed(image=" "), "field 'image'"),
        (changed(width=0), "field 'width': is 0"),
        (changed(height=True), "field 'height'"),
        (changed(width=200.0), "field 'width'"),
        (changed(words={"text": "x"}), "field 'words': is dict"),
        (changed(words=["x"]), "word 1: is not an object"),
        (entry(text=5), "word 1: field 'text': is 5"),
        (entry(line="3"), "field 'line': is '3'"),
        (entry(box=(0, 0, 10)), "write [x, y, width, height]"),
        (entry(box=("0", 0, 1, 1)), "write [x, y, width, height]"),
        (entry(box=(0, 0, float("nan"), 1)), "write [x, y, width, height]"),
        (entry(box=(0, 0, True, 1)), "write [x, y, width, height]"),
        (entry(box=(5, 5, 0, 9)), "no width or no height"),
        # [x0, y0, x1, y1] of a word at the right: reaches 340 on a page of 200.
        (
            entry(box=(150, 80, 190, 92)),
            "leaves the page of 200 x 100 pixels by 140, the limit is 2",
        ),
        (entry(box=(201, 10, 5, 5)), "leaves the page"),
        (entry(box=(-2, 10, 1, 5)), "leaves the page"),
    ],
)
def test_refusals_name_file_line_and_limit(tmp_path, row, said):
    path = write(tmp_path, [changed(image="first.png"), row])
    with pytest.raises(WordsError) as caught:
        read_words(path)
    assert str(caught.value).startswith(f"{path}: line 2")
    assert said in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_files_that_hold_no_rows_are_refused(tmp_path, monkeypatch):
    def refused(path, said):
        with pytest.raises(WordsError, match=said):
            read_words(path)

    refused(write(tmp_path, [ROW, changed(image="./pages/a.png")]), "line 2.*earlier record")
    refused(write(tmp_path, [ROW], "words.txt"), "neither .json nor .jsonl")
    (tmp_path / "cut.jsonl").write_text(json.dumps(ROW)[:-5])
    refused(tmp_path / "cut.jsonl", "line 1: not JSON")
    (tmp_path / "latin.json").write_bytes(b'{"image": "\xe9"}')
    refused(tmp_path / "latin.json", "UTF-8")
    monkeypatch.setattr(module, "MAX_WORDS", 1)
    refused(write(tmp_path, [ROW]), "line 1: image 'pages/a.png': has 2 words; the limit is 1")


HEADER = "level page_num block_num par_num line_num word_num left top width height conf text"
TSV = [
    "1 1 0 0 0 0 0 0 200 100 -1 ",
    "2 1 1 0 0 0 10 10 90 30 -1 ",
    "4 1 1 1 1 0 10 10 90 12 -1 ",
    '5 1 1 1 1 1 10 10 40 12 96.5 "Total',
    "5 1 1 1 1 2 60 10 20 12 91 42",
    "5 1 1 1 2 1 10 30 20 12 91 of",
    "5 1 1 1 2 2 0 0 200 100 95  ",
    "1 2 0 0 0 0 0 0 50 60 -1 ",
    "5 2 1 1 1 1 1 2 3 4 12.0 x",
]


def tsv(folder, rows, header=HEADER):
    path = folder / "page.tsv"
    lines = [header.replace(" ", "\t"), *("\t".join(row.split(" ", 11)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_tesseract(tmp_path):
    first, second = read_tesseract(tsv(tmp_path, TSV))
    assert (first.width, first.height, second.width, second.height) == (200, 100, 50, 60)
    assert first.words == (
        Word('"Total', (10, 10, 40, 12), 0),
        Word("42", (60, 10, 20, 12), 0),
        Word("of", (10, 30, 20, 12), 1),
    )
    assert second.words == (Word("x", (1, 2, 3, 4), 2),)


@pytest.mark.parametrize(
    ("rows", "header", "said"),
    [
        (TSV, HEADER.replace("conf", "score"), "line 1: is not the header"),
        (TSV[1:], HEADER, "line 4: a word of page 1, whose level-1 row is missing"),
        ([TSV[0], "5 1 1 1 1 1 ten 1 1 1 9 x"], HEADER, "line 3: .*not numbers"),
        ([TSV[0], "5 1 1 1 1 1 190 1 50 10 9 x"], HEADER, "line 3: .*leaves the page"),
        ([TSV[0], TSV[0]], HEADER, "line 3: page 1 is there twice"),
        ([TSV[0], "5 1 1"], HEADER, "line 3: has 3 columns, not 12"),
    ],
)
def test_tesseract_refusals(tmp_path, rows, header, said):
    with pytest.raises(WordsError, match=said):
        read_tesseract(tsv(tmp_path, rows, header))
