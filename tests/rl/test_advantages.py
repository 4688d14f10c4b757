"""Group advantages against the released numbers, the equations in torch, and hand-made cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.rl.advantages import (
    code_advantages,
    group_by_id,
    grpo_advantages,
    occurrence_ids,
    paper_advantages,
    rloo_advantages,
    to_tokens,
    zscore,
)
from tests.rl import torch_reference as reference

TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}  # float32


def ones(*shape):
    return jnp.ones(shape, bool)


def one_channel(values, **options):
    """Advantages of one group with one channel."""
    rewards = jnp.asarray(values, jnp.float32)[None, :, None]
    return np.asarray(code_advantages(rewards, ones(1, len(values)), **options))[0, :, 0]


def test_golden_code_advantages(golden):
    """Every released case, grouped by label. The group of seven equal scores is float32 rounding
    over epsilon in the release (up to 0.19): only its bound is asserted without the exact zero."""
    for case in golden("advantages")["cases"]:
        scores, want = (np.asarray(case[key], np.float32) for key in ("scores", "advantages"))
        groups = group_by_id(case["group"])
        inputs = jnp.asarray(groups.gather(scores)), jnp.asarray(groups.valid)
        got = groups.scatter(code_advantages(*inputs, exact_zero=False))
        if "group_of_7_nonexact" in case["name"]:
            assert np.abs(got).max() < 0.32
            assert not np.any(groups.scatter(code_advantages(*inputs)))
            continue
        np.testing.assert_allclose(got, want, err_msg=case["name"], **TOLERANCE)
        exact = groups.scatter(code_advantages(*inputs))
        np.testing.assert_allclose(exact, want, err_msg=case["name"], **TOLERANCE)


def test_golden_group_of_one_is_refused(golden):
    """The release stops with an AssertionError; here the group is named."""
    assert golden("advantages")["error_cases"] == [
        {"name": "group_of_1", "raises": "AssertionError"}
    ]
    with pytest.raises(ValueError, match="group 'b' has one response"):
        group_by_id(["a", "a", "b"])


def test_golden_grpo_and_rloo(golden):
    for case in golden("advantages")["grpo_cases"]:
        mask = np.asarray(case["response_mask"], np.float32)
        groups = group_by_id(case["group"])
        rewards = jnp.asarray(groups.gather(np.asarray(case["token_level_rewards"], np.float32)))
        valid = jnp.asarray(groups.valid)
        for estimator, key in (
            (grpo_advantages, "advantages"),
            (rloo_advantages, "rloo_advantages"),
        ):
            got = groups.scatter(estimator(rewards, valid))[:, None] * mask
            np.testing.assert_allclose(got, np.asarray(case[key]), **TOLERANCE)


def test_b47_zero_spread_and_known_values():
    """B47: constant groups give exactly 0 whatever their mean rounds to; deviation with n - 1."""
    assert not np.any(one_channel([1.0] * 8))
    for value, count in ((6.8, 7), (0.3, 6), (0.1, 7), (1e-3, 5)):
        assert not np.any(one_channel([value] * count))
    naive = one_channel([6.8] * 7, exact_zero=False)
    assert np.abs(naive).max() < 0.4  # what the option is for: rounding of the mean over epsilon
    want = [1.499997, -0.499999, -0.499999, -0.499999]
    np.testing.assert_allclose(one_channel([1, 0, 0, 0]), want, atol=1e-6)
    np.testing.assert_allclose(one_channel([0, 1]), [-0.707106, 0.707106], atol=1e-6)


def test_b47_each_channel_is_normalised_on_its_own():
    """B47: scaling or freezing one channel leaves the others as they are."""
    rewards = jnp.asarray(np.random.default_rng(0).random((2, 5, 3)), jnp.float32)
    base = code_advantages(rewards, ones(2, 5))
    changed = code_advantages(rewards.at[..., 1].set(4.2), ones(2, 5))
    assert not np.any(changed[..., 1])
    np.testing.assert_array_equal(base[..., ::2], changed[..., ::2])


@pytest.mark.parametrize("seed", range(4))
def test_code_advantages_match_torch(seed):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(3, 6, 4)).astype(np.float32)
    rewards[0, :, 1] = 0.7  # a constant channel
    valid = rng.random((3, 6)) < 0.7
    want = reference.channel_advantages(reference.tensor(rewards), valid)
    got = code_advantages(jnp.asarray(rewards), jnp.asarray(valid))
    np.testing.assert_allclose(got, want.numpy(), **TOLERANCE)
    assert not np.any(np.asarray(got)[~valid])


@pytest.mark.parametrize("align", ["scope", "index"])
@pytest.mark.parametrize("seed", range(3))
def test_paper_advantages_match_torch(seed, align):
    """EVisRAG eq. 7-9 with unequal lengths, missing sections, straddling tokens, absent rows."""
    rng = np.random.default_rng(seed)
    P, G, T = 2, 5, 12
    rewards = rng.random((P, G, 3)).astype(np.float32)
    rewards[1] = 0.5  # no spread at all
    response = np.arange(T) < rng.integers(3, T + 1, (P, G))[..., None]
    masks = np.stack([rng.random((P, G, T)) < 0.4, rng.random((P, G, T)) < 0.4, response], 2)
    masks &= response[:, :, None]
    masks[0, 0, 0] = False  # this response has no perception section
    valid = np.ones((P, G), bool)
    valid[0, 4] = False
    want = reference.token_advantages(reference.tensor(rewards), masks, valid, align)
    arrays = [jnp.asarray(x) for x in (rewards, masks, valid)]
    got = jax.jit(lambda *a: paper_advantages(*a, align=align))(*arrays)
    np.testing.assert_allclose(got, want.numpy(), **TOLERANCE)
    assert not np.any(np.asarray(got)[~response]) and not np.any(np.asarray(got)[1])


def test_paper_scope_advantages_by_hand():
    """Two responses of unequal length; the second has no perception section.

    token        0  1  2  3  4         mean rewards: derivation (0.8 + 1)/2 and (0.2 + 0)/2
    response 0   p  p  -  d  d         format only: 1 and 0
    response 1   -  d  d               perception: one response alone, hence 0
    """
    masks = np.zeros((1, 2, 3, 5), bool)
    masks[0, 0, 0, :2] = masks[0, 0, 1, 3:] = masks[0, 1, 1, 1:3] = True
    masks[0, 0, 2, :] = masks[0, 1, 2, :3] = True
    rewards = jnp.asarray([[[0.6, 0.8, 1.0], [0.0, 0.2, 0.0]]], jnp.float32)
    got = paper_advantages(rewards, jnp.asarray(masks), ones(1, 2))
    h, f = 0.4 / (0.8 / np.sqrt(2) + 1e-6), 0.5 / (1 / np.sqrt(2) + 1e-6)
    want = [[0, 0, f, h, h], [-f, -h, -h, 0, 0]]
    np.testing.assert_allclose(got[0], want, **TOLERANCE)
    index = paper_advantages(rewards, jnp.asarray(masks), ones(1, 2), align="index")
    assert not np.any(index[0, :, 3:])  # one response only has these tokens
    with pytest.raises(ValueError, match="align='rows'"):
        paper_advantages(rewards, jnp.asarray(masks), ones(1, 2), align="rows")


def test_empty_scope_and_groups_without_members_give_zeros():
    masks, rewards = jnp.zeros((2, 3, 3, 4), bool), jnp.ones((2, 3, 3)).at[0, 0].set(2.0)
    for align in ("scope", "index"):
        assert not np.any(paper_advantages(rewards, masks, ones(2, 3), align=align))
    nobody = jnp.zeros((2, 3), bool)
    for estimator in (code_advantages, grpo_advantages, rloo_advantages):
        got = np.asarray(estimator(rewards, nobody))
        assert np.isfinite(got).all() and not got.any()
    alone = nobody.at[:, 0].set(True)
    assert not np.any(code_advantages(rewards, alone)) and not np.any(
        rloo_advantages(rewards, alone)
    )


def test_invalid_entries_may_hold_anything():
    values = jnp.asarray([[1.0, 3.0, jnp.nan, jnp.inf]])
    got = zscore(values, jnp.asarray([[True, True, False, False]]), axis=1)
    np.testing.assert_allclose(got, [[-np.sqrt(0.5), np.sqrt(0.5), 0, 0]], atol=2e-6)


def test_to_tokens_broadcasts_inside_the_mask():
    mask = jnp.asarray(np.random.default_rng(1).random((1, 2, 3, 4)) < 0.5)
    got = to_tokens(jnp.arange(6.0).reshape(1, 2, 3), mask)
    np.testing.assert_array_equal(got, np.arange(6.0).reshape(1, 2, 3, 1) * np.asarray(mask))


def test_b49_groups_follow_ids_not_positions():
    """B49: any permutation of 4 prompts x 8, and any split of the groups, leaves each sample's
    advantage bitwise as it was."""
    rng = np.random.default_rng(49)
    ids = np.repeat(["p0", "p1", "p2", "p3"], 8)
    rewards = rng.random((32, 6)).astype(np.float32)

    def advantages(order, parts=1):
        groups = group_by_id(list(ids[order]))
        grouped, valid = jnp.asarray(groups.gather(rewards[order])), jnp.asarray(groups.valid)
        split = [code_advantages(r, v) for r, v in zip(
            jnp.split(grouped, parts), jnp.split(valid, parts), strict=True)]  # fmt: skip
        rows = np.empty((32, 6), np.float32)
        rows[order] = groups.scatter(np.concatenate(split))
        return rows

    want = advantages(np.arange(32))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(32)
        within = np.concatenate(
            [order[np.isin(order, np.arange(p * 8, p * 8 + 8))] for p in range(4)]
        )
        np.testing.assert_allclose(advantages(order), want, rtol=0, atol=1e-6)
        np.testing.assert_allclose(advantages(within, parts=4), want, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(advantages(np.arange(32), parts=2), want)


def test_b49_equal_prompts_are_separate_groups():
    """B49: one prompt twice in a batch, and equal texts with other pages (ids), do not mix."""
    keys = occurrence_ids(["q1", "q2", "q1", "q1"])
    assert keys == ["q1", "q2", "q1#2", "q1#3"]
    groups = group_by_id([key for key in keys for _ in range(2)])
    assert groups.ids == ("q1", "q2", "q1#2", "q1#3") and groups.index.shape == (4, 2)
    with pytest.raises(ValueError, match="'q1' has 4 responses, more than 2"):
        group_by_id(["q1"] * 4, size=2)


def test_uneven_groups_pad_and_come_back():
    groups = group_by_id(["a", "b", "a", "b", "a"], size=4)
    np.testing.assert_array_equal(groups.valid, [[1, 1, 1, 0], [1, 1, 0, 0]])
    rows = np.arange(10).reshape(5, 2)
    np.testing.assert_array_equal(groups.scatter(groups.gather(rows)), rows)
    assert group_by_id([]).index.shape[0] == 0
