"""Bucket choice: what fits, in which order, and how few shapes a mixed data set needs."""

import numpy as np
import pytest

from evisrag_jax.rollout.buckets import Bucket, BucketTable, Need, RequestTooLarge, bucket_table

SMALL = Bucket(prompts=4, images=1, windows=4, tokens=16, length=64, response=32)
LARGE = Bucket(prompts=4, images=3, windows=9, tokens=36, length=256, response=32)
TEXT = Bucket(prompts=2, images=0, windows=0, tokens=0, length=64, response=32)
TABLE = BucketTable((TEXT, SMALL, LARGE))


def need(name="r", images=1, windows=4, tokens=16, length=50, response=32):
    return Need(name, images, windows, tokens, length, response)


def test_the_largest_comes_first_and_the_cheapest_that_fits_is_chosen():
    assert TABLE.buckets == (LARGE, SMALL, TEXT)
    assert TABLE.choose([need(images=0, windows=0, tokens=0)]) == TEXT
    assert TABLE.choose([need()]) == SMALL
    assert TABLE.choose([need(), need(length=65)]) == LARGE
    assert (TABLE.max_length, TABLE.max_response) == (256, 32)


def test_every_limit_is_inclusive():
    exact = need(images=3, windows=9, tokens=36, length=256)
    assert TABLE.choose([exact]) == LARGE


@pytest.mark.parametrize(
    "size, over",
    [("images", 4), ("windows", 10), ("tokens", 37), ("length", 257), ("response", 33)],
)
def test_a_request_over_a_limit_is_refused_by_name_size_and_numbers(size, over):
    with pytest.raises(RequestTooLarge, match=f"page-7.*{over}.*{over - 1}") as caught:
        TABLE.split([need("fine"), need("page-7", **{size: over})])
    assert (caught.value.name, caught.value.size) == ("page-7", size)
    assert (caught.value.needed, caught.value.limit) == (over, over - 1)


def test_split_covers_every_request_once_largest_first_and_fills_free_rows():
    needs = [need(f"s{i}", length=20 + i) for i in range(6)] + [need("l", length=200)]
    batches = TABLE.split(needs)
    assert sorted(i for _, rows in batches for i in rows) == list(range(7))
    assert [bucket for bucket, _ in batches] == [LARGE, SMALL]
    # The large request leads; the longest small ones ride in its free rows.
    assert [rows for _, rows in batches] == [[6, 5, 4, 3], [2, 1, 0]]
    for bucket, rows in batches:
        assert all(bucket.lacks(needs[i]) is None for i in rows) and len(rows) <= bucket.prompts


def test_a_short_last_batch_takes_the_variant_with_fewer_rows():
    table = bucket_table(prompts=(1, 4), pages=[(1, 4, 16)], lengths=(64,), responses=(32,))
    batches = table.split([need(f"r{i}") for i in range(5)])
    assert [(b.prompts, len(rows)) for b, rows in batches] == [(4, 4), (1, 1)]


def test_b80_200_mixed_requests_use_no_more_shapes_than_the_table_has():
    rng = np.random.default_rng(0)
    table = bucket_table(
        prompts=(8,), pages=[(1, 16, 64), (5, 16, 64)], lengths=(128, 512), responses=(64,)
    )
    needs = []
    for i in range(200):
        tokens = int(rng.integers(4, 65))
        images = int(rng.integers(1, 6))
        length = min(512, images * tokens + int(rng.integers(10, 60)))
        needs.append(need(f"r{i}", images, -(-tokens // 4), tokens, length, 64))
    first, second = table.split(needs), table.split(needs)
    assert first == second
    assert len({bucket for bucket, _ in first}) <= len(table.buckets) == 4
    assert sum(len(rows) for _, rows in first) == 200


@pytest.mark.parametrize("bad", [{"prompts": 0}, {"length": 0}, {"images": 0}, {"tokens": -1}])
def test_impossible_buckets_are_refused(bad):
    import dataclasses

    with pytest.raises(ValueError, match="bucket"):
        dataclasses.replace(SMALL, **bad)
    with pytest.raises(ValueError, match="at least one"):
        BucketTable(())
