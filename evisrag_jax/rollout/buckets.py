"""Shape buckets: the few static shapes that every request is padded to.

A bucket fixes all sizes of a rollout program. A table holds them all, so the number of programs compiled is
bounded by the table's length (times the group sizes in use), whatever the pages and prompts of a data set
look like. Plain host code over integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product

SIZES = ("images", "windows", "tokens", "length", "response")


class RequestTooLarge(ValueError):
    """A request that no bucket holds. Has .name (the request's id), .size (which limit), .needed and .limit."""

    def __init__(self, name: str, size: str, needed: int, limit: int):
        self.name, self.size, self.needed, self.limit = name, size, needed, limit
        what = _MEANING[size]
        super().__init__(
            f"request {name!r} needs {needed} {what}, the largest fitting bucket has {limit}; "
            f"use fewer or smaller pages, or add a bucket with {size} >= {needed}"
        )

    def __reduce__(self):
        return type(self), (self.name, self.size, self.needed, self.limit)


_MEANING = {
    "images": "images",
    "windows": "vision windows an image",
    "tokens": "merged tokens an image",
    "length": "prompt tokens",
    "response": "response tokens",
}


@dataclass(frozen=True)
class Need:
    """What one request takes. windows and tokens are those of its largest page (0 without pages)."""

    name: str
    images: int
    windows: int
    tokens: int
    length: int
    response: int


@dataclass(frozen=True)
class Bucket:
    """One static shape.

    prompts: P, rows of a batch.  images: I, pages a prompt.  windows: W, vision windows a page.
    tokens: M, merged tokens a page.  length: L, prompt tokens.  response: T, response tokens.
    A bucket without images has windows and tokens 0; its programs have no vision tower.
    """

    prompts: int
    images: int
    windows: int
    tokens: int
    length: int
    response: int

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("prompts", "length", "response") else 0
            if value < least:
                raise ValueError(f"bucket {self}: {field.name}={value} is below {least}")
        if (self.images == 0) != (self.windows == 0) or (self.images == 0) != (self.tokens == 0):
            raise ValueError(
                f"bucket {self}: images, windows and tokens are 0 together or not at all"
            )

    @property
    def cost(self) -> tuple[int, int]:
        """Order of size: the places a batch holds, then the rows (fewer of equal cost come first)."""
        row = self.length + self.response + self.images * self.windows * 64
        return self.prompts * row, self.prompts

    def lacks(self, need: Need) -> str | None:
        """The first size in which the bucket is too small for the request; None if it fits."""
        return next((s for s in SIZES if getattr(need, s) > getattr(self, s)), None)


@dataclass(frozen=True)
class BucketTable:
    """Buckets, kept from the largest to the smallest: the largest is compiled and run first."""

    buckets: tuple[Bucket, ...]

    def __post_init__(self):
        if not self.buckets:
            raise ValueError("a bucket table needs at least one bucket")
        ordered = tuple(sorted(set(self.buckets), key=lambda b: b.cost, reverse=True))
        object.__setattr__(self, "buckets", ordered)

    @property
    def max_length(self) -> int:
        """Longest prompt that any bucket takes, in tokens: the limit to build prompts with."""
        return max(bucket.length for bucket in self.buckets)

    @property
    def max_response(self) -> int:
        """Most response tokens that any bucket takes."""
        return max(bucket.response for bucket in self.buckets)

    def classes(self, needs: Sequence[Need]) -> list[tuple[Bucket, list[int]]]:
        """Requests by the bucket that holds each most cheaply, the largest bucket first and in it the
        longest prompts. Every index of `needs` occurs once.

        Of buckets that differ in prompts alone the smallest that takes all its requests at once is
        chosen, or else the largest. Raises RequestTooLarge for the first request that fits nowhere.
        """
        order = sorted(range(len(needs)), key=lambda i: (*self._rank(needs[i]), i))
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in order:
            bucket = self._class(needs[i])
            groups.setdefault(tuple(getattr(bucket, s) for s in SIZES), []).append(i)
        return [(self._of_sizes(sizes, len(rows)), rows) for sizes, rows in groups.items()]

    def _of_sizes(self, sizes: tuple[int, ...], count: int) -> Bucket:
        same = [b for b in self.buckets if tuple(getattr(b, s) for s in SIZES) == sizes]
        enough = [b for b in same if b.prompts >= count]
        if enough:
            return min(enough, key=lambda b: b.prompts)
        return max(same, key=lambda b: b.prompts)

    def _class(self, need: Need) -> Bucket:
        """The bucket of the cheapest row that holds the request, with as many rows as there are."""
        self._check(need)
        fits = [b for b in self.buckets if b.lacks(need) is None]
        return min(fits, key=lambda b: (b.cost[0] // b.prompts, -b.prompts))

    def _rank(self, need: Need) -> tuple[int, int]:
        bucket = self._class(need)
        return -(bucket.cost[0] // bucket.prompts), -need.length

    def _check(self, need: Need) -> None:
        """RequestTooLarge unless some bucket fits; the limit named is that of the bucket that comes nearest."""
        best: tuple[int, Bucket] | None = None
        for bucket in self.buckets:
            lacking = sum(getattr(need, s) > getattr(bucket, s) for s in SIZES)
            if lacking == 0:
                return
            if best is None or lacking < best[0]:
                best = (lacking, bucket)
        size = best[1].lacks(need)
        raise RequestTooLarge(need.name, size, getattr(need, size), getattr(best[1], size))


def bucket_table(
    *,
    prompts: Sequence[int],
    pages: Sequence[tuple[int, int, int]],
    lengths: Sequence[int],
    responses: Sequence[int],
) -> BucketTable:
    """Every combination of the given sizes.

    Args:
      prompts: rows of a batch.
      pages: (images, windows, tokens) together; (0, 0, 0) adds programs without a vision tower.
      lengths: prompt tokens.
      responses: response tokens.
    """
    combinations = product(prompts, pages, lengths, responses)
    return BucketTable(tuple(Bucket(p, *page, n, r) for p, page, n, r in combinations))
