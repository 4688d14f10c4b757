"""StepGRPO as R1-Router has it: two prompts a record, each with a group and a reward of its own."""
# ruff: noqa: F811

import dataclasses

import numpy as np
import pytest

from evisrag_jax.prompts.tokenizer import encode_response
from evisrag_jax.rl import steps
from evisrag_jax.rl.recipes import preset
from tests.rl.test_collect import (  # noqa: F401, fixtures among them
    T,
    collector,
    complete,
    config,
    groups,
    item,
    records,
    tok,
)


@pytest.fixture
def rl():
    base = dataclasses.replace(preset("stepgrpo_router"), prompts=4, group=3, max_tokens=T)
    return dataclasses.replace(base, loss=dataclasses.replace(base.loss, kl_coef=0.0))


def rest(record):
    """What follows the evidence of a record's response."""
    return record.response.split(steps.CLOSE)[1]


def test_a_response_is_cut_behind_its_evidence(records, complete):
    whole = complete(records[0].response)
    cut = steps.cut_at_evidence(whole)
    assert cut.text == records[0].response.split(steps.CLOSE)[0] + steps.CLOSE
    assert cut.length == len(cut.ids) == len(cut.logp) == len(cut.offsets) < whole.length
    np.testing.assert_array_equal(cut.ids, whole.ids[: cut.length])
    assert steps.cut_at_evidence(cut) is cut, "nothing behind it: one step is the response"
    open_end = complete("<evidence>\n[1]: no page")
    assert steps.cut_at_evidence(open_end) is open_end


@pytest.mark.parametrize("source", ["gold", "sampled"])
def test_rows_of_both_steps(tok, item, records, complete, rl, source):
    """Rows alternate; the first is paid perception for its cut responses, the second derivation for what
    follows the evidence in its prompt: the gold one, or that of the first sampled response."""
    rl = dataclasses.replace(rl, step_prompts=source)
    other = complete(records[2].response)
    first = [[other, complete(records[i].response), complete("no page")] for i in (0, 1)]
    second = [[complete(rest(records[i])), complete("no"), complete("no")] for i in (0, 1)]
    collect, engine = collector(
        tok, item, rl, [records[:2]], first, second, sizes={"prompt_length": 144}
    )
    got = collect(None, 1)
    ids = [call["ids"] for call in engine.calls]
    assert (
        ids[1]
        == [f"{id}#derivation" for id in ids[0]]
        == [f"{r.id}#derivation" for r in records[:2]]
    )
    assert [row["step_prompt"] for row in got.rows] == ["perception", "derivation"] * 2
    names = rl.reward.channels
    perception, derivation = names.index("perception"), names.index("derivation")
    np.testing.assert_array_equal(got.rewards[0::2, 1, perception], 1)
    assert not np.delete(got.rewards[0::2], perception, -1).any()
    np.testing.assert_array_equal(got.rewards[1::2, :, derivation], [[1, 0, 0]] * 2)
    assert not np.delete(got.rewards[1::2], derivation, -1).any()
    base = item(records[0]).prompt
    prompts = got.groups.prompt
    if source == "gold":
        whole = encode_response(tok, records[0].response)
        text = records[0].response.split(steps.CLOSE)[0] + steps.CLOSE
        behind = whole[: len(encode_response(tok, text))]
        assert tok.decode(behind[-1:]) == steps.CLOSE
    else:
        behind = steps.cut_at_evidence(other).ids
    n = len(base.ids)
    assert prompts.lengths[0] == n and prompts.lengths[1] == n + len(behind)
    np.testing.assert_array_equal(prompts.tokens[1, n : n + len(behind)], behind)
    places = base.next_position + np.arange(len(behind))
    np.testing.assert_array_equal(prompts.positions[1, :, n : n + len(behind)], [places] * 3)
    assert prompts.next_position[1] == base.next_position + len(behind)
    assert (got.groups.lengths[0] == [steps.cut_at_evidence(d).length for d in first[0]]).all()


def test_gold_evidence_without_a_response(records):
    record = dataclasses.replace(records[0], response=None)
    text = steps.gold_prefix(record)
    assert text.startswith("<evidence>\n[1]: ") and text.endswith("</evidence>")
    assert text.count("no relevant information") == sum(e is None for e in record.evidence)
