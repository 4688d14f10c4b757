"""The rollout engine on the host: requests in, completions out, in the order they came.

Requests are sorted into shape buckets, pages are stacked, the device programs of `rollout.generate` run, and
sampled ids are decoded with character offsets. Results depend on a request, its seed and step; never on
the batch it was put in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerFast

from evisrag_jax.models.qwen25vl import model as qwen25vl
from evisrag_jax.pages.patches import PagePatches, stack_pages
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.prompts.chat import Prompt, PromptArrays, batch_prompts
from evisrag_jax.prompts.tokenizer import decode_with_offsets
from evisrag_jax.rollout import generate as device
from evisrag_jax.rollout.buckets import Bucket, BucketTable, Need
from evisrag_jax.rollout.sampling import SamplingConfig, stack_controls
from evisrag_jax.runtime.mesh import BATCH_AXES, batch_sharding, replicated
from evisrag_jax.runtime.prng import sample_keys

DEGENERATE_RUN = 20  # equal tokens in a row that mark a response as degenerate
UNSAMPLED = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt with its pages. Two requests with equal ids draw equal random numbers."""

    id: str
    prompt: Prompt
    pages: Sequence[PagePatches] = ()


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


class Engine:
    """Holds parameters, tokenizer and buckets, and generates.

    Args:
      params: the model's parameters on the device(s), in the dtype to compute in.
      config: the model's configuration.
      tokenizer: decodes ids, and names the ids that are never sampled.
      buckets: the static shapes.
      stop_ids: ids that end a response (`prompts.tokenizer.stop_ids`).
      layout: how pages are cut; gives the shapes of batches without pages.
      mesh: where batches are split over prompts ("data" and "fsdp"); None for one device.
      banned_ids: ids that are never sampled; by default those of `unsampled_ids`.
      model: the model's functions; a module or an object like `models.qwen25vl.model`.
    """

    def __init__(
        self,
        params: Any,
        config: Any,
        tokenizer: PreTrainedTokenizerFast,
        buckets: BucketTable,
        *,
        stop_ids: Sequence[int],
        layout: VisionLayout | None = None,
        mesh: Mesh | None = None,
        banned_ids: Sequence[int] | None = None,
        model: Any = qwen25vl,
    ):
        vocab = config.text.vocab
        if not stop_ids or not all(0 <= i < vocab for i in stop_ids):
            raise ValueError(f"stop_ids {tuple(stop_ids)} must be ids of the vocabulary of {vocab}")
        self.params, self.config, self.model = params, config, model
        self.tokenizer, self.buckets = tokenizer, buckets
        self.layout = layout or VisionLayout()
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self._mesh = mesh
        if mesh is not None:
            parts = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
            uneven = [b.prompts for b in buckets.buckets if b.prompts % parts]
            if uneven:
                raise ValueError(
                    f"buckets of {uneven[0]} prompts do not divide over {parts} devices"
                )
        if banned_ids is None:
            banned_ids = unsampled_ids(tokenizer, vocab, self.stop_ids)
        banned = np.zeros(vocab, bool)
        banned[np.asarray(banned_ids, np.int64)] = True
        if banned[list(self.stop_ids)].any():
            raise ValueError(f"stop_ids {self.stop_ids} must not be among the banned ids")
        self._banned = self._place(banned, split=False)
        log.info("end of a response: ids %s", list(self.stop_ids))

    def set_params(self, params: Any) -> None:
        """Replaces the parameters; nothing is compiled anew while shapes and dtypes stay."""
        self.params = params

    def warm_up(self, group: int = 1) -> int:
        """Compiles the programs of every bucket, the largest first; returns the number of buckets."""
        for bucket in self.buckets.buckets:
            sampling = [SamplingConfig(max_tokens=bucket.response)] * bucket.prompts
            self._run(bucket, [], sampling, group, 0, 0, self.params)
        return len(self.buckets.buckets)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        group: int = 1,
        seed: int = 0,
        step: int = 0,
        params: Any = None,
    ) -> list[list[Completion]]:
        """G completions of every request, in the order of the requests.

        Args:
          requests: prompts with their pages.
          sampling: settings of all, or one a request.
          group: G, responses a request.
          seed, step: fold into every key, with the request's id, the sample's and the token's index.
          params: used instead of the engine's own for this call.

        Raises:
          RequestTooLarge: before anything runs, naming the request and the limit.
          ValueError: a request whose pages are not those its prompt was built for.
        """
        if group < 1:
            raise ValueError(f"group={group} is below 1")
        settings = [sampling] * len(requests) if isinstance(sampling, SamplingConfig) else sampling
        if len(settings) != len(requests):
            raise ValueError(f"{len(settings)} sampling settings for {len(requests)} requests")
        for request in requests:
            _check_pages(request)
        needs = [measure(r, s) for r, s in zip(requests, settings, strict=True)]
        params = self.params if params is None else params
        results: list[list[Completion]] = [[] for _ in requests]
        for bucket, rows in self.buckets.split(needs):
            batch = [requests[i] for i in rows]
            chosen = [settings[i] for i in rows]
            out = self._run(bucket, batch, chosen, group, seed, step, params)
            for row, i in enumerate(rows):
                results[i] = [self._completion(out, row, g) for g in range(group)]
        return results

    def _run(
        self,
        bucket: Bucket,
        batch: Sequence[Request],
        settings: Sequence[SamplingConfig],
        group: int,
        seed: int,
        step: int,
        params: Any,
    ) -> dict[str, np.ndarray]:
        """One batch through the device programs; host arrays of the final DecodeState."""
        program = (self.model, self.config, params)
        prompt = self._place(_prompt_arrays(batch, bucket))
        features = None
        if bucket.images:
            pages = stack_pages(
                [r.pages for r in batch] + [()] * (bucket.prompts - len(batch)),
                images=bucket.images,
                windows=bucket.windows,
                tokens=bucket.tokens,
                layout=self.layout,
            )
            features = device.encode(*program, self._place(pages), self._mesh)
        prefix = device.prefill(*program, prompt, features, self._mesh)

        padding = [SamplingConfig()] * (bucket.prompts - len(settings))
        settings = [*settings, *padding]
        ids = [r.id for r in batch] + [""] * (bucket.prompts - len(batch))
        rows = device.Rows(
            controls=stack_controls(settings),
            max_tokens=np.asarray([s.max_tokens for s in settings], np.int32),
            stop_ids=np.tile(np.asarray(self.stop_ids, np.int32), (bucket.prompts, 1)),
            valid=np.arange(bucket.prompts) < len(batch),
        )
        rows = self._place(rows)
        keys = self._place(sample_keys(seed, step, ids, group))
        pad, until = self._place(
            (np.int32(self.stop_ids[0]), np.int32(bucket.response)), split=False
        )
        state = device.start(
            self.model,
            self.config,
            prefix.hidden,
            prefix.seen,
            rows.valid,
            keys,
            pad,
            slots=bucket.response,
            dtype=prefix.kv.k[0].dtype,
            mesh=self._mesh,
        )
        state = device.decode(*program, prefix, rows, self._banned, pad, state, until)
        names = ("tokens", "logp", "length", "stopped", "failed_at")
        return jax.device_get({name: getattr(state, name) for name in names})

    def _place(self, arrays: Any, *, split: bool = True) -> Any:
        """Explicit transfer: the first axis over the mesh's batch axes, or whole on every device."""
        if self._mesh is None:
            return jax.device_put(arrays)
        sharding = batch_sharding(self._mesh) if split else replicated(self._mesh)
        return jax.device_put(arrays, sharding)

    def _completion(self, out: dict[str, np.ndarray], row: int, sample: int) -> Completion:
        length = int(out["length"][row, sample])
        ids = out["tokens"][row, sample, :length].astype(np.int32)
        stopped, failed = bool(out["stopped"][row, sample]), int(out["failed_at"][row, sample])
        body = ids[:-1] if stopped else ids
        text, offsets = decode_with_offsets(self.tokenizer, body)
        if stopped:
            offsets = np.concatenate([offsets, np.full((1, 2), len(text), np.int32)])
        error = None
        if failed >= 0:
            error = f"the logits of response token {failed} were not finite numbers"
        return Completion(
            ids=ids,
            logp=out["logp"][row, sample, :length].astype(np.float32),
            text=text,
            offsets=offsets.astype(np.int32),
            finish="error" if error else "stop" if stopped else "length",
            length=length,
            degenerate=longest_run(ids) >= DEGENERATE_RUN,
            error=error,
        )


def measure(request: Request, sampling: SamplingConfig) -> Need:
    """The sizes that a request takes of a bucket."""
    pages = request.pages
    return Need(
        name=request.id,
        images=len(pages),
        windows=max((p.patches.shape[0] for p in pages), default=0),
        tokens=max((p.merged_index.shape[0] for p in pages), default=0),
        length=len(request.prompt.ids),
        response=sampling.max_tokens,
    )


def unsampled_ids(
    tokenizer: PreTrainedTokenizerFast, vocab: int, stop_ids: Sequence[int]
) -> tuple[int, ...]:
    """Ids that a response never holds: image and video marks, padding, rows beyond the tokenizer."""
    backend = tokenizer.backend_tokenizer
    found = {backend.token_to_id(f"<|{name}|>") for name in UNSAMPLED} - {None}
    known = set(backend.get_vocab(with_added_tokens=True).values())
    found |= set(range(vocab)) - known
    if tokenizer.pad_token_id is not None:
        found.add(tokenizer.pad_token_id)
    return tuple(sorted(i for i in found if i < vocab and i not in stop_ids))


def longest_run(ids: Int32[np.ndarray, " T"]) -> int:
    """Length of the longest run of one repeated id."""
    if len(ids) == 0:
        return 0
    edges = np.flatnonzero(np.diff(ids)) + 1
    return int(np.diff(np.concatenate([[0], edges, [len(ids)]])).max())


def _prompt_arrays(batch: Sequence[Request], bucket: Bucket) -> PromptArrays:
    """Right-padded arrays of a whole bucket; rows without a request hold one padding token."""
    P, L = bucket.prompts, bucket.length
    empty = PromptArrays(
        tokens=np.zeros((P, L), np.int32),
        positions=np.zeros((P, 3, L), np.int32),
        lengths=np.ones(P, np.int32),
        image_index=np.full((P, L), -1, np.int32),
        next_position=np.ones(P, np.int32),
    )
    if batch:
        prompts = [request.prompt for request in batch]
        filled = batch_prompts(prompts, length=L, tokens_per_image=bucket.tokens)
        for whole, part in zip(empty, filled, strict=True):
            whole[: len(batch)] = part
    return empty


def _check_pages(request: Request) -> None:
    grids, pages = request.prompt.grids, request.pages
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
