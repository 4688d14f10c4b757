"""`evisrag construct`: generated questions and the bundled models' prompts; the responses are scripted."""

import functools
import json
from collections import Counter
from pathlib import Path

import pytest

from evisrag_jax.cli import construct
from evisrag_jax.cli.main import main
from evisrag_jax.construction.teacher import LocalTeacher
from evisrag_jax.data.miniworld import corpus, world
from evisrag_jax.data.miniworld.episodes import respond
from evisrag_jax.data.sources import read_records
from evisrag_jax.runtime.host_random import text_hash
from evisrag_jax.runtime.remote import Reply
from tests.construction.conftest import quick_files
from tests.construction.made import Killed
from tests.fake_server import FakeServer

SMALL = ("--config.data.questions=14", "--config.sets.split.tolerance=0.2", "--noprogress")
pytestmark = pytest.mark.usefixtures(quick_files.__name__)
FILES = ("sft.jsonl", "grpo.jsonl", "dropped.jsonl", "report.json", "inspection.html")


opened = functools.cache(construct.open_model)


@pytest.fixture
def scripted(monkeypatch):
    """Models that say what follows from the pages, or, in one response of five, see nothing. Returns the
    counts of what they were asked, and a place for the number of responses after which they die."""
    documents = corpus.town_pages(0, "train", 2)
    asked, lives = Counter(), {}

    def answer(self, asks, on_reply, on_failure):
        model = Path(self.identity["model"]["path"]).name
        for ask in asks:
            if lives.get("left") == 0:
                raise Killed
            lives["left"] = lives.get("left", -1) - 1
            asked[model, ask.context.id, ask.sample] += 1
            assert len(ask.prepared.pages) == ask.context.k
            names = [Path(page.path).stem for page in ask.context.pages]
            pages = [documents[name.partition("-")[0]][int(name[-1])] for name in names]
            words = ask.context.question.question.split()
            towns = [word for word in words if word in world.ENTITIES]
            field = next(word for word in words if word in world.FIELDS)
            blind = text_hash(f"{model} {ask.context.id} {ask.sample}") % 5 == 0
            text, *_ = respond(pages, towns, field, unread=range(len(pages)) if blind else ())
            on_reply(ask, Reply(text, 30, 40, 0.0, False))

    monkeypatch.setattr(LocalTeacher, "answer", answer)
    monkeypatch.setattr(construct, "open_model", opened)
    return asked, lives


def test_the_sets_and_their_report(scripted, tmp_path, capsys):
    """Killed twice on the way: the files of a run that was left alone, and nothing asked twice."""
    asked, lives = scripted
    whole, cut = tmp_path / "whole" / "run", tmp_path / "cut" / "run"
    assert main(["construct", f"--out={whole}", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "read/questions               14" in printed and "dropped/filters/" in printed
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["responses"]["teacher/asked"] == sum(model == "mini" for model, *_ in asked)
    asked.clear()
    for left in (10, 40):
        lives["left"] = left
        with pytest.raises(Killed):
            main(["construct", f"--out={cut}", *SMALL])
    lives.clear()
    assert main(["construct", f"--out={cut}", *SMALL]) == 0
    assert set(asked.values()) == {1}
    for name in FILES:
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    for name in ("sft.jsonl", "grpo.jsonl"):
        assert read_records(cut / name)


def test_another_config_is_refused_and_limits_may_change(scripted, tmp_path, capsys):
    command = ["construct", f"--out={tmp_path}", *SMALL, "--config.sets.limit=2"]
    command += ["--config.sets.split.tolerance=1.0", "--config.sets.difficulty.samples=0"]
    assert main(command) == 0
    assert main([*command, "--config.sets.chunk=5", "--config.server.concurrency=3"]) == 0
    assert main([*command, "--config.sets.filters.samples=3"]) == 1
    assert "sets.filters.samples: 2 -> 3" in capsys.readouterr().err


def test_a_server_as_the_teacher(tmp_path, capsys):
    """The paper's config with a server that refuses everything: every response is dropped, and counted."""
    corpus.write_corpus(tmp_path / "raw", 6)
    refusal = "I cannot say."
    with FakeServer([refusal]) as server:
        command = ["construct", "--config=construct.py:server", f"--data={tmp_path / 'raw'}"]
        command += [f"--config.server.base_url={server.url}", "--config.sets.split.tolerance=1.0"]
        command += ["--config.sets.filters.samples=2", "--config.sets.limit=2", "--noprogress"]
        assert main([*command, f"--out={tmp_path / 'run'}"]) == 0
        sent = len(server.asked)
        assert main([*command, f"--out={tmp_path / 'run'}"]) == 0
        assert len(server.asked) == sent > 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["dropped"]["filters"] == {"bad_format": sent} and report["sets"]["sft"] == 0
    assert "Question: " in server.asked[0]["messages"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "construct needs --out RUN"),
        (["--out=x", "raw.jsonl"], "positional arguments, got raw.jsonl"),
        (["--out=x", "--config=construct.py:big"], "construct.py:big is unknown; mini, server"),
        (["--out=x", "--config.teacher=oracle"], "teacher='oracle'; local or server"),
        (["--out=x", "--config.teacher=server"], "server.base_url: the teacher is a server"),
        (["--out=x", "--config.difficulty_model.path="], "difficulty_model.path: the difficulty"),
        (["--out=x", "--model="], "model.path: the teacher's folder is needed"),
        (["--out=x", "--config.sets.contexts.ks=(0,)"], "contexts.ks=(0,)"),
        (["--out=x", "--config.sets.filters.keep=3"], "filters.samples=2, filters.keep=3"),
        (["--out=x", "--config.data.questions=0"], "data.questions=0 must be at least 1"),
        (["--out=x", "--config.server.max_cost=1"], "server.max_cost needs price_in"),
    ],
)
def test_wrong_usage_is_one_line(refused, argv, message):
    refused(["construct", *argv], message)
