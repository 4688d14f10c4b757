"""`evisrag judge`: a table beside an evaluation; failures are judged again; a local model judges."""

import json

import pytest

from evisrag_jax.cli.main import main
from evisrag_jax.runtime.json_files import read_json, read_jsonl, write_json, write_jsonl
from tests.fake_server import FakeServer

ROWS = [
    ("a", "<answer> 23 </answer>", ["23"], True),
    ("b", "<answer> 7 </answer>", ["23"], True),
    ("c", "<answer> insufficient to answer </answer>", ["23"], False),
]


@pytest.fixture
def run(tmp_path):
    rows = [
        {
            "id": i,
            "prediction": p,
            "answers": a,
            "is_sufficient": s,
            "question": f"{i}?",
            "images": [],
        }
        for i, p, a, s in ROWS
    ]
    write_jsonl(tmp_path / "predictions.jsonl", rows)
    write_json(tmp_path / "summary.json", {"accuracy": 0.5})
    return tmp_path


def test_the_rule_writes_verdicts_and_summary(run, capsys):
    assert main(["judge", str(run)]) == 0
    summary = read_json(run / "summary.json")
    assert summary["accuracy"] == 0.5 and summary["judge/accuracy"] == pytest.approx(2 / 3)
    assert summary["judge/hallucination_rate"] == pytest.approx(1 / 3)
    assert [row["verdict"] for row in read_jsonl(run / "judge.jsonl")] == [
        "right",
        "wrong",
        "refused",
    ]
    assert "insufficient          0        0        1        0" in capsys.readouterr().out


def test_failures_are_judged_by_the_next_call(run, capsys):
    def script(body):
        asked = body["messages"][0]["content"]
        return "?" if "b?" in asked else json.dumps({"correct": True, "refused": "c?" in asked})

    with FakeServer(script) as server:
        words = [
            *("judge", str(run), "--config=judge.py:server", "--config.server.model=m"),
            f"--config.server.base_url={server.url}",
        ]
        assert main(words) == 1
        assert "1 without a verdict; the same command judges them again" in capsys.readouterr().out
        assert read_json(run / "summary.json")["judge/n_failed"] == 1
        asked = len(server.asked)
        server.script = ['{"correct": false}']
        assert main(words) == 0 and len(server.asked) == asked + 1
    assert read_json(run / "summary.json")["judge/accuracy"] == pytest.approx(2 / 3)


def test_a_local_model_that_cannot_judge_has_failures_only(run):
    """The mini model knows no rubric: every verdict is a failure, and none of them a zero."""
    words = [
        *("judge", str(run), "--config=judge.py:local", "--model", "mini"),
        *("--config.shapes.prompts=(1,)", "--config.shapes.lengths=(512,)"),
        *("--config.shapes.responses=(16,)", "--config.max_tokens=16"),
    ]
    assert main(words) == 1
    summary = read_json(run / "summary.json")
    assert summary["judge/n_failed"] == 3 and summary["judge/accuracy"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "judge takes one argument"),
        (["x", "--config.backend=oracle"], "backend='oracle'"),
        (["x", "--config.sufficiency=true"], "sufficiency=True needs backend='server'"),
        (["x", "--config=judge.py:server"], "server.base_url and server.model are needed"),
        (["nowhere"], "no such file"),
    ],
)
def test_wrong_usage(words, message, capsys, run):
    if words and words[0] == "x":
        words = [str(run), *words[1:]]
    assert main(["judge", *words]) in (1, 2)
    assert message in capsys.readouterr().err
