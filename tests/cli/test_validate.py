"""``evisrag validate``: bad rows and bad images by row number, and an exit status that says so."""

import json

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.cli.main import main
from experiments.mini.tokenizer import build


def row(id, images, **more):
    base = {"id": id, "question": "what is the", "answers": ["1"], "is_sufficient": True}
    return {**base, "images": images, **more}


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def good(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    for name in ("a.png", "b.png"):
        Image.fromarray(pixels).save(tmp_path / name)
    return [row("one", ["a.png"]), row("two", ["a.png", "b.png"])]


def test_good_file(good, tmp_path, capsys):
    assert main(["validate", write(tmp_path / "d.jsonl", good)]) == 0
    assert "2 of 2 rows can be used; 2 images decoded; 0 errors" in capsys.readouterr().out


def test_unusable_paths_are_found_without_decoding(good, tmp_path, capsys):
    """B71: foreign absolute path, file URI, missing file, Mac companion, a path out of the root."""
    images = [
        "/home/author/p.png",
        "a.png",
        "file:///p.png",
        "gone.png",
        "._a.png",
        "../../etc/passwd",
    ]
    rows = [row(f"r{i}", [image]) for i, image in enumerate(images)]
    path = write(tmp_path / "d.jsonl", rows)
    assert main(["validate", path, "--nodecode"]) == 1
    out = capsys.readouterr().out
    found = [line for line in out.splitlines() if line.startswith("row ")]
    errors = {int(line.split()[1]) for line in found if ": error: " in line}
    assert errors == {1, 3, 4, 5, 6}
    assert "1 of 6 rows can be used; 2 images looked up; 5 errors" in out


def test_images_that_do_not_decode_are_found(good, tmp_path, capsys):
    """B12: cut, empty and not an image; with --out also as files."""
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "zero.png").write_bytes(b"")
    (tmp_path / "page.png").write_bytes(b"<html></html>")
    bad = [row(name, [name]) for name in ("cut.jpg", "zero.png", "page.png")]
    path = write(tmp_path / "d.jsonl", [*good, *bad])
    assert main(["validate", path, f"--out={tmp_path / 'run'}"]) == 1
    out = capsys.readouterr().out
    for number, name in ((3, "cut.jpg"), (4, "zero.png"), (5, "page.png")):
        assert f"row {number} ({name}): error" in out
    lines = (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["cut.jpg", "zero.png", "page.png"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rows"], summary["good"], summary["errors"]) == (5, 2, 3)


def test_long_prompts_are_found_before_a_run(good, tmp_path, capsys):
    """B15: with a model folder prompts are measured; the limit itself passes."""
    build(tmp_path / "model")
    path = write(tmp_path / "d.jsonl", good)
    command = ["validate", path, f"--model={tmp_path / 'model'}", "--template=mini"]
    assert main(command) == 0
    most = int(capsys.readouterr().out.rsplit("most ", 1)[1])
    assert main([*command, f"--max_tokens={most}"]) == 0
    assert main([*command, f"--max_tokens={most - 1}"]) == 1
    assert (
        f"row 2 (two): error: too_long: its prompt takes {most} tokens" in capsys.readouterr().out
    )


def test_warnings_fail_only_if_asked(tmp_path, capsys):
    path = write(tmp_path / "d.jsonl", [row("text", [])])
    assert main(["validate", path]) == 0
    assert "has no image" in capsys.readouterr().out
    assert main(["validate", path, "--strict"]) == 1


def test_findings_can_be_cut_short(tmp_path, capsys):
    path = write(tmp_path / "d.jsonl", [row(f"r{i}", ["gone.png"]) for i in range(4)])
    assert main(["validate", path, "--show=1"]) == 1
    assert "and 3 more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one data file"),
        (["no.jsonl"], "no.jsonl: no such file"),
        (["no.jsonl", "--max_tokens=3"], "needs --model"),
    ],
)
def test_wrong_usage_is_one_line(argv, message, capsys):
    assert main(["validate", *argv]) == 2
    assert message in capsys.readouterr().err
