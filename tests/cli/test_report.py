"""``evisrag report RUN``."""

import json

from evisrag_jax.cli.main import main


def test_writes_a_page_for_every_folder(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        row = {"step": 1, "time": 0.5, "loss/total": 2.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    pages = [tmp_path / name / "report.html" for name in ("a", "b")]
    assert capsys.readouterr().out.split() == [str(page) for page in pages]
    assert all("</html>" in page.read_text() for page in pages)


def test_folders_are_checked_first(tmp_path, refused):
    (tmp_path / "a").mkdir()
    refused(["report", str(tmp_path / "a"), "x"], "x: no such run folder")
    assert not (tmp_path / "a" / "report.html").exists()
    refused(["report"], "report needs the folder of a run")


def test_help(capsys):
    assert main(["report", "--help"]) == 0
    assert "usage: evisrag report RUN [RUN ...]" in capsys.readouterr().out
