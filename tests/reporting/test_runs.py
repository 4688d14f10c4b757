"""Reports of all sorts of run folders: hostile text, other kinds of run, missing and broken files, limits."""

import base64
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from evisrag_jax.reporting.page import Limits, write_report
from tests.reporting import fake_run
from tests.reporting.html_page import report, section

HOSTILE = "<script>document.title='x'</script><img src=http://example.org/x onerror=alert(1)>&amp;\"'</details></main>"


def test_text_is_escaped_everywhere(tmp_path):
    run = tmp_path / "hostile"
    fake_run.draw_page(run / "p.png", "X", 1)
    row = fake_run.make_rollout(np.random.default_rng(0), run, 1, 0, 0.5)
    row |= {
        "question": HOSTILE,
        "id": HOSTILE,
        "answers": [HOSTILE],
        "evidence": [HOSTILE],
        "images": ["p.png", HOSTILE],
    }
    row["samples"][0] |= {
        "text": f"{HOSTILE}<answer>{HOSTILE}</answer>",
        "finish": HOSTILE,
        "rewards": {HOSTILE: 1.0},
    }
    fake_run.write_jsonl(run / "rollouts" / "step_000001.jsonl", [row])
    prediction = fake_run.make_predictions(np.random.default_rng(0), 1)[0]
    fake_run.write_jsonl(
        run / "predictions.jsonl",
        [
            prediction
            | {"question": HOSTILE, "prediction": HOSTILE, "answer": HOSTILE, "method": HOSTILE}
        ],
    )
    fake_run.write_json(
        run / "summary.json",
        {"name": HOSTILE, "command": HOSTILE, HOSTILE: HOSTILE, "eval_after": {HOSTILE: 1.0}},
    )
    fake_run.write_json(run / "config.json", {HOSTILE: {"x": HOSTILE}})
    fake_run.write_json(run / "versions.json", {"jax": HOSTILE})
    fake_run.write_jsonl(run / "metrics.jsonl", [{"step": 1, f"loss/{HOSTILE}": 1.0, HOSTILE: 2.0}])
    fake_run.write_jsonl(
        run / "timeline.jsonl", [{"step": 1, "name": HOSTILE, "start": 0, "end": 1}]
    )
    fake_run.write_jsonl(run / "rejected.jsonl", [{HOSTILE: HOSTILE}])
    page = report(run)
    assert len(page.find("script")) == 1 and page.find("img") == []
    assert page.text(page.find("h1")[0]) == HOSTILE
    assert all(
        page.text(i) == HOSTILE for i in page.find("span", class_="question") if page.texts[i]
    )


def test_control_characters_and_lone_surrogates_do_no_harm(tmp_path):
    (tmp_path / "predictions.jsonl").write_text(
        '{"id": "a", "question": "nul \\u0000 esc \\u001b half \\ud800 ok", "answer": "x"}\n'
    )
    write_report(tmp_path)
    raw = (tmp_path / "report.html").read_bytes().decode("utf-8")
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", raw)
    assert "nul � esc � half" in raw


def test_an_empty_folder_gives_a_page_of_na(tmp_path):
    page = report(tmp_path)
    text = section(page, "summary")
    assert "Accuracy n/a n/a n/a" in text and "Steps n/a" in text and "Duration n/a" in text
    assert [a["id"] for t, a in page.elements if t == "section"] == ["summary"]
    for name in ("summary.json", "metrics.jsonl", "rollouts", "predictions.jsonl"):
        assert name in text


def test_an_evaluation_run(tmp_path):
    fake_run.write_json(
        tmp_path / "summary.json",
        {"accuracy": 0.5, "f1": 0.625, "ci": {"accuracy": [0.4, 0.6]}, "n": 20},
    )
    fake_run.write_jsonl(
        tmp_path / "predictions.jsonl", fake_run.make_predictions(np.random.default_rng(1), 20)
    )
    page = report(tmp_path)
    rows = {row[0]: row[1:4] for row in page.rows(page.find("table", class_="numbers")[0])[1:]}
    assert rows["Accuracy"] == ["n/a", "0.500 0.400 – 0.600", "n/a"]
    assert rows["Token F1"][1] == "0.625" and rows["Format"] == ["n/a"] * 3
    assert "20 of 20 shown" in section(page, "predictions") and "Questions evaluated 20" in section(
        page, "summary"
    )
    assert not page.find("section", id="curves") and not page.find("section", id="rollouts")
    assert (
        "pages/Orvane.png" not in page.texts[page.find("html")[0]]
    )  # file names without their folders
    assert "file not found" in section(page, "predictions")


def test_a_fine_tuning_run(tmp_path):
    rows = [
        {"step": s, "time": 2.0 * s, "loss/train": 3.0 / s, "loss/grad_norm": 1.0, "lr": 1e-4}
        for s in range(1, 41)
    ]
    rows[-1] |= {"eval/accuracy": 0.75, "eval/format": 1.0, "compile/count": 3}
    rows[4] |= {"eval/accuracy": 0.25}
    fake_run.write_jsonl(tmp_path / "metrics.jsonl", rows)
    page = report(tmp_path)
    table = {row[0]: row[1:4] for row in page.rows(page.find("table", class_="numbers")[0])[1:]}
    assert table["Accuracy"] == ["0.250", "0.750", "+0.500"] and table["Format"] == [
        "n/a",
        "1.000",
        "n/a",
    ]
    summary = section(page, "summary")
    assert "From the evaluations in metrics.jsonl at steps 5 and 40" in summary
    assert "Steps 40" in summary and "Compiles 3" in summary and "Duration 1 min 20 s" in summary
    assert "Loss" in section(page, "curves") and "Reward channels" not in section(page, "curves")


def test_a_run_that_is_still_writing(tmp_path):
    fake_run.write_jsonl(
        tmp_path / "metrics.jsonl", [{"step": s, "loss/train": float(s)} for s in (1, 2, 3)]
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss/tr')
    page = report(tmp_path)
    text = section(page, "summary")
    assert "metrics.jsonl: the last line is incomplete and was left out." in text
    assert "Steps 3" in text and "loss/train" not in text


def test_broken_objects_and_pictures_are_noted(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\nshort")
    fake_run.write_jsonl(
        tmp_path / "predictions.jsonl",
        [{"id": "a", "images": ["cut.png", "gone.png"], "answer": "1", "answers": ["1"]}],
    )
    text = section(report(tmp_path), "summary")
    assert "summary.json could not be read" in text and "config.json is not a JSON object" in text
    assert "2 page images could not be read." in text


def test_limits_bound_the_file_and_are_said(rl_run, tmp_path):
    run = shutil.copytree(rl_run, tmp_path / "run")
    page = report(run, steps=2, groups=1, predictions=5, total_bytes=4000)
    assert [page.elements[i][1]["data-step"] for i in page.find("details", class_="group")] == [
        "10",
        "60",
    ]
    assert len(page.find("details", class_="prediction")) == 5
    pictures = [a["href"].split(",")[1] for t, a in page.elements if t == "image"]
    assert sum(len(base64.b64decode(p)) for p in pictures) <= 4000
    assert "images are limited to 4 kB" in section(page, "summary")
    nothing = report(run, steps=0, groups=0, predictions=0, total_bytes=0)
    assert nothing.find("image") == [] and nothing.find("details", class_="prediction") == []
    for wrong in ({"steps": -1}, {"image_side": 0}):
        with pytest.raises(ValueError, match=f"Limits.{next(iter(wrong))}"):
            Limits(**wrong)


def test_the_same_folder_gives_the_same_bytes(rl_run, tmp_path):
    first = (rl_run / "report.html").read_bytes()
    assert write_report(rl_run).read_bytes() == first


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_reporting_imports_neither_jax_nor_other_folders():
    code = (
        "import sys, evisrag_jax.reporting.page\n"
        "print(sorted({m.split('.')[1] for m in sys.modules if m.startswith('evisrag_jax.')}), 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['reporting'] False"
