"""Difficulty: what is dropped, the mirrored J, the order."""

import itertools
from collections import Counter

import pytest

from evisrag_jax.construction.difficulty import DifficultyConfig, quotas, select, weight


def right(**levels):
    """{"l3": 2} → two prompts with three right completions each."""
    return {f"{level}-{i}": int(level[1:]) for level, count in levels.items() for i in range(count)}


def test_weights_are_a_mirrored_j():
    """Highest where one of n is right, falling; never solved is as rare as nearly always solved."""
    weights = [weight(level, 8, 2.0) for level in range(8)]
    assert weights[1:] == pytest.approx([(1 - p / 8) ** 2 for p in range(1, 8)], abs=1e-12)
    assert weights[0] == weights[7] == pytest.approx(1 / 64, abs=1e-12)
    assert max(weights) == weights[1] and sorted(weights[1:], reverse=True) == weights[1:]
    with pytest.raises(ValueError, match="8 of 8 right"):
        weight(8, 8, 2.0)


def test_quotas_of_a_fixed_example():
    """By hand: w = 1/16, 9/16, 4/16, 1/16 for 0 … 3 of 4. Of 12, level 1 would take 7.2 and has 3; the
    other 9 are 1.5, 6, 1.5, and the odd one goes to the harder level."""
    counts = {0: 4, 1: 3, 2: 10, 3: 20}
    assert quotas(counts, 12, 4, 2.0) == {0: 2, 1: 3, 2: 6, 3: 1}


@pytest.mark.parametrize("gamma", [0.0, 1.0, 3.0])
def test_quotas_always_add_up(gamma):
    for counts in itertools.product((0, 1, 7), (0, 2, 5), (1, 30)):
        levels = {level: count for level, count in enumerate(counts) if count}
        for total in range(sum(counts) + 1):
            drawn = quotas(levels, total, 3, gamma)
            assert sum(drawn.values()) == total
            assert all(0 <= drawn[level] <= levels[level] for level in levels)
    with pytest.raises(ValueError, match="9 of 8 prompts"):
        quotas({0: 8}, 9, 3, 1.0)


def test_plenty_of_prompts_are_drawn_in_proportion():
    counts = dict.fromkeys(range(8), 10_000)
    drawn = quotas(counts, 2_040, 8, 1.0)  # weights 1 | 7 6 5 4 3 2 1 eighths, 29 in all
    assert [drawn[level] for level in range(8)] == [70, 493, 422, 352, 281, 211, 141, 70]


def test_selection_of_a_fixed_example():
    levels = right(l0=4, l1=3, l2=10, l3=20, l4=9)
    config = DifficultyConfig(samples=4, share=12 / 37, gamma=2.0)
    selection = select(levels, config)
    assert selection.counts == {0: 4, 1: 3, 2: 10, 3: 20, 4: 9}
    assert selection.drawn == {0: 2, 1: 3, 2: 6, 3: 1}
    assert Counter(selection.dropped.values()) == {"solved": 9, "not_drawn": 25}
    assert set(selection.ids) | set(selection.dropped) == set(levels)
    assert not set(selection.ids) & set(selection.dropped)


def test_from_easy_to_hard():
    levels = right(l0=2, l1=3, l3=4, l4=2)
    config = DifficultyConfig(samples=4, share=1.0, drop_solved=False)
    ids = select(levels, config).ids
    assert [levels[id] for id in ids] == [4, 4, 3, 3, 3, 3, 1, 1, 1, 0, 0]
    shuffled = select(
        levels, DifficultyConfig(samples=4, share=1.0, drop_solved=False, order="by_name")
    )
    assert sorted(shuffled.ids) == sorted(ids)
    assert [levels[id] for id in shuffled.ids] not in (
        [4, 4, 3, 3, 3, 3, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 3, 3, 3, 3, 4, 4],
    )


def test_what_is_never_right_goes_on_request():
    levels = right(l0=3, l2=2, l4=1)
    kept = select(levels, DifficultyConfig(samples=4, share=1.0))
    assert sorted(kept.ids) == ["l0-0", "l0-1", "l0-2", "l2-0", "l2-1"]
    dropped = select(levels, DifficultyConfig(samples=4, share=1.0, drop_unsolved=True))
    assert sorted(dropped.ids) == ["l2-0", "l2-1"]
    assert Counter(dropped.dropped.values()) == {"unsolved": 3, "solved": 1}


def test_a_draw_goes_by_name_alone():
    """The same prompts whatever order they come in; another seed, other prompts."""
    levels = right(l1=40)
    config = DifficultyConfig(samples=4, share=0.5)
    ids = select(levels, config).ids
    assert len(ids) == 20
    assert select(dict(reversed(levels.items())), config).ids == ids
    assert set(select(levels, DifficultyConfig(samples=4, share=0.5, seed=1)).ids) != set(ids)


def test_nothing_to_select_from():
    assert select({}, DifficultyConfig(samples=4)).ids == ()
    assert select(right(l4=3), DifficultyConfig(samples=4)).ids == ()
    with pytest.raises(ValueError, match="'a': 5 of 4"):
        select({"a": 5}, DifficultyConfig(samples=4))


@pytest.mark.parametrize(
    "bad", [{"samples": 1}, {"share": 0.0}, {"gamma": -1.0}, {"order": "hard"}, {"seed": -1}]
)
def test_settings_that_cannot_be(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        DifficultyConfig(**bad)
