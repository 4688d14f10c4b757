"""What a report is made from: files of the run folder, pictures, the head's facts, and values as written."""

import json

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.reporting.display import format_number, format_seconds, format_signed
from evisrag_jax.reporting.folder import read_folder, read_rows
from evisrag_jax.reporting.headline import config_digest, headline, interval
from evisrag_jax.reporting.images import ImageStore
from evisrag_jax.reporting.tables import pairs
from tests.reporting.fake_run import write_json, write_jsonl


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path, side=200, image_bytes=20_000, total_bytes=100_000)


def test_facts_of_the_head_in_their_several_forms(tmp_path):
    write_json(
        tmp_path / "summary.json",
        {"command": ["evisrag", "sft", "--out", "a b"], "started": 1_790_000_000},
    )
    write_json(
        tmp_path / "versions.json",
        {
            "python": "3.12",
            "devices": ["H200", "H200"],
            "packages": {"jax": "0.10.2", "grain": None},
        },
    )
    write_json(tmp_path / "config.json", {"b": 1, "a": {"c": [1, 2]}})
    head = headline(read_folder(tmp_path))
    assert head.command == "evisrag sft --out 'a b'" and head.date == "2026-09-21 14:13 UTC"
    assert head.versions == [("python", "3.12"), ("jax", "0.10.2"), ("devices", "H200, H200")]
    assert (
        head.digest
        == config_digest({"a": {"c": [1, 2]}, "b": 1})
        != config_digest({"a": {"c": [2, 1]}, "b": 1})
    )
    assert len(head.digest) == 12 and config_digest(None) == ""


def test_intervals_in_both_forms():
    metrics = {
        "ci": {"a": [0.1, 0.2], "b": {"low": 0.3, "high": 0.4}, "c": [None, 1], "d": [1], "e": "x"}
    }
    assert interval(metrics, "a") == (0.1, 0.2) and interval(metrics, "b") == (0.3, 0.4)
    assert [interval(metrics, name) for name in ("c", "d", "e", "f")] == [(None, None)] * 4
    assert interval({}, "a") == interval({"ci": 3}, "a") == (None, None)


def test_nested_objects_as_pairs():
    value = json.loads('{"a": {"b": 1e-6, "c": {}}, "d": [1, "x"], "e": null, "f": true}')
    assert pairs(value) == [
        ("a.b", "1e-06"),
        ("a.c", "{}"),
        ("d", "1, x"),
        ("e", "none"),
        ("f", "True"),
    ]


def test_pictures_are_scaled_and_bounded(tmp_path, store):
    noise = np.random.default_rng(0).integers(0, 256, (900, 600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    Image.new("RGBA", (50, 80), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    page = store.add("noise.png")
    assert (
        page.id
        and max(page.width, page.height) <= 200
        and abs(page.width / page.height - 2 / 3) < 0.02
    )
    assert store.used_bytes <= 20_000
    clear = store.add(str(tmp_path / "clear.png"))
    assert (clear.width, clear.height) == (50, 80)  # never scaled up
    assert store.add("x/../clear.png") is clear and len(store.embedded) == 2
    assert store.add("gone.png").reason == "file not found" and store.missing == 1
    assert (
        store.add("/data/pages/gone.png").name == store.add("C:\\data\\gone.png").name == "gone.png"
    )


def test_a_sideways_photo_stands_upright(tmp_path, store):
    image = Image.new("RGB", (80, 40), "red")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "phone.jpg", exif=exif)
    page = store.add("phone.jpg")
    assert (page.width, page.height) == (40, 80)


def test_damaged_lines_are_counted_not_raised(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n[2]\n\n{"b": NaN}\nnot json\n{"c": "\xff"}\n{"d"')
    notes: list[str] = []
    rows = read_rows(file, notes)
    assert [list(r) for r in rows] == [["a"], ["b"], ["c"]]
    assert notes == [
        "rows.jsonl: the last line is incomplete and was left out.",
        "rows.jsonl: left out 2 lines (2, 5), not a JSON object.",
    ]


def test_metric_rows_of_one_step_are_merged(tmp_path):
    write_jsonl(
        tmp_path / "metrics.jsonl",
        [
            {"step": 2, "a": 1, "nonfinite": ["b"]},
            {"step": 1, "a": 0},
            {"step": 2, "eval/f1": 0.5, "a": 3, "nonfinite": ["c"]},
            {"step": 3, "nonfinite": None},
            {"step": None},
        ],
    )
    run = read_folder(tmp_path)
    second = {"step": 2, "a": 3, "eval/f1": 0.5, "nonfinite": ["b", "c"]}
    assert run.metrics == [{"step": 1, "a": 0}, second, {"step": 3}]
    assert run.notes == ["metrics.jsonl: left out 1 row without an integer step."]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "n/a"),
        (3, "3"),
        (12345, "12 345"),
        (3.0, "3.000"),
        (-0.0, "0.000"),
        (0.7314, "0.731"),
        (157.26, "157.3"),
        (2.5e-4, "0.00025"),
        (-1.5, "−1.500"),
        (float("nan"), "nan"),
        (float("-inf"), "−∞"),
        ("x", "n/a"),
        (True, "1"),
        (2e6, "2e+06"),
    ],
)
def test_numbers_as_written(value, written):
    assert format_number(value) == written


def test_signs_and_durations():
    assert [format_signed(x) for x in (1.0, -0.5, 0.001, -0.001, None)] == [
        "+1.00",
        "−0.50",
        "0.00",
        "0.00",
        "n/a",
    ]
    seconds = (0.4213, 38.2, 59.7, 270.0, 3599.9, 4330, 180_000, None)
    assert [format_seconds(s) for s in seconds] == [
        "0.42 s",
        "38 s",
        "1 min 0 s",
        "4 min 30 s",
        "1 h 0 min",
        "1 h 12 min",
        "2 d 2 h",
        "n/a",
    ]
