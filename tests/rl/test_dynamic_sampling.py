"""Dynamic sampling: what is kept, carried over, discarded and told; B55."""
# ruff: noqa: F811

import dataclasses

import numpy as np
import pytest

from evisrag_jax.data.pipeline import Example
from evisrag_jax.rl.collect import Collector
from evisrag_jax.rl.filter import FilterConfig, ShortBatch
from evisrag_jax.rl.recipes import preset
from tests.rl import tiny
from tests.rl.test_collect import (  # noqa: F401, fixtures among them
    Script,
    T,
    collector,
    complete,
    config,
    constant,
    groups,
    item,
    records,
    tok,
)


class Stream:
    """Batches of two records in order, with the positions and the state of a `RecordStream`."""

    def __init__(self, records, prepare):
        self.records, self.prepare, self.place = records, prepare, 0

    def record(self, position):
        return self.records[position % len(self.records)]

    def __next__(self):
        first, self.place = self.place, self.place + 2
        return [
            Example(self.record(i), self.prepare(self.record(i)), i, 0) for i in (first, first + 1)
        ]

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


@pytest.fixture
def make(tok, item, records):
    """(rl, rounds…) → a collector over a stream with positions."""

    def build(rl, *rounds):
        engine = Script(*rounds)
        engine.tokenizer = tok
        bucket = tiny.bucket(prompts=rl.prompts, group=rl.group, response_length=T)
        return Collector(engine, Stream(records, item), rl, [bucket], lambda text: [1], seed=7)

    return build


@pytest.fixture
def spread(records, complete):
    """A group with spread for record i."""
    return lambda i: [complete(records[i].response), complete("no"), complete("no page")]


SPREAD = FilterConfig("variance", tries=3)


def test_surplus_is_carried_and_trains_first(make, records, spread, constant):
    """Step 1 keeps 1 + 2 of 4 groups and trains two; the third opens step 2 as an answer of an earlier
    policy, and is in nobody's surplus again."""
    rl = config(filter=SPREAD)
    collect = make(rl, [constant(0), spread(1)], [spread(2), spread(3)], [spread(4), constant(5)])
    first, second = collect(None, 1), collect(None, 2)
    assert [row["id"] for row in first.rows] == [records[1].id, records[2].id]
    assert [row["id"] for row in second.rows] == [records[3].id, records[4].id]
    assert not first.stale.any() and second.stale.tolist() == [True, False]
    told = [
        {name: got.metrics[f"filter/{name}"] for name in ("carried_in", "carried_out", "kept")}
        for got in (first, second)
    ]
    assert told[0] == {"carried_in": 0, "carried_out": 1, "kept": 2}
    assert told[1] == {"carried_in": 1, "carried_out": 0, "kept": 2}
    assert first.metrics["filter/keep_rate"] == 3 / 4
    want = sum(done.length for done in constant(0))
    assert first.metrics["filter/dropped_tokens"] == want
    np.testing.assert_array_equal(second.sampled[0, 0, :5], spread(3)[0].logp[:5])


def test_discarded_surplus_is_a_cost(make, spread, constant):
    rl = config(filter=dataclasses.replace(SPREAD, surplus="discard"))
    rounds = ([constant(0), spread(1)], [spread(2), spread(3)], [spread(4), spread(5)])
    collect = make(rl, *rounds)
    got, after = collect(None, 1), collect(None, 2)
    want = sum(done.length for done in [*constant(0), *spread(3)])
    assert got.metrics["filter/dropped_tokens"] == want
    assert got.metrics["filter/carried_out"] == 0 and not after.stale.any()
    assert [row["id"] for row in after.rows] == [row["id"] for row in after.rows]


def test_metrics_before_and_behind_the_filter(make, spread, constant):
    got = make(config(filter=SPREAD), [constant(0), spread(1)], [spread(2), spread(3)])(None, 1)
    assert got.metrics["reward/format"] == pytest.approx((3 + 1 + 1 + 1) / 12)
    assert got.metrics["kept/format"] == pytest.approx((1 + 1) / 6)
    assert got.metrics["kept/overall"] == pytest.approx(got.rewards.sum(-1).mean())
    assert "time/discarded" in got.metrics


def test_a_resume_in_the_middle_goes_on_with_the_surplus(make, spread, constant):
    """A new collector that takes the state does what the first one does, array for array."""
    rl = config(filter=SPREAD)
    later = ([spread(4), constant(5)], [spread(0), spread(1)])
    collect = make(rl, [constant(0), spread(1)], [spread(2), spread(3)], *later)
    collect(None, 1)
    state = collect.get_state()
    assert len(state["carried"]) == 1 and state["carried"][0]["position"] == 3
    again = make(rl, *later)
    again.set_state(state)
    assert again.get_state() == state
    want, got = collect(None, 2), again(None, 2)
    for name in ("sampled", "rewards", "masks", "valid", "trained", "stale"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_array_equal(got.groups.tokens, want.groups.tokens)
    assert got.rows == want.rows


def test_b55_tries_end_with_the_keep_rate(make, constant):
    """B55: every group constant: the step ends after its tries, and says what groups were like."""
    collect = make(config(filter=SPREAD), *[[constant(0), constant(1)]] * 3)
    with pytest.raises(ShortBatch) as caught:
        collect(None, 7)
    said = str(caught.value)
    assert "step 7: 3 rounds kept 0 of 6 groups (0.0%)" in said and "constant 6" in said
    assert "mean reward" in said and "train_on_partial" in said


def test_b55_a_partial_batch_keeps_its_shape(make, records, spread, constant):
    """B55: train_on_partial goes on with empty rows; the stream has moved past what was discarded."""
    rl = config(filter=dataclasses.replace(SPREAD, tries=2, train_on_partial=True))
    collect = make(rl, [constant(0), spread(1)], [constant(2), constant(3)])
    got = collect(None, 1)
    assert got.rewards.shape[0] == 2 and got.valid[0].all() and not got.valid[1].any()
    assert collect.stream.place == 4 and got.metrics["filter/rounds"] == 2


def test_band_of_one_channel(make, records, spread, constant):
    """DAPO's rule looks at the answers alone: groups always or never right go, whatever else differs."""
    band = dataclasses.replace(preset("dapo").filter, tries=1, train_on_partial=True)
    rl = config(filter=band)
    got = make(rl, [constant(0), spread(1)])(None, 1)
    assert [row["id"] for row in got.rows] == [records[1].id]
    assert got.metrics["filter/dropped_high"] == 1


def test_unpaid_channels_are_no_signal(make, records, complete):
    """A group that differs in an unpaid channel only is constant."""
    rl = config(filter=dataclasses.replace(SPREAD, tries=1, train_on_partial=True))
    right = records[0].response
    blind = right.split("<evidence>")[0] + "<evidence>\n</evidence>" + right.split("</evidence>")[1]
    group = [complete(right), complete(right), complete(blind)]
    assert make(rl, [group, group])(None, 1).metrics["filter/kept"] == 2
    reward = dataclasses.replace(rl.reward, unpaid=("perception",))
    got = make(dataclasses.replace(rl, reward=reward), [group, group])(None, 1)
    assert got.metrics["filter/kept"] == 0 and got.metrics["filter/dropped_constant"] == 2
    assert got.metrics["reward/perception"] < 1, "still measured"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "std"}, "rule='std'; one of none, mean_band"),
        ({"surplus": "keep"}, "surplus='keep'"),
        ({"tries": 0}, "tries=0 must lie in 1..1000"),
    ],
)
def test_bad_filters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FilterConfig(**options)
