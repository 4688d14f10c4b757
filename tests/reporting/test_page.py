"""The whole report: one file, well formed, escaped, right numbers, whatever the run folder holds."""

import base64
import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from evisrag_jax.reporting.page import Limits, write_report

ADDRESS_ATTRIBUTES = ("src", "href", "srcset", "xlink:href", "action", "formaction", "poster", "data", "background", "ping")  # fmt: skip


def check_self_contained(page) -> None:
    for tag, attrs in page.elements:
        for name in ADDRESS_ATTRIBUTES:
            if name in attrs:
                assert attrs[name].startswith(("#", "data:")), f"<{tag} {name}={attrs[name][:60]}>"
        assert "url(" not in (attrs.get("style") or "")
    for i in page.find("style"):
        assert not re.search(r"url\(|@import|//", page.texts[i])
    for i in page.find("script"):
        assert not re.search(r"https?:|fetch\(|import\(|XMLHttpRequest", page.texts[i])


def check_well_formed(page) -> None:
    assert page.faults == []
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.elements:
        for name in ("href", "for", "aria-labelledby"):
            target = attrs.get(name)
            if target and (name != "href" or target.startswith("#")):
                assert target.removeprefix("#") in ids, f"<{tag} {name}={target}> leads nowhere"
        assert not any(name.startswith("on") for name in attrs)
        if tag == "svg":
            assert "aria-label" in attrs or attrs.get("aria-hidden") == "true"
    assert (
        len(page.find("h1"))
        == len(page.find("main"))
        == len(page.find("title")) - len(titles_in_svg(page))
        == 1
    )


def titles_in_svg(page) -> list[int]:
    svgs = page.find("svg")
    return [t for t in page.find("title") if any(page.inside(t, s) for s in svgs)]


def report(run, read_page, **limits):
    page = read_page(write_report(run, limits=Limits(**limits)))
    check_well_formed(page)
    check_self_contained(page)
    return page


def section(page, name: str) -> str:
    found = page.find("section", id=name)
    return page.text(found[0]) if found else ""


def test_the_full_report_is_one_well_formed_file(rl_run, rl_page):
    check_self_contained(rl_page)
    check_well_formed(rl_page)
    assert [a["id"] for t, a in rl_page.elements if t == "section"] == ["summary", "curves", "time", "rollouts", "predictions", "files"]  # fmt: skip
    assert sorted(p.name for p in rl_run.iterdir() if "report" in p.name) == ["report.html"]


def test_only_the_reports_own_script_may_run(rl_page):
    [script] = rl_page.find("script")
    digest = base64.b64encode(hashlib.sha256(rl_page.texts[script].encode()).digest()).decode()
    [policy] = [a["content"] for t, a in rl_page.elements if t == "meta" and "http-equiv" in a]
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_headline_numbers_equal_the_summary(rl_run, rl_page):
    summary = json.loads((rl_run / "summary.json").read_text())
    table = rl_page.find("table", class_="numbers")[0]
    rows = {row[0]: row for row in rl_page.rows(table)[1:]}
    names = {"Accuracy": "accuracy", "Exact match": "em", "Token F1": "f1", "Evidence": "evidence", "Format": "format"}  # fmt: skip
    assert set(rows) == set(names)
    before, after = summary["eval_before"], summary["eval_after"]
    for label, name in names.items():
        for cell, metrics in zip(rows[label][1:3], (before, after), strict=True):
            expected = [metrics[name], *metrics["ci"].get(name, [])]
            assert [float(x) for x in re.findall(r"\d\.\d{3}", cell)] == pytest.approx(expected, abs=5e-4)  # fmt: skip
        assert float(rows[label][3]) == pytest.approx(after[name] - before[name], abs=5e-4)
    facts = section(rl_page, "summary")
    for fact in ("Steps 60", "Compiles 11", "Duration 6 min 47 s", "Questions evaluated 600", "Records rejected 1"):  # fmt: skip
        assert fact in facts
    assert summary["command"] in facts and "2026-11-30 20:14 UTC" in facts and "jax 0.10.2" in facts


def test_curves_time_rollouts_and_predictions_are_there(rl_page):
    curves = section(rl_page, "curves")
    for title in ("Overall reward", "Reward channels", "Evaluation", "Loss", "Gradient norm", "Sampler–trainer gap",
                  "Response length", "Clipped responses", "Scopes found"):  # fmt: skip
        assert title in curves
    for phase in ("prefill", "decode", "reward", "update", "idle"):
        assert phase in section(rl_page, "time")
    groups = rl_page.find("details", class_="group")
    assert len(groups) == 6 * 4 and "6 of 6 recorded steps, the first 4 questions of up to 5" in section(rl_page, "rollouts")  # fmt: skip
    assert len(rl_page.find("details", class_="sample")) == 6 * 4 * 8
    assert len(rl_page.find("details", class_="prediction")) == 60
    assert "60 of 90 shown" in section(rl_page, "predictions")
    labels = [rl_page.text(i) for i in rl_page.find("label")]
    assert any(re.fullmatch(r"wrong \d+ of \d+", text) for text in labels)
    assert "image file is truncated" in section(rl_page, "files")


def test_the_first_group_can_be_read_without_the_script(rl_page):
    first, *others = rl_page.find("details", class_="group")
    assert "open" in rl_page.elements[first][1]
    assert not any("open" in rl_page.elements[i][1] for i in others)
    open_samples = [i for i in rl_page.find("details", class_="sample") if "open" in rl_page.elements[i][1] and rl_page.inside(i, first)]  # fmt: skip
    assert len(open_samples) == 1
    for tag in ("observe", "evidence", "think", "answer"):
        assert any(rl_page.inside(b, open_samples[0]) for b in rl_page.find("div", class_=tag))
    [pages] = [i for i in rl_page.find("aside") if rl_page.inside(i, first)]
    assert len([u for u in rl_page.find("use") if rl_page.inside(u, pages)]) == 3
    toolbar = rl_page.find("div", id="rollout-toolbar")[0]
    assert "hidden" in rl_page.elements[toolbar][1]  # a control that needs the script waits for it


def test_each_picture_is_embedded_once(rl_page):
    uris = [a["href"] for t, a in rl_page.elements if t == "image"]
    assert len(uris) == len(set(uris)) == 8  # eight drawn pages, each shown in many places
    assert all(uri.startswith("data:image/webp;base64,") for uri in uris)


def test_raw_values_stand_in_a_table(rl_run, rl_page):
    logged = [json.loads(line) for line in (rl_run / "metrics.jsonl").read_text().splitlines()]
    [table] = [i for i in rl_page.find("table", class_="raw") if rl_page.rows(i)[0][:2] == ["step", "accuracy"] and "overall" in rl_page.rows(i)[0]]  # fmt: skip
    header, *rows = rl_page.rows(table)
    assert len(rows) == len(logged) == 60
    column = header.index("overall")
    shown = [float(row[column]) for row in rows]
    assert shown == pytest.approx([row["reward/overall"] for row in logged], rel=1e-5)


HOSTILE = "<script>document.title='x'</script><img src=http://example.org/x onerror=alert(1)>&amp;\"'</details></main>"


def test_text_is_escaped_everywhere(tmp_path, fill, read_page):
    run = tmp_path / "hostile"
    fill.page(run / "p.png", "X", 1)
    row = fill.rollout(np.random.default_rng(0), run, 1, 0, 0.5)
    row |= {"question": HOSTILE, "id": HOSTILE, "answers": [HOSTILE], "evidence": [HOSTILE], "images": ["p.png", HOSTILE]}  # fmt: skip
    row["samples"][0] |= {"text": f"{HOSTILE}<answer>{HOSTILE}</answer>", "finish": HOSTILE, "rewards": {HOSTILE: 1.0}}  # fmt: skip
    fill.jsonl(run / "rollouts" / "step_000001.jsonl", [row])
    prediction = fill.predictions(np.random.default_rng(0), 1)[0]
    fill.jsonl(run / "predictions.jsonl", [prediction | {"question": HOSTILE, "prediction": HOSTILE, "answer": HOSTILE, "method": HOSTILE}])  # fmt: skip
    fill.json(run / "summary.json", {"name": HOSTILE, "command": HOSTILE, HOSTILE: HOSTILE, "eval_after": {HOSTILE: 1.0}})  # fmt: skip
    fill.json(run / "config.json", {HOSTILE: {"x": HOSTILE}})
    fill.json(run / "versions.json", {"jax": HOSTILE})
    fill.jsonl(run / "metrics.jsonl", [{"step": 1, f"loss/{HOSTILE}": 1.0, HOSTILE: 2.0}])
    fill.jsonl(run / "timeline.jsonl", [{"step": 1, "name": HOSTILE, "start": 0, "end": 1}])
    fill.jsonl(run / "rejected.jsonl", [{HOSTILE: HOSTILE}])
    page = report(run, read_page)
    assert len(page.find("script")) == 1 and page.find("img") == []
    assert page.text(page.find("h1")[0]) == HOSTILE
    assert all(
        page.text(i) == HOSTILE for i in page.find("span", class_="question") if page.texts[i]
    )


def test_control_characters_and_lone_surrogates_do_no_harm(tmp_path, fill, read_page):
    (tmp_path / "predictions.jsonl").write_text('{"id": "a", "question": "nul \\u0000 esc \\u001b half \\ud800 ok", "answer": "x"}\n')  # fmt: skip
    write_report(tmp_path)
    raw = (tmp_path / "report.html").read_bytes().decode("utf-8")
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", raw)
    assert "nul � esc � half" in raw


def test_an_empty_folder_gives_a_page_of_na(tmp_path, read_page):
    page = report(tmp_path, read_page)
    text = section(page, "summary")
    assert "Accuracy n/a n/a n/a" in text and "Steps n/a" in text and "Duration n/a" in text
    assert [a["id"] for t, a in page.elements if t == "section"] == ["summary"]
    for name in ("summary.json", "metrics.jsonl", "rollouts", "predictions.jsonl"):
        assert name in text


def test_an_evaluation_run(tmp_path, fill, read_page):
    fill.json(tmp_path / "summary.json", {"accuracy": 0.5, "f1": 0.625, "ci": {"accuracy": [0.4, 0.6]}, "n": 20})  # fmt: skip
    fill.jsonl(tmp_path / "predictions.jsonl", fill.predictions(np.random.default_rng(1), 20))
    page = report(tmp_path, read_page)
    rows = {row[0]: row[1:4] for row in page.rows(page.find("table", class_="numbers")[0])[1:]}
    assert rows["Accuracy"] == ["n/a", "0.5000.400 – 0.600", "n/a"]
    assert rows["Token F1"][1] == "0.625" and rows["Format"] == ["n/a"] * 3
    assert "20 of 20 shown" in section(page, "predictions") and "Questions evaluated 20" in section(page, "summary")  # fmt: skip
    assert not page.find("section", id="curves") and not page.find("section", id="rollouts")
    assert (
        "pages/Orvane.png" not in page.texts[page.find("html")[0]]
    )  # file names without their folders
    assert "file not found" in section(page, "predictions")


def test_a_fine_tuning_run(tmp_path, fill, read_page):
    rows = [{"step": s, "time": 2.0 * s, "loss/train": 3.0 / s, "loss/grad_norm": 1.0, "lr": 1e-4} for s in range(1, 41)]  # fmt: skip
    rows[-1] |= {"eval/accuracy": 0.75, "eval/format": 1.0, "compile/count": 3}
    rows[4] |= {"eval/accuracy": 0.25}
    fill.jsonl(tmp_path / "metrics.jsonl", rows)
    page = report(tmp_path, read_page)
    table = {row[0]: row[1:4] for row in page.rows(page.find("table", class_="numbers")[0])[1:]}
    assert table["Accuracy"] == ["0.250", "0.750", "+0.500"] and table["Format"] == ["n/a", "1.000", "n/a"]  # fmt: skip
    summary = section(page, "summary")
    assert "From the evaluations in metrics.jsonl at steps 5 and 40" in summary
    assert "Steps 40" in summary and "Compiles 3" in summary and "Duration 1 min 20 s" in summary
    assert "Loss" in section(page, "curves") and "Reward channels" not in section(page, "curves")


def test_a_run_that_is_still_writing(tmp_path, fill, read_page):
    fill.jsonl(tmp_path / "metrics.jsonl", [{"step": s, "loss/train": float(s)} for s in (1, 2, 3)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss/tr')
    page = report(tmp_path, read_page)
    text = section(page, "summary")
    assert "metrics.jsonl: the last line is incomplete and was left out." in text
    assert "Steps 3" in text and "loss/train" not in text


def test_broken_objects_and_pictures_are_noted(tmp_path, fill, read_page):
    (tmp_path / "summary.json").write_text("{")
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\nshort")
    fill.jsonl(tmp_path / "predictions.jsonl", [{"id": "a", "images": ["cut.png", "gone.png"], "answer": "1", "answers": ["1"]}])  # fmt: skip
    text = section(report(tmp_path, read_page), "summary")
    assert "summary.json could not be read" in text and "config.json is not a JSON object" in text
    assert "2 page images could not be read." in text


def test_limits_bound_the_file_and_are_said(rl_run, tmp_path, fill, read_page):
    import shutil

    run = shutil.copytree(rl_run, tmp_path / "run")
    page = report(run, read_page, steps=2, groups=1, predictions=5, total_bytes=4000)
    assert [page.elements[i][1]["data-step"] for i in page.find("details", class_="group")] == ["10", "60"]  # fmt: skip
    assert len(page.find("details", class_="prediction")) == 5
    pictures = [a["href"].split(",")[1] for t, a in page.elements if t == "image"]
    assert sum(len(base64.b64decode(p)) for p in pictures) <= 4000
    assert "images are limited to 4 kB" in section(page, "summary")
    nothing = report(run, read_page, steps=0, groups=0, predictions=0, total_bytes=0)
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
