"""The report of a complete run: one well-formed file, right numbers, readable without its script."""

import base64
import hashlib
import json
import re

import pytest

from tests.reporting.html_page import check_self_contained, check_well_formed, section


def test_the_full_report_is_one_well_formed_file(rl_run, rl_page):
    check_self_contained(rl_page)
    check_well_formed(rl_page)
    assert [a["id"] for t, a in rl_page.elements if t == "section"] == [
        "summary",
        "curves",
        "time",
        "rollouts",
        "predictions",
        "files",
    ]
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
    names = {
        "Accuracy": "accuracy",
        "Exact match": "em",
        "Token F1": "f1",
        "Evidence": "evidence",
        "Format": "format",
    }
    assert set(rows) == set(names)
    before, after = summary["eval_before"], summary["eval_after"]
    for label, name in names.items():
        for cell, metrics in zip(rows[label][1:3], (before, after), strict=True):
            expected = [metrics[name], *metrics["ci"].get(name, [])]
            assert [float(x) for x in re.findall(r"\d\.\d{3}", cell)] == pytest.approx(
                expected, abs=5e-4
            )
        assert float(rows[label][3]) == pytest.approx(after[name] - before[name], abs=5e-4)
    facts = section(rl_page, "summary")
    for fact in (
        "Steps 60",
        "Compiles 11",
        "Duration 6 min 47 s",
        "Questions evaluated 600",
        "Records rejected 1",
    ):
        assert fact in facts
    assert summary["command"] in facts and "2026-11-30 20:14 UTC" in facts and "jax 0.10.2" in facts


def test_curves_time_rollouts_and_predictions_are_there(rl_page):
    curves = section(rl_page, "curves")
    for title in (
        "Overall reward",
        "Reward channels",
        "Evaluation",
        "Loss",
        "Gradient norm",
        "Sampler–trainer gap",
        "Response length",
        "Clipped responses",
        "Scopes found",
    ):
        assert title in curves
    for phase in ("prefill", "decode", "reward", "update", "idle"):
        assert phase in section(rl_page, "time")
    groups = rl_page.find("details", class_="group")
    assert len(
        groups
    ) == 6 * 4 and "6 of 6 recorded steps, the first 4 questions of up to 5" in section(
        rl_page, "rollouts"
    )
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
    open_samples = [
        i
        for i in rl_page.find("details", class_="sample")
        if "open" in rl_page.elements[i][1] and rl_page.inside(i, first)
    ]
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
    [table] = [
        i
        for i in rl_page.find("table", class_="raw")
        if rl_page.rows(i)[0][:2] == ["step", "accuracy"] and "overall" in rl_page.rows(i)[0]
    ]
    header, *rows = rl_page.rows(table)
    assert len(rows) == len(logged) == 60
    column = header.index("overall")
    shown = [float(row[column]) for row in rows]
    assert shown == pytest.approx([row["reward/overall"] for row in logged], rel=1e-5)
