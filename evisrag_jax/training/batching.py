"""From records to the fixed-shape batches that an update takes.

    record ─prepare─► Prepared: prompt, pages, response ids ─make_group_batch─► GroupBatch of a bucket
             (threads; every page prepared once,              (numpy; empty rows fill up P)
              every page of a frozen tower encoded once)

Shapes come from the configured buckets, never from the data. A record that does not fit is refused
by name and never cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int32
from transformers import PreTrainedTokenizerFast

from evisrag_jax.data.schema import Record
from evisrag_jax.models.qwen25vl.model import PromptInputs
from evisrag_jax.pages.patches import PagePatches, stack_pages
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.prompts.chat import Prompt, PromptTooLong, batch_prompts, build_prompt
from evisrag_jax.prompts.template import Template
from evisrag_jax.prompts.tokenizer import SpecialIds, encode_response
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.accumulate import slice_size
from evisrag_jax.training.feature_cache import FeatureCache
from evisrag_jax.training.forward import GroupBatch
from evisrag_jax.training.page_cache import PageCache
from evisrag_jax.training.refusals import EmptyResponse, ResponseTooLong, TooManyPages


@dataclass(frozen=True)
class Bucket:
    """One static shape of a batch.

    prompts: P, over all devices.  images: pages a prompt, 0 for text only.  windows, tokens: windows
    and merged tokens a page.  prompt_length: L.  group: G.  response_length: T, end token included.
    """

    prompts: int
    images: int
    windows: int
    tokens: int
    prompt_length: int
    group: int
    response_length: int

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_length", "group", "response_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"bucket.{name}={getattr(self, name)} must be at least 1")
        pages = (self.images, self.windows, self.tokens)
        if min(pages) < 0 or (self.images and min(pages) < 1):
            raise ValueError(
                f"bucket.images={self.images} needs windows and tokens of at least 1, got "
                f"{self.windows} and {self.tokens}"
            )

    def needs(self, item: Prepared | None) -> list[tuple[str, int, int]]:
        """(what, needed, limit) of everything that a prepared record takes of a bucket."""
        pages = () if item is None else item.pages
        responses = () if item is None else item.response_ids or ()
        needed = (
            ("pages", len(pages), self.images),
            ("windows a page", max((len(p.mask) for p in pages), default=0), self.windows),
            ("tokens a page", max((len(p.merged_index) for p in pages), default=0), self.tokens),
            ("prompt tokens", 0 if item is None else len(item.prompt.ids), self.prompt_length),
            ("responses", len(responses), self.group),
            ("response tokens", max(map(len, responses), default=0), self.response_length),
        )
        return list(needed)

    def faults(self, item: Prepared) -> list[tuple[str, int, int]]:
        """What of `needs` is over its limit."""
        return [need for need in self.needs(item) if need[1] > need[2]]


@dataclass(frozen=True)
class Limits:
    """What a record may need; a larger one is refused by name.

    prompt: prompt tokens, images included.  response: response tokens, end token included.
    images: pages.  windows, tokens: windows and merged tokens a page.  group: responses.
    """

    prompt: int
    response: int
    images: int
    windows: int
    tokens: int
    group: int

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Limits:
        """The largest that every size of some bucket allows; `make_group_batch` checks the rest."""
        return cls(
            prompt=max(b.prompt_length for b in buckets),
            response=max(b.response_length for b in buckets),
            images=max(b.images for b in buckets),
            windows=max(b.windows for b in buckets),
            tokens=max(b.tokens for b in buckets),
            group=max(b.group for b in buckets),
        )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A record ready for a batch.

    response_ids: target token ids of each response with one end token, or None where responses are
    sampled later.  record: where it came from.  features: of each page, where a frozen tower has them.
    """

    id: str
    prompt: Prompt
    pages: tuple[PagePatches, ...]
    response_ids: tuple[tuple[int, ...], ...] | None
    record: Record
    features: tuple[Float[np.ndarray, "_ D"], ...] | None = None


def own_response(record: Record) -> tuple[str, ...]:
    """The record's tagged target response."""
    return () if record.response is None else (record.response,)


def prepare(
    record: Record,
    *,
    tokenizer: PreTrainedTokenizerFast,
    template: Template,
    layout: VisionLayout,
    budget: PixelBudget,
    limits: Limits,
    cache: PageCache,
    features: FeatureCache | None = None,
    targets: Callable[[Record], Sequence[str]] | None = None,
    images_first: bool = False,
    system: str | None = None,
    exif_transpose: bool = True,
) -> Prepared:
    """Prompt, pages and target ids of one record; a function of the record alone.

    `targets` gives the responses to train on (say, `own_response`); each is encoded and closed by
    exactly one <|im_end|>. Without it `response_ids` is None. `features` encodes the pages right away
    where it can; their patches are not held then. Otherwise they are loaded here.

    Raises PageError for a page that cannot be used, and PromptTooLong or one of its kinds (refusals)
    for a record over `limits`; all name the record or its file.
    """
    if len(record.images) > limits.images:
        raise TooManyPages(record.id, len(record.images), limits.images)
    pages = tuple(cache.get(path, layout, budget, exif_transpose) for path in record.images)
    for what, limit, sizes in (
        ("windows a page", limits.windows, [len(page.mask) for page in pages]),
        ("tokens a page", limits.tokens, [len(page.merged_index) for page in pages]),
    ):
        if max(sizes, default=0) > limit:
            raise TooManyPages(record.id, max(sizes), limit, what)
    prompt = build_prompt(
        tokenizer,
        template.render(record.question),
        [page.grid for page in pages],
        images_first=images_first,
        system=system,
        max_length=limits.prompt,
        name=record.id,
        merge=layout.merge,
    )
    responses = None
    if targets is not None:
        end = SpecialIds.from_tokenizer(tokenizer).im_end
        texts = tuple(targets(record))
        if not texts or not all(text.strip() for text in texts):
            raise EmptyResponse(record.id)
        responses = tuple((*encode_response(tokenizer, text), end) for text in texts)
        longest = max(map(len, responses))
        if longest > limits.response:
            raise ResponseTooLong(record.id, longest, limits.response)
        if len(responses) > limits.group:
            raise TooManyPages(record.id, len(responses), limits.group, "responses")
    found = None if features is None else features.ahead(pages)
    if found is None:
        for page in pages:
            if features is None or page not in features:
                _ = page.patches
    else:
        pages = tuple(page.light() for page in pages)
    return Prepared(record.id, prompt, pages, responses, record, found)


def with_features(items: Sequence[Prepared], features: FeatureCache) -> list[Prepared]:
    """The items with the features of their pages; those that lack them are answered together."""
    lacking = [item for item in items if item.features is None]
    found = iter(features.get([page for item in lacking for page in item.pages]))
    return [
        item
        if item.features is not None
        else dataclasses.replace(item, features=tuple(next(found) for _ in item.pages))
        for item in items
    ]


def choose_bucket(
    items: Sequence[Prepared],
    buckets: Sequence[Bucket],
    agree: Callable[[Int32[np.ndarray, " N"]], Int32[np.ndarray, " N"]] | None = None,
) -> Bucket:
    """The first bucket, by size, that holds all items; with `agree`, which gives the largest of each
    number over all processes, the items of all of them.

    Raises PromptTooLong (naming record, need and limit of the largest bucket) when a record fits
    none, and ValueError when there are more items than prompts in every bucket or when no single
    bucket holds all of them.
    """
    if not buckets:
        raise ValueError("no buckets are configured")
    ordered = sorted(buckets, key=size)
    if agree is not None:
        needs = [[need for _, need, _ in ordered[-1].needs(item)] for item in items]
        largest = agree(np.array(needs or [[0] * 6], np.int32).max(0))
        limits = [[limit for _, _, limit in bucket.needs(None)] for bucket in ordered]
        for bucket, limit in zip(ordered, limits, strict=True):
            if len(items) <= bucket.prompts and (largest <= limit).all():
                return bucket
    for bucket in ordered:
        if len(items) <= bucket.prompts and not any(bucket.faults(item) for item in items):
            return bucket
    most = max(bucket.prompts for bucket in buckets)
    if len(items) > most:
        raise ValueError(f"{len(items)} prompts for buckets of at most {most}")
    for item in items:
        faults = ordered[-1].faults(item)
        if faults and all(bucket.faults(item) for bucket in ordered):
            what, needed, limit = faults[0]
            if what == "prompt tokens":
                raise PromptTooLong(item.id, needed, limit)
            raise TooManyPages(item.id, needed, limit, what)
    raise ValueError(
        f"no bucket holds records {', '.join(item.id for item in items)} together; add one that is "
        "at least as large as each of them in every size"
    )


def size(bucket: Bucket) -> tuple[int, ...]:
    """Sort key: positions the decoder sees, then patches, then the rest. Compile the largest first."""
    positions = bucket.prompts * (bucket.prompt_length + bucket.group * bucket.response_length)
    return (positions, bucket.prompts * bucket.images * bucket.windows, *astuple(bucket))


def make_group_batch(
    items: Sequence[Prepared],
    buckets: Sequence[Bucket],
    *,
    responses: Sequence[Sequence[Sequence[int]]] | None = None,
    layout: VisionLayout | None = None,
    features: FeatureCache | None = None,
    prompts: int | None = None,
    agree: Callable[[Any], Any] | None = None,
    pad_id: int | None = None,
) -> GroupBatch:
    """Numpy arrays of the smallest bucket that holds all items.

    Rows beyond the items have prompts of one padding token and responses of length 0, which add
    nothing to a sum; so do response slots beyond an item's own responses.

    Args:
        items: at most P prepared records.
        buckets: the configured shapes.
        responses: sampled ids [items][G][any] in place of the items' `response_ids`.
        layout: gives the slot and patch sizes of a batch without any page.
        features: the batch holds the pages' features from here, and no patches.
        prompts: take P from here and not from the bucket (the last rows are then empty).
        agree: see `choose_bucket`.
        pad_id: of a batch without items.
    Raises: see `choose_bucket`; ValueError for an item without responses.
    """
    if not items and pad_id is None:
        raise ValueError("no records to batch")
    if responses is not None:
        if len(responses) != len(items):
            raise ValueError(f"{len(responses)} groups of responses for {len(items)} records")
        items = [
            dataclasses.replace(item, response_ids=tuple(map(tuple, group)))
            for item, group in zip(items, responses, strict=True)
        ]
    bucket = choose_bucket(items, buckets, agree)
    rows = bucket.prompts if prompts is None else prompts
    if len(items) > rows:
        raise ValueError(f"{len(items)} prompts for {rows} rows")
    if not items:
        own = dataclasses.replace(bucket, prompts=rows)
        return empty_batch(own, pad_id=pad_id, layout=layout, features=features)
    tokens = np.full((rows, bucket.group, bucket.response_length), items[0].prompt.pad_id, np.int32)
    lengths = np.zeros((rows, bucket.group), np.int32)
    for p, item in enumerate(items):
        if item.response_ids is None:
            raise ValueError(f"record {item.id}: has no responses to batch")
        for g, ids in enumerate(item.response_ids):
            tokens[p, g, : len(ids)] = ids
            lengths[p, g] = len(ids)
    images = stacked = None
    if bucket.images and features is not None:
        stacked = _features(with_features(items, features), rows, bucket, features)
    elif bucket.images:
        images = stack_pages(
            [*(item.pages for item in items), *[()] * (rows - len(items))],
            images=bucket.images,
            windows=bucket.windows,
            tokens=bucket.tokens,
            layout=layout,
        )
    return GroupBatch(_prompts(items, rows, bucket), images, tokens, lengths, stacked)


def _features(
    items: Sequence[Prepared], rows: int, bucket: Bucket, features: FeatureCache
) -> Float[np.ndarray, "P IM D"]:
    """The items' features, zeros where there is no page or no token."""
    out = np.zeros((rows, bucket.images, bucket.tokens, features.width), features.dtype)
    for p, item in enumerate(items):
        for i, one in enumerate(item.features):
            out[p, i, : len(one)] = one
    return out.reshape(rows, -1, features.width)


def _prompts(items: Sequence[Prepared], rows: int, bucket: Bucket) -> PromptInputs:
    """The prompts, and rows of one padding token below them."""
    arrays = batch_prompts(
        [item.prompt for item in items],
        length=bucket.prompt_length,
        tokens_per_image=max(1, bucket.tokens),
    )
    pad_id, spare = items[0].prompt.pad_id, rows - len(items)
    below = empty_batch(
        dataclasses.replace(bucket, prompts=max(1, spare), images=0), pad_id=pad_id
    ).prompt
    return PromptInputs(
        *(np.concatenate([a, b[:spare]]) for a, b in zip(arrays, below, strict=True))
    )


def empty_batch(
    bucket: Bucket,
    *,
    pad_id: int,
    layout: VisionLayout | None = None,
    features: FeatureCache | None = None,
) -> GroupBatch:
    """A batch of empty rows only: weight 0, for compiling and running a shape ahead of its data."""
    P, L, T = bucket.prompts, bucket.prompt_length, bucket.response_length
    images = stacked = None
    if bucket.images and features is not None:
        stacked = _features([], P, bucket, features)
    elif bucket.images:
        sizes = {"images": bucket.images, "windows": bucket.windows, "tokens": bucket.tokens}
        images = stack_pages([()] * P, layout=layout, **sizes)
    prompt = PromptInputs(
        tokens=np.full((P, L), pad_id, np.int32),
        positions=np.zeros((P, 3, L), np.int32),
        lengths=np.ones(P, np.int32),
        image_index=np.full((P, L), -1, np.int32),
        next_position=np.ones(P, np.int32),
    )
    tokens = np.full((P, bucket.group, T), pad_id, np.int32)
    return GroupBatch(prompt, images, tokens, np.zeros((P, bucket.group), np.int32), stacked)


def trained_tokens(batch: GroupBatch) -> int:
    """Response tokens of a host batch, end tokens included: its weight."""
    return int(np.sum(batch.lengths))


def check_divides(prompts: int, mesh: Mesh, micro: int = 0) -> None:
    """ValueError, naming the numbers, unless prompts split evenly over the mesh's batch axes, and slices of
    `micro` prompts a device make up the batch."""
    parts = int(np.prod([mesh.shape[axis] for axis in meshes.BATCH_AXES]))
    if prompts % parts:
        raise ValueError(
            f"{prompts} prompts a batch do not divide over {parts} devices "
            f"({' x '.join(f'{axis}={mesh.shape[axis]}' for axis in meshes.BATCH_AXES)}); "
            "change bucket.prompts or the mesh"
        )
    if parts % jax.process_count():
        raise ValueError(
            f"data x fsdp = {parts} does not divide over {jax.process_count()} processes, each of which "
            "has rows of its own"
        )
    slice_size(prompts, micro, parts)


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """A host batch on its devices, prompts split over the mesh's batch axes; None leaves stay None.

    Each of several processes gives its own rows. An explicit transfer: it works under a transfer guard
    on "disallow".
    """
    return meshes.put_rows(batch, meshes.batch_sharding(mesh))
