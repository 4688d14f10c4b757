"""The inspection sheet: pages, sections, boxes; nothing from outside, nothing taken as markup."""

import json
import re

import pytest
from PIL import Image

from evisrag_jax.reporting.inspection import CHECKS, write_inspection
from tests.reporting.html_page import Page

RESPONSE = (
    "<observe>one <b>bold</b></observe>\n<evidence>\n[1]: revenue 42\n[2]: no relevant information\n"
    "</evidence>\n<think>so</think>\n<answer>42</answer>"
)


@pytest.fixture
def sheet(tmp_path):
    (tmp_path / "pages").mkdir()
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / "pages" / f"{name}.png")
    row = {
        "id": "q1-top2-s0",
        "set": "sft",
        "question": "what </script> is it?",
        "images": ["pages/a.png", "pages/b.png"],
        "relevant": [True, False],
        "answers": ["42", "forty-two"],
        "is_sufficient": True,
        "response": RESPONSE,
    }
    refusal = {"id": "q2-top1-s1", "set": "grpo", "is_sufficient": False, "relevant": [False]}
    rows = [row, {**row, **refusal, "images": ["pages/gone.png"]}]
    (tmp_path / "inspection.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    report = {"dropped": {"filters": {"wrong_answer": 17}}, "sets": {"sft": 1}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    return write_inspection(tmp_path).read_text()


def test_every_item_has_its_pages_sections_and_boxes(sheet):
    first, second = sheet.split("<article")[1:]
    for tag in ("observe", "evidence", "think", "answer"):
        assert f'<div class="block {tag}">' in first
    for item in (first, second):
        for name in (*(name for name, _ in CHECKS), "done"):
            assert f'<input type="checkbox" name="{name}">' in item
        assert '<textarea name="remark"' in item
    assert first.count('<figure class="page') == 2 and first.count('page relevant"') == 1
    assert "42 · forty-two" in first and '<p class="gold" dir="auto">revenue 42</p>' in first
    assert "insufficient to answer</dd>" in second and "file not found" in second
    assert sheet.count("<image id=") == 2  # equal pages once


def test_counts_and_drops_are_shown(sheet):
    assert "1 items whose pages suffice, 1 whose pages do not" in sheet
    assert '<th scope="row">wrong_answer</th><td>17</td>' in sheet
    assert "1 page image could not be read or embedded." in sheet


def test_marks_can_be_saved_and_loaded(sheet):
    """The controls are there, and the script reads and writes what they hold."""
    for part in ('id="save"', 'id="load"', 'id="inspector"', "localStorage", "createObjectURL"):
        assert part in sheet
    assert re.search(r'<body data-key="[0-9a-f]{16}">', sheet)


def test_it_needs_nothing_from_outside_and_takes_no_markup(sheet):
    assert not re.search(r"""(src|href)=["']?(https?:|//|file:)""", sheet)
    assert "one &lt;b&gt;bold&lt;/b&gt;" in sheet and "what &lt;/script&gt; is it?" in sheet
    assert sheet.count("<script>") == sheet.count("</script>") == 1
    assert "default-src 'none'" in sheet and not Page(sheet).faults


def test_a_folder_without_rows(tmp_path):
    with pytest.raises(FileNotFoundError, match="no rows to inspect"):
        write_inspection(tmp_path)
    (tmp_path / "inspection.jsonl").write_text("")
    assert "there is nothing to inspect" in write_inspection(tmp_path).read_text()
