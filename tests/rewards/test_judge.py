"""Judges: replies of every kind, a fake server that fails in every way, and verdicts that survive."""

import dataclasses

import pytest

from evisrag_jax.evaluation.judging import format_table, judge_items, judge_summary
from evisrag_jax.rewards.judge import (
    ChatJudge,
    JudgeError,
    JudgeItem,
    RuleJudge,
    ServerChat,
    Verdict,
    fill,
    judge_all,
    parse_verdict,
)
from evisrag_jax.rewards.sufficiency import (
    agreement,
    page_rule,
    parse_sufficiency,
    rate_sufficiency,
)
from evisrag_jax.runtime.json_files import write_jsonl
from evisrag_jax.runtime.remote import ChatClient, ServerConfig
from evisrag_jax.runtime.request_cache import RequestCache
from tests.fake_server import EMPTY, HANG, FakeServer

ITEM = JudgeItem("q1", "How much rain has Oslo?", ("23",), "23 mm", True)
LACKING = dataclasses.replace(ITEM, id="q2", is_sufficient=False)


@pytest.mark.parametrize(
    ("reply", "rubric", "want"),
    [
        ('{"correct": true, "refused": false, "reason": "same"}', "binary", (True, False, "same")),
        ('```json\n{"correct": false}\n```', "binary", (False, False, "")),
        ('I think so.\n{"reason": "ok {sic}", "correct": 1}', "binary", (True, False, "ok {sic}")),
        ('{"correct": "True", "refused": "true"}', "binary", (True, True, "")),
        ("true", "binary", (True, False, "")),
        ("`false`.", "binary", (False, False, "")),
        ('{"score": 4}', "scale", (True, False, "")),
        ('{"score": 3.5, "refused": false}', "scale", (False, False, "")),
        ("5", "scale", (True, False, "")),
        ('{"a": {"score": 1}} {"score": 5}', "scale", (True, False, "")),
    ],
)
def test_replies_that_hold_a_verdict(reply, rubric, want):
    assert parse_verdict(reply, rubric) == want


@pytest.mark.parametrize(
    ("reply", "rubric", "message"),
    [
        ("The answer looks fine.", "binary", "no correct in the reply"),
        ('{"verdict": true}', "binary", "no correct"),
        ('{"correct": "maybe"}', "binary", "bad correct 'maybe'"),
        ('{"correct": 2}', "binary", "bad correct 2"),
        ('{"score": 9}', "scale", "bad score 9; 1 to 5"),
        ('{"score": true}', "scale", "bad score True"),
        ('{"score": null}', "scale", "bad score None"),
        ("0", "scale", "bad score 0"),
        ('{"score": 4', "scale", "no score"),
    ],
)
def test_replies_without_a_verdict(reply, rubric, message):
    with pytest.raises(JudgeError, match=message):
        parse_verdict(reply, rubric)


def server_judge(server, **limits):
    settings = {"timeout": 0.4, "attempts": 2, "deadline": 5.0, "concurrency": 1} | limits
    config = ServerConfig(base_url=server.url, model="fake", **settings)
    client = ChatClient(config, sleep=lambda seconds: None)
    return ChatJudge(ServerChat(client), "scale")


GOOD = '{"reason": "same", "refused": false, "score": 5}'


@pytest.mark.parametrize(
    ("script", "score", "reason"),
    [
        ([GOOD], 1.0, "same"),
        ([f"```json\n{GOOD}\n```"], 1.0, "same"),
        (["It is right."], None, "no score"),
        (['{"score": 11}'], None, "bad score 11"),
        ([429, GOOD], 1.0, "same"),
        ([429], None, "status 429"),
        ([HANG], None, "no answer within"),
        ([EMPTY], None, ""),
        ([400], None, "status 400"),
    ],
    ids=["json", "fenced", "no score", "bad score", "429 once", "429", "hang", "empty", "400"],
)
def test_a_server_that_fails_in_every_way(script, score, reason, tmp_path):
    """A verdict where there is one; else a failure that is no zero, not cached, and judged again."""
    with FakeServer(script, hang=1.0) as server, RequestCache(tmp_path / "v.sqlite") as cache:
        (got,) = judge_all(server_judge(server), [ITEM], cache)
        assert got.score == score and reason in got.reason and not got.cached
        assert len(cache) == (score is not None)
        server.script = [GOOD]
        asked = len(server.asked)
        (again,) = judge_all(server_judge(server), [ITEM], cache)
        assert again.score == 1.0 and again.cached == (score is not None)
        assert len(server.asked) == asked + (score is None)


def test_failures_are_counted_and_left_out_of_means(tmp_path):
    def script(body):
        text = body["messages"][0]["content"]
        return "no idea" if "Answer to grade: odd" in text else GOOD

    items = [
        dataclasses.replace(ITEM, id=str(i), prediction=p) for i, p in enumerate(["a", "odd", "b"])
    ]
    with FakeServer(script) as server:
        verdicts = judge_all(server_judge(server), items)
    summary = judge_summary(items, verdicts, resamples=50)
    assert [one.score for one in verdicts] == [1.0, None, 1.0]
    assert summary["judge/accuracy"] == 1.0 and summary["judge/n_failed"] == 1
    assert summary["judge/table"]["sufficient"] == {
        "right": 2,
        "wrong": 0,
        "refused": 0,
        "failed": 1,
    }


def test_a_killed_run_keeps_its_verdicts(tmp_path):
    items = [dataclasses.replace(ITEM, id=str(i), prediction=str(i)) for i in range(5)]

    def killed(verdict):
        if verdict.id == "2":
            raise KeyboardInterrupt

    with FakeServer([GOOD]) as server:
        path = tmp_path / "v.sqlite"
        with RequestCache(path) as cache, pytest.raises(KeyboardInterrupt):
            judge_all(server_judge(server), items, cache, killed)
        with RequestCache(path) as cache:
            done = len(cache)
            assert done >= 3
            got = judge_all(server_judge(server), items, cache)
        assert all(one.score == 1.0 for one in got) and sum(one.cached for one in got) == done


@pytest.mark.parametrize(
    ("item", "prediction", "score", "verdict"),
    [
        (ITEM, "23", 1.0, "right"),
        (ITEM, "24", 0.0, "wrong"),
        (ITEM, "Insufficient to answer.", 0.0, "refused"),
        (LACKING, "Insufficient to answer.", 1.0, "refused"),
        (LACKING, "no relevant information", 1.0, "refused"),
        (LACKING, "23", 0.0, "right"),
        (LACKING, "I cannot answer", 0.0, "wrong"),
    ],
)
def test_the_rule(item, prediction, score, verdict):
    """B70: the three phrases are refusals, other words are not; a refusal is right where pages lack."""
    (got,) = RuleJudge()([dataclasses.replace(item, prediction=prediction)])
    assert (got.score, got.verdict) == (score, verdict)


def test_the_rule_by_f1():
    said = dataclasses.replace(ITEM, golds=("the red house",), prediction="red house there")
    assert RuleJudge()([said])[0].score == 0.0
    assert RuleJudge(f1=0.8)([said])[0].score == 1.0
    assert RuleJudge(f1=0.9)([said])[0].score == 0.0
    with pytest.raises(ValueError, match=r"judge.f1=1.5"):
        RuleJudge(f1=1.5)


def test_braces_of_an_item_stay():
    odd = dataclasses.replace(ITEM, question="{golds}?", prediction="{question} {x}")
    prompt = fill("binary", odd)
    assert "Question: {golds}?" in prompt and "Answer to grade: {question} {x}" in prompt
    assert "insufficient to answer" in fill("scale", LACKING) and "23" in fill("scale", ITEM)


def test_the_table_and_made_up_answers():
    items = [ITEM, ITEM, LACKING, LACKING]
    verdicts = [
        Verdict("a", 1.0, "right"),
        Verdict("b", 0.0, "wrong"),
        Verdict("c", 1.0, "refused"),
        Verdict("d", None, None, "status 500"),
    ]
    got = judge_summary(items, verdicts, resamples=50)
    assert got["judge/hallucination_rate"] == pytest.approx(1 / 3)
    assert got["judge/refusal_rate"] == 1.0 and got["judge/over_refusal_rate"] == 0.0
    text = format_table(got["judge/table"]).splitlines()
    assert text[1].split() == ["sufficient", "1", "1", "0", "0"]
    assert text[2].split() == ["insufficient", "0", "0", "1", "1"]
    nothing = judge_summary([ITEM], [Verdict("a", None, None)], resamples=50)
    assert nothing["judge/accuracy"] is None and nothing["judge/ci"] is None


def test_items_of_a_run_folder(tmp_path):
    row = {"id": "q", "question": "?", "answers": ["5"], "is_sufficient": True, "answer": "6"}
    write_jsonl(tmp_path / "predictions.jsonl", [row | {"prediction": "<answer> 5 </answer>"}])
    assert judge_items(tmp_path)[0].prediction.strip() == "5"
    write_jsonl(tmp_path / "predictions.jsonl", [row | {"prediction": "it is 6"}])
    assert judge_items(tmp_path)[0].prediction == "6"
    write_jsonl(tmp_path / "predictions.jsonl", [{"id": "q", "prediction": "x"}])
    with pytest.raises(ValueError, match="row 1 has no answers, is_sufficient, question"):
        judge_items(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        judge_items(tmp_path / "nothing")


def test_sufficiency_by_page_rule_and_by_rater(tmp_path):
    assert page_rule(["a", "b"], ["b", "c", "a"]) and not page_rule(["a", "d"], ["a"])
    assert not page_rule([], ["a"])
    assert parse_sufficiency('1. yes\n{"subquestions": ["x"], "sufficient": 1}') is True
    with pytest.raises(JudgeError, match="no verdict of 0 or 1"):
        parse_sufficiency('{"sufficient": 0.5}')
    (tmp_path / "page.png").write_bytes(b"\x89PNG")

    def script(body):
        content = body["messages"][0]["content"]
        return '{"sufficient": 1}' if isinstance(content, list) else "who knows"

    with FakeServer(script) as server:
        client = ChatClient(ServerConfig(base_url=server.url, model="fake"), sleep=lambda s: None)
        got = rate_sufficiency(
            ServerChat(client), ["a?", "b?"], [[tmp_path / "page.png"], "the text of a page"]
        )
    assert [one for one, _ in got] == [True, None] and "who knows" in got[1][1]


def test_agreement_by_hand():
    """Both rate six pairs: 2 yes-yes, 3 no-no, 1 apart: rate 5/6, chance 1/2 → kappa 2/3."""
    first = [True, True, True, False, False, False, None]
    second = [True, True, False, False, False, False, True]
    got = agreement(first, second)
    chance = (3 / 6) * (2 / 6) + (3 / 6) * (4 / 6)
    assert got["n"] == 6 and got["rate"] == pytest.approx(5 / 6)
    assert got["kappa"] == pytest.approx((5 / 6 - chance) / (1 - chance))
    assert agreement([True], [True])["kappa"] is None and agreement([], [])["rate"] is None
