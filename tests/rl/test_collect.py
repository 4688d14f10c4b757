"""The single-turn environment around a scripted engine: what is sampled is judged, filtered and batched."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.data.pipeline import Example
from evisrag_jax.data.sources import read_records
from evisrag_jax.pages.plan import BUDGETS, VisionLayout
from evisrag_jax.prompts.sections import parse_sections
from evisrag_jax.prompts.template import load_template
from evisrag_jax.prompts.tokenizer import (
    SpecialIds,
    decode_with_offsets,
    encode_response,
    load_tokenizer,
)
from evisrag_jax.rewards.boxes import write_boxes
from evisrag_jax.rewards.evisrag import RewardConfig, score_response
from evisrag_jax.rewards.gold import GoldError, gold_text
from evisrag_jax.rl.collect import Collector, gold_of
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.rl.recipes import preset
from evisrag_jax.rl.scopes import encode_tags, scope_masks
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.batching import Limits, prepare
from evisrag_jax.training.feature_cache import FeatureCache
from evisrag_jax.training.page_cache import PageCache
from experiments.mini.tokenizer import build
from tests.rl import tiny

LAYOUT = VisionLayout(window=56)
T = 96
PARTIAL = FilterConfig(rule="variance", tries=1, train_on_partial=True)


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return load_tokenizer(build(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return read_records(write_dataset(tmp_path_factory.mktemp("data"), 6, "train"))


@pytest.fixture(scope="module")
def item(tok):
    """record → Prepared."""
    cache, limits = PageCache(), Limits.of([tiny.bucket(response_length=T)])

    def make(record):
        return prepare(
            record,
            tokenizer=tok,
            template=load_template("mini"),
            layout=LAYOUT,
            budget=BUDGETS["mini"],
            limits=limits,
            cache=cache,
        )

    return make


@pytest.fixture(scope="module")
def complete(tok):
    """(text or ids, finish) → Completion, as the engine makes them."""
    end = SpecialIds.from_tokenizer(tok).im_end

    def make(response, finish="stop"):
        body = encode_response(tok, response) if isinstance(response, str) else response
        body = np.asarray(body, np.int32)
        text, offsets = decode_with_offsets(tok, body)
        if finish == "stop":
            body = np.append(body, np.int32(end))
            offsets = np.concatenate([offsets, np.full((1, 2), len(text), np.int32)])
        logp = -0.01 * np.arange(1, len(body) + 1, dtype=np.float32)
        return Completion(body, logp, text, offsets, finish, len(body))

    return make


class Script(Engine):
    """An engine that runs no model: it answers calls in turn from a list of groups, and remembers what it was asked."""

    def __init__(self, *rounds):
        self.layout, self.rounds, self.calls = LAYOUT, list(rounds), []

    def generate(self, requests, sampling, *, group, seed, step, params, on_group):
        self.calls.append({"ids": [r.id for r in requests], "step": step, "sampling": sampling})
        self.calls[-1] |= {"group": group, "seed": seed, "params": params}
        self.calls[-1] |= {"features": [r.features for r in requests]}
        groups = self.rounds.pop(0)
        assert len(groups) == len(requests) and all(len(g) == group for g in groups)
        for i in reversed(range(len(groups))):  # whoever is done first
            on_group(i, groups[i])
        return groups


def config(mode="paper", **changes) -> RLConfig:
    """P = 2, G = 3."""
    code = mode == "code"
    fields = {
        "prompts": 2,
        "group": 3,
        "max_tokens": T,
        "estimator": "code" if code else "paper",
        "reward": RewardConfig(mode=mode, overlong_max=60, overlong_buffer=20, overlong_min=10),
        "loss": PolicyLossConfig.code(nan_policy="safe_zero") if code else PolicyLossConfig(),
    }
    return RLConfig(**(fields | changes))


def collector(tok, item, rl, batches, *rounds, sizes=None, **more):
    """(collector, engine) over batches of records."""
    stream = iter([[Example(r, item(r), 0, 0) for r in batch] for batch in batches])
    engine = Script(*rounds)
    bucket = tiny.bucket(prompts=rl.prompts, group=rl.group, response_length=T, **(sizes or {}))
    encode = lambda text: encode_response(tok, text)  # noqa: E731
    return Collector(engine, stream, rl, [bucket], encode, seed=7, **more), engine


@pytest.fixture
def groups(records, complete):
    """Of two records: the target, another record's target, and words without any tag."""
    return [
        [complete(records[i].response), complete(records[i + 2].response), complete("no page")]
        for i in (0, 1)
    ]


@pytest.mark.parametrize("match", ["char_offsets", "token_ids"])
@pytest.mark.parametrize("mode", ["paper", "code", "strict"])
def test_rewards_and_masks_are_those_of_direct_calls(tok, item, records, groups, mode, match):
    rl = config(mode, scope_match=match)
    collect, engine = collector(tok, item, rl, [records[:2]], groups)
    got = collect("params", 3)
    collect.close()
    call = engine.calls[0]
    assert call["group"] == 3 and call["seed"] == 7 and call["params"] == "params"
    assert call["sampling"].temperature == rl.temperature and call["sampling"].max_tokens == T
    tags = encode_tags(lambda text: encode_response(tok, text))
    for p, (record, group) in enumerate(zip(records[:2], groups, strict=True)):
        for g, done in enumerate(group):
            score = score_response(done.text, gold_text(record), done.length, rl.reward)
            np.testing.assert_allclose(got.rewards[p, g], list(score.values()), rtol=1e-6)
            row = np.full(T, -1)
            row[: done.length] = done.ids
            scope = "code" if mode == "code" else "paper"
            want, _ = scope_masks(
                done.text, done.offsets, row, done.length, mode=scope, match=match, tag_ids=tags
            )
            np.testing.assert_array_equal(got.masks[p, g], want)
    # Whole tags are found either way; in this vocabulary each is a token.
    assert got.metrics["scope/found_think"] == got.metrics["scope/found_evidence"] == 4 / 6
    names = rl.reward.channels
    means = {f"reward/{name}": got.rewards[..., c].mean() for c, name in enumerate(names)}
    means["reward/overall"] = got.rewards.sum(-1).mean()
    means["reward/group_spread"] = np.ptp(got.rewards.sum(-1), axis=1).mean()
    assert {k: got.metrics[k] for k in means} == pytest.approx(means, rel=1e-6)
    assert got.metrics["reward/group_spread"] > 0 and got.valid.all() and got.trained.all()


@pytest.mark.parametrize("kind", ["perception_r1", "vlm_r1"])
def test_boxes_are_rewarded_where_they_lie_on_the_pages(tok, item, records, complete, kind):
    """Cells of the mini world's pages, 5 x 4 tokens each. Right is "2 2 , 3 2" on the second page; half of
    it is paid 1/2 as IoU and 51/101 as AP, the right cells of another page nothing. Every token has the one
    scalar."""
    reward = preset(kind, reward=RewardConfig(kind=kind, units="cells")).reward
    rl = config(estimator="grpo", reward=reward)
    boxed = [dataclasses.replace(r, boxes=((), ((30.0, 30.0, 50.0, 20.0),), ())) for r in records]
    right = write_boxes(gold_of(item(boxed[0]), reward, LAYOUT), "cells")
    assert right.split("\n")[1] == "[2]: 2 2 , 3 2"
    begin = "<observe>a</observe> <evidence>b</evidence> <think>c</think> <answer>\n"
    lists = (right, "[2]: 2 2", "[1]: 2 2 , 3 2")
    group = [complete(f"{begin}{text}\n</answer>") for text in lists]
    got = collector(tok, item, rl, [boxed[:2]], [group, group])[0](None, 1)
    half = 1 / 2 if kind == "perception_r1" else 51 / 101
    np.testing.assert_allclose(got.rewards, [[[1, 1], [half, 1], [0, 1]]] * 2, rtol=1e-6)
    for g, done in enumerate(group):
        assert (got.masks[0, g] == (np.arange(T) < done.length)).all()
    assert got.metrics["reward/format"] == 1.0 and got.metrics["reward/match_high"] == 1 / 3
    assert "rollout/exact" not in got.metrics and "rollout/length_right" not in got.metrics


def test_a_record_without_boxes_is_named(tok, item, records, groups):
    rl = config(estimator="grpo", reward=RewardConfig(kind="vlm_r1"))
    bare = [dataclasses.replace(records[0], boxes=None), records[1]]
    with pytest.raises(GoldError, match=f"record '{records[0].id}': has no boxes"):
        collector(tok, item, rl, [bare], groups)[0](None, 1)


def test_step_rewards_of_the_released_text_mode_pay_the_whole_response(tok, item, records, groups):
    """StepGRPO's channels have no spans of the released six."""
    rl = config(estimator="grpo", reward=RewardConfig(kind="r1vl", mode="code"))
    got = collector(tok, item, rl, [records[:2]], groups)[0](None, 1)
    assert got.masks[0, 0].sum() == 3 * groups[0][0].length
    assert got.rewards[0, 0, 0] == 1.0


def test_b43_the_sampled_ids_are_trained_on(tok, item, records, groups, complete):
    """B43: ids whose text would be encoded otherwise (a special token in the middle) come out as they
    were sampled, with the sampler's log-probs; rewards see the text."""
    start = SpecialIds.from_tokenizer(tok).im_start
    odd = complete([start, *encode_response(tok, "no page"), start], "length")
    assert list(encode_response(tok, odd.text)) != odd.ids.tolist()
    groups[0][1] = odd
    collect, _ = collector(tok, item, config(), [records[:2]], groups)
    got = collect(None, 1)
    for p, group in enumerate(groups):
        for g, done in enumerate(group):
            assert got.groups.lengths[p, g] == done.length
            np.testing.assert_array_equal(got.groups.tokens[p, g, : done.length], done.ids)
            np.testing.assert_array_equal(got.sampled[p, g, : done.length], done.logp)
            assert not got.sampled[p, g, done.length :].any()
    assert got.rows[0]["samples"][1]["text"] == odd.text


@pytest.mark.parametrize("left_out", [False, True])
def test_b46_cut_responses(tok, item, records, groups, complete, left_out):
    """B46: a cut answer scores nothing; left out, it stays in the baseline and in the metrics."""
    text = records[0].response
    cut = complete(text[: text.index("</answer>")], "length")
    groups[0][0] = cut
    rl = config(mask_truncated=left_out)
    got = collector(tok, item, rl, [records[:2]], groups)[0](None, 1)
    names = rl.reward.channels
    assert got.rewards[0, 0, names.index("format")] == 0
    assert got.rewards[0, 0, names.index("derivation")] == 0
    assert got.metrics["rollout/clipped_ratio"] == pytest.approx(1 / 6)
    assert got.metrics["rollout/length_max"] == max(d.length for g in groups for d in g)
    assert got.valid.all() and got.trained[0, 0] != left_out
    assert got.trained.sum() == (5 if left_out else 6)


def test_failed_completions_take_no_part(tok, item, records, groups, complete):
    """finish "error": no reward, no token, and no spread that would keep a constant group."""
    good = complete(records[0].response)
    groups[0] = [good, good, complete("no", "error")]
    rl = config(filter=PARTIAL)
    got = collector(tok, item, rl, [records[:2]], groups)[0](None, 1)
    assert got.metrics["rollout/failed"] == 1 and got.metrics["filter/dropped_constant"] == 1
    assert got.metrics["filter/kept"] == 1
    everything = config()
    got = collector(tok, item, everything, [records[:2]], groups)[0](None, 1)
    np.testing.assert_array_equal(got.valid, [[True, True, False], [True] * 3])
    np.testing.assert_array_equal(got.trained, got.valid)


@pytest.fixture
def constant(records, complete):
    """A group without spread for record i."""
    return lambda i: [complete(records[i].response)] * 3


def test_tries_fill_the_batch_and_the_surplus_goes(tok, item, records, groups, constant):
    """Round 1 keeps one of two groups, round 2 both: the first two in the order they came; means are
    those of all four; keys of the two rounds differ."""
    rl = config(filter=FilterConfig(rule="variance", tries=3, surplus="discard"))
    rounds = ([constant(0), groups[1]], groups)
    collect, engine = collector(tok, item, rl, [records[:2], records[2:4]], *rounds)
    got = collect(None, 5)
    assert [row["id"] for row in got.rows] == [records[1].id, records[2].id]
    names = ("kept", "groups", "rounds", "dropped_constant")
    assert [got.metrics[f"filter/{name}"] for name in names] == [2, 4, 2, 1]
    assert [call["step"] for call in engine.calls] == [5000, 5001]
    want = score_response(records[0].response, gold_text(records[0]), 50, rl.reward)["format"]
    assert want == 1 and got.metrics["reward/format"] == pytest.approx((3 + 2 + 2 + 2) / 12)
    assert got.valid.all() and {name for name, *_ in got.spans} == {"reward", "prepare"}


def test_a_partial_batch_has_empty_rows(tok, item, records, groups, constant):
    rl = config(filter=PARTIAL)
    got = collector(tok, item, rl, [records[:2]], [constant(0), groups[1]])[0](None, 1)
    assert got.metrics["filter/kept"] == 1 and [row["id"] for row in got.rows] == [records[1].id]
    assert got.valid[0].all() and not got.valid[1].any() and not got.trained[1].any()
    assert not got.groups.lengths[1].any() and got.groups.prompt.lengths[1] == 1
    assert not got.masks[1].any() and not got.rewards[1].any()


def test_b52_no_group_kept_gives_a_batch_that_takes_no_part(tok, item, records, constant):
    """Released code crashes here; the step then has no signal and moves nothing."""
    rl = config(filter=dataclasses.replace(PARTIAL, tries=2))
    rounds = [[constant(0), constant(1)]] * 2
    got = collector(tok, item, rl, [records[:2]] * 2, *rounds)[0](None, 1)
    assert got.metrics["filter/kept"] == 0 and got.metrics["filter/rounds"] == 2
    assert not got.valid.any() and not got.trained.any() and len(got.rows) == 1
    assert got.groups.tokens.shape == (2, 3, T)


def test_b49_groups_are_occurrences(tok, item, records, groups):
    """B49: one prompt twice is two groups with their own random numbers; so is the same question about
    other pages. Another order of the batch changes nothing for a prompt."""
    twin = dataclasses.replace(records[0], id="twin", images=records[1].images)
    rl = config("code", prompts=4)
    four = [groups[0], groups[1], groups[0][::-1], groups[1][::-1]]
    batch = [records[0], records[1], records[0], twin]
    collect, engine = collector(tok, item, rl, [batch], four)
    got = collect(None, 1)
    assert engine.calls[0]["ids"] == [
        *(records[0].id, records[1].id, f"{records[0].id}#2", "twin"),
    ]
    np.testing.assert_array_equal(got.rewards[2], got.rewards[0][::-1])
    assert got.groups.prompt.tokens.shape[0] == 4
    assert (got.groups.images.patches[3] == got.groups.images.patches[1]).all()
    order = [2, 0, 3, 1]
    again = collector(tok, item, rl, [[batch[i] for i in order]], [four[i] for i in order])[0]
    other = again(None, 1)
    for name in ("rewards", "masks", "sampled", "valid"):
        np.testing.assert_array_equal(getattr(other, name), getattr(got, name)[order])


def test_batch_arrays_are_placed_while_responses_are_judged(
    tok, item, records, groups, monkeypatch
):
    """Judging waits here until the arrays are placed; a filter needs the rewards first."""
    placed = threading.Event()

    def put(batch):
        placed.set()
        return batch._replace(tokens=batch.tokens + 0)

    waited = []

    def slow(*args):
        waited.append(placed.wait(30))
        return score_response(*args)

    monkeypatch.setattr("evisrag_jax.rl.collect.score_response", slow)
    got = collector(tok, item, config(), [records[:2]], groups, put=put)[0](None, 1)
    assert waited == [True] * 6
    monkeypatch.undo()
    want = collector(tok, item, config(), [records[:2]], groups)[0](None, 1)
    for a, b in zip(jax.tree.leaves(got.groups), jax.tree.leaves(want.groups), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(got.rewards, want.rewards)
    spans = {name: (begin, end) for name, begin, end in got.spans[:2]}
    assert spans["prepare"][0] < spans["reward"][1] and spans["reward"][0] < spans["prepare"][1]
    placed.clear()
    kept = config(filter=FilterConfig(rule="variance"))
    seen = []
    monkeypatch.setattr(
        "evisrag_jax.rl.collect.score_response",
        lambda *args: seen.append(placed.is_set()) or score_response(*args),
    )
    filtered = collector(tok, item, kept, [records[:2]], groups, put=put)[0](None, 1)
    assert seen == [False] * 6 and placed.is_set()
    np.testing.assert_array_equal(filtered.groups.tokens, want.groups.tokens)


def test_a_frozen_towers_features_go_to_engine_and_update(tok, item, records, groups):
    """No patches in the batch; each page is encoded once in two steps over the same records."""
    model = tiny.tiny_config()
    mesh = make_mesh(devices=jax.devices()[:1])
    features = FeatureCache(model, LAYOUT, [(6, 20)], dtype="float32", mesh=mesh, max_bytes=2**20)
    params = jax.tree.map(np.asarray, tiny.draw_params(model))
    collect, engine = collector(
        tok, item, config(), [records[:2]] * 2, groups, groups, features=features
    )
    first, second = collect(params, 1), collect(params, 2)
    pages = [item(record).pages for record in records[:2]]
    want = [features.get(some) for some in pages]
    count = sum(map(len, pages))
    assert (features.misses, features.hits) == (count, 2 * count)
    for step, call in zip((first, second), engine.calls, strict=True):
        assert step.groups.images is None
        rows = step.groups.features.reshape(2, 3, 20, -1)
        for p, some in enumerate(want):
            for i, one in enumerate(some):
                np.testing.assert_array_equal(call["features"][p][i], one)
                np.testing.assert_array_equal(rows[p, i, : len(one)], one)
    assert "encode" in {name for name, *_ in first.spans}


def test_found_tags_are_logged_as_rates(tok, item, records, groups, complete):
    groups[0][2] = complete("<think> no page")
    got = collector(tok, item, config(), [records[:2]], groups)[0](None, 1)
    rates = {tag: got.metrics[f"scope/found_{tag}"] for tag in ("observe", "think", "answer")}
    assert rates == pytest.approx({"observe": 4 / 6, "think": 5 / 6, "answer": 4 / 6})


def test_rollout_rows_hold_what_the_report_shows(tok, item, records, groups):
    got = collector(tok, item, config(), [records[:2]], groups)[0](None, 9)
    row, record = got.rows[0], records[0]
    assert row["step"] == 9 and row["id"] == record.id and row["question"] == record.question
    assert row["images"] == list(record.images) and row["answers"] == list(record.answers)
    assert row["evidence"] == list(record.evidence)
    sample = row["samples"][0]
    sections = parse_sections(groups[0][0].text)
    assert sample["sections"] == {tag: section.text for tag, section in sections.items()}
    assert set(sample["rewards"]) == {"perception", "derivation", "format"}
    assert sample["length"] == groups[0][0].length and sample["finish"] == "stop"
    assert [s["index"] for s in row["samples"]] == [0, 1, 2]
