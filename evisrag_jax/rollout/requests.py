"""What goes into the engine and what comes out, and the host arrays between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int32
from transformers import PreTrainedTokenizerFast

from evisrag_jax.pages.patches import PagePatches
from evisrag_jax.prompts.chat import Prompt, PromptArrays, batch_prompts
from evisrag_jax.prompts.tokenizer import decode_with_offsets
from evisrag_jax.rollout.buckets import Bucket, Need
from evisrag_jax.rollout.sampling import SamplingConfig

DEGENERATE_RUN = 20  # equal tokens in a row that mark a response as degenerate


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt with its pages. Two requests with equal ids draw equal random numbers.

    features: of each page, [M, D] for its M merged tokens, where they have been computed before; the
    tower is then not run for this request's batch if every request of it has them.
    """

    id: str
    prompt: Prompt
    pages: Sequence[PagePatches] = ()
    features: Sequence[Float[np.ndarray, "_ D"]] | None = None


@dataclass(frozen=True, eq=False)
class Completion:
    """One response.

    ids: sampled ids; with finish "stop" the last one is the end token (exactly one).
    logp: log softmax(logits / T) of each id, see `rollout.sampling`.
    text: the decoded ids without special and end tokens.  offsets: characters of each id in text.
    finish: "stop", "length" (max_tokens reached) or "error" (the logits were not finite).
    length: number of ids.  degenerate: 20 or more equal ids in a row.  error: what failed, where.
    """

    ids: Int32[np.ndarray, " T"]
    logp: Float32[np.ndarray, " T"]
    text: str
    offsets: Int32[np.ndarray, "T 2"]
    finish: str
    length: int
    degenerate: bool = False
    error: str | None = None


def measure(request: Request, sampling: SamplingConfig) -> Need:
    """The sizes that a request takes of a bucket."""
    pages = request.pages
    return Need(
        name=request.id,
        images=len(pages),
        windows=max((len(p.mask) for p in pages), default=0),
        tokens=max((p.merged_index.shape[0] for p in pages), default=0),
        length=len(request.prompt.ids),
        response=sampling.max_tokens,
    )


def completion(tokenizer: PreTrainedTokenizerFast, out: Any, shard: int, slot: int) -> Completion:
    """What a slot holds (`out` is a `generate.Results` on the host)."""
    length = int(out.length[shard, slot])
    ids = out.tokens[shard, slot, :length].astype(np.int32)
    stopped, failed = bool(out.stopped[shard, slot]), int(out.failed_at[shard, slot])
    body = ids[:-1] if stopped else ids
    text, offsets = decode_with_offsets(tokenizer, body)
    if stopped:
        offsets = np.concatenate([offsets, np.full((1, 2), len(text), np.int32)])
    error = None
    if failed >= 0:
        error = f"the logits of response token {failed} were not finite numbers"
    return Completion(
        ids=ids,
        logp=out.logp[shard, slot, :length].astype(np.float32),
        text=text,
        offsets=offsets.astype(np.int32),
        finish="error" if error else "stop" if stopped else "length",
        length=length,
        degenerate=longest_run(ids) >= DEGENERATE_RUN,
        error=error,
    )


def longest_run(ids: Int32[np.ndarray, " T"]) -> int:
    """Length of the longest run of one repeated id."""
    if len(ids) == 0:
        return 0
    edges = np.flatnonzero(np.diff(ids)) + 1
    return int(np.diff(np.concatenate([[0], edges, [len(ids)]])).max())


def prompt_arrays(batch: Sequence[Request | None], bucket: Bucket) -> PromptArrays:
    """Right-padded arrays of a batch; rows without a request (None) hold one padding token."""
    P, L = len(batch), bucket.length
    empty = PromptArrays(
        tokens=np.zeros((P, L), np.int32),
        positions=np.zeros((P, 3, L), np.int32),
        lengths=np.ones(P, np.int32),
        image_index=np.full((P, L), -1, np.int32),
        next_position=np.ones(P, np.int32),
    )
    rows = [p for p, request in enumerate(batch) if request is not None]
    if rows:
        prompts = [batch[p].prompt for p in rows]
        filled = batch_prompts(prompts, length=L, tokens_per_image=bucket.tokens)
        for whole, part in zip(empty, filled, strict=True):
            whole[rows] = part
    return empty


def stack_features(
    batch: Sequence[Request | None], bucket: Bucket, width: int, dtype: Any
) -> Float[np.ndarray, "P IM D"] | None:
    """Features that the requests bring, one row a prompt; None where one with pages brings none, and
    where nobody brings any."""
    asked = [r for r in batch if r is not None]
    if any(r.pages and r.features is None for r in asked):
        return None
    if all(r.features is None for r in asked):
        return None
    out = np.zeros((len(batch), bucket.images, bucket.tokens, width), dtype)
    for p, request in enumerate(batch):
        if request is not None and request.pages:
            for i, feature in enumerate(request.features):
                out[p, i, : len(feature)] = feature
    return out.reshape(len(batch), -1, width)


def check_pages(request: Request) -> None:
    """ValueError for pages, or features, that are not those the prompt was built for."""
    grids, pages, features = request.prompt.grids, request.pages, request.features
    if len(grids) != len(pages):
        raise ValueError(
            f"request {request.id!r}: its prompt has {len(grids)} images, but {len(pages)} pages are given"
        )
    for i, (grid, page) in enumerate(zip(grids, pages, strict=True)):
        if tuple(grid) != tuple(page.grid):
            raise ValueError(
                f"request {request.id!r}, page {i}: a grid of {page.grid} patches, its prompt was built "
                f"for {tuple(grid)}"
            )
    if features is not None and [len(f) for f in features] != [len(p.merged_index) for p in pages]:
        raise ValueError(
            f"request {request.id!r}: its features have {[len(f) for f in features]} tokens a page, its "
            f"pages {[len(p.merged_index) for p in pages]}"
        )
