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
    assert TABLE.classes([need(images=0, windows=0, tokens=0)])[0][0] == TEXT
    assert TABLE.classes([need()])[0][0] == SMALL
    assert TABLE.classes([need(), need(length=65)])[0][0] == LARGE
    assert (TABLE.max_length, TABLE.max_response) == (256, 32)


def test_every_limit_is_inclusive():
    exact = need(images=3, windows=9, tokens=36, length=256)
    assert TABLE.classes([exact])[0][0] == LARGE


@pytest.mark.parametrize(
    "size, over",
    [("images", 4), ("windows", 10), ("tokens", 37), ("length", 257), ("response", 33)],
)
def test_a_request_over_a_limit_is_refused_by_name_size_and_numbers(size, over):
    with pytest.raises(RequestTooLarge, match=f"page-7.*{over}.*{over - 1}") as caught:
        TABLE.classes([need("fine"), need("page-7", **{size: over})])
    assert (caught.value.name, caught.value.size) == ("page-7", size)
    assert (caught.value.needed, caught.value.limit) == (over, over - 1)


def test_classes_cover_every_request_once_largest_bucket_and_longest_prompt_first():
    needs = [need(f"s{i}", length=20 + i) for i in range(6)] + [need("l", length=200)]
    classes = TABLE.classes(needs)
    assert classes == [(LARGE, [6]), (SMALL, [5, 4, 3, 2, 1, 0])]


def test_few_requests_take_the_variant_with_fewer_rows():
    table = bucket_table(prompts=(1, 4), pages=[(1, 4, 16)], lengths=(64,), responses=(32,))
    for count, rows in ((1, 1), (2, 4), (4, 4), (5, 4)):
        ((bucket, indices),) = table.classes([need(f"r{i}") for i in range(count)])
        assert (bucket.prompts, len(indices)) == (rows, count)


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
    first, second = table.classes(needs), table.classes(needs)
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
