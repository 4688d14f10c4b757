"""The seating of responses, by rules checked on every step of random runs."""

import numpy as np
import pytest

from evisrag_jax.rollout.schedule import Schedule


def play(schedule, lengths, *, limit=2, shrink=0):
    """Runs a schedule with response lengths [prompt][sample] in steps of one token; checks each step.

    Returns (steps, slot-steps used, seats in the order they were given).
    """
    left, seated, log = {}, {}, []
    steps = used = 0
    while schedule.waiting or schedule.running:
        while True:
            entered = schedule.enter(limit)
            for seat in schedule.seat():
                key = seat.prompt, seat.sample
                assert key not in left, "seated twice"
                left[key] = lengths[seat.prompt][seat.sample]
                seated[seat.shard, seat.slot] = key
                log.append(seat)
            if not entered:
                break
        if shrink and not schedule.waiting and schedule.most_running() <= shrink < schedule.slots:
            index = schedule.shrink(shrink)
            for z, row in enumerate(index):
                assert len(set(row)) == len(row)
                running = sum(z == shard for shard, _ in seated)
                assert not any((z, old) in seated for old in row[running:]), "a ghost decodes on"
            seated = {
                (z, s): seated[z, old]
                for z, row in enumerate(index)
                for s, old in enumerate(row)
                if (z, old) in seated and s < schedule.most_running()
            }
        members, row, place = schedule.plan(schedule.group)
        for (z, s), _ in seated.items():
            assert members[z, row[z, s], place[z, s]] == s
        filled = members[members < schedule.slots]
        assert len(filled) == len(seated) == schedule.running
        prompts = {(z, row[z, s]): {seated[z, s][0]} for z, s in seated}
        for z, s in seated:
            prompts[z, row[z, s]].add(seated[z, s][0])
        assert all(len(found) == 1 for found in prompts.values()), "a row holds one prompt"
        used += len(seated)
        steps += 1
        done = np.zeros((schedule.shards, schedule.slots), bool)
        for (z, s), key in seated.items():
            left[key] -= 1
            done[z, s] = left[key] == 0
        for seat in schedule.leave(done):
            assert seated.pop((seat.shard, seat.slot)) == (seat.prompt, seat.sample)
    expected = {(p, g) for p, row in enumerate(lengths) for g in range(len(row))}
    assert set(left) == expected and not any(left.values())
    return steps, used, log


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("rows, slots", [(1, 2), (1, 3), (2, 3), (3, 8), (4, 16)])
def test_everybody_is_served_once(shards, rows, slots):
    rng = np.random.default_rng(rows * slots + shards)
    lengths = rng.integers(1, 9, (7, 4)).tolist()
    schedule = Schedule(7, 4, shards, rows, slots)
    _, used, log = play(schedule, lengths, shrink=2)
    assert used == np.sum(lengths)
    if shards == 1:
        assert [(s.prompt, s.sample) for s in log] == [(p, g) for p in range(7) for g in range(4)]


def test_slots_are_kept_full_while_responses_wait():
    """Two slots, spare rows: as many steps as half the tokens (and at most one response more)."""
    lengths = np.random.default_rng(0).integers(1, 20, (10, 3))
    steps, _, _ = play(Schedule(10, 3, 1, 3, 2), lengths.tolist())
    assert steps <= lengths.sum() / 2 + 20


def test_too_many_responses_do_not_shrink():
    schedule = Schedule(1, 4, 1, 1, 4)
    schedule.enter(1)
    schedule.seat()
    with pytest.raises(ValueError, match="4 responses do not fit 2 slots"):
        schedule.shrink(2)
    with pytest.raises(ValueError, match="at least 1"):
        Schedule(1, 1, 1, 1, 0)
