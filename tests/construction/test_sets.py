"""Files put in place whole, pages placed by content, rows picked for inspection."""

import itertools
import os
from pathlib import Path

import pytest

from evisrag_jax.construction.page_files import PageFiles
from evisrag_jax.construction.sets import InspectionPick, StreamedFile
from evisrag_jax.pages.decode import PageError
from tests.construction.made import draw_pages


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("old\n")
    file = StreamedFile(path)
    offsets = [file.write_row({"n": n, "text": "ü\u2028"}) for n in range(3)]
    assert file.line(offsets[1]) == '{"n": 1, "text": "ü\u2028"}\n' and path.read_text() == "old\n"
    file.write("last\n")
    file.commit()
    assert path.read_bytes().count(b"\n") == file.rows == 4
    file.discard()
    assert list(tmp_path.iterdir()) == [path]
    other = StreamedFile(path)
    other.write("never\n")
    other.discard()
    assert path.read_bytes().count(b"\n") == 4 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("links", [True, False])
def test_pages_are_placed_by_content(tmp_path, monkeypatch, links):
    draw_pages(tmp_path / "raw", ["a", "b"])
    (tmp_path / "raw" / "twin.PNG").write_bytes((tmp_path / "raw" / "a.png").read_bytes())
    if not links:

        def refuse(*_):
            raise OSError("another file system")

        monkeypatch.setattr(os, "link", refuse)
    pages = PageFiles(tmp_path / "run")
    a, b, twin = (pages.place(str(tmp_path / "raw" / n)) for n in ("a.png", "b.png", "twin.PNG"))
    assert a == twin != b and a.startswith(str(tmp_path / "run" / "pages"))
    assert Path(a).read_bytes() == (tmp_path / "raw" / "a.png").read_bytes()
    assert (Path(a).stat().st_nlink == 2) is links
    assert PageFiles(tmp_path / "run").place(str(tmp_path / "raw" / "a.png")) == a
    assert pages.place(a) == a and len(list((tmp_path / "run" / "pages").iterdir())) == 2


def test_a_page_that_is_not_there_is_named(tmp_path):
    pages = PageFiles(tmp_path)
    for _ in range(2):
        with pytest.raises(PageError, match=r"gone\.png: No such file"):
            pages.digest(str(tmp_path / "gone.png"))


def test_a_pick_is_the_same_whatever_the_order():
    rows = [{"id": f"r{i}", "is_sufficient": i % 3 > 0} for i in range(9)]

    def pick(order, sizes=(2, 2), seed=0):
        chosen = InspectionPick(sizes, seed)
        for row in order:
            chosen.offer(row)
        return [row["id"] for row in chosen.rows()]

    first = pick(rows)
    kinds = [int(id[1:]) % 3 > 0 for id in first]
    assert kinds == [True, True, False, False]
    for order in itertools.islice(itertools.permutations(rows), 0, 362_880, 40_000):
        assert pick(order) == first
    assert len({tuple(pick(rows, seed=seed)) for seed in range(5)}) > 1
    assert len(pick(rows, sizes=(99, 0))) == 6 and pick(rows, sizes=(0, 0)) == []
    assert set(pick(rows, sizes=(1, 0))) < set(pick(rows, sizes=(2, 0)))
