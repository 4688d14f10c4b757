"""The rollout engine on the host: requests in, completions out, in the order they came.

    requests ─buckets─► Schedule ─► [ prefill prompts ─► admit responses ─► decode ] … ─► completions

Prompts take rows, responses take slots; when enough slots are done, the next samples and prompts move in
(`rollout.schedule`). Results depend on a request, its seed and step; never on the batch, slot or schedule
it was put in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from evisrag_jax.models.attention_check import start_up_check
from evisrag_jax.models.qwen25vl import model as qwen25vl
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.rollout import generate as device
from evisrag_jax.rollout.buckets import BucketTable
from evisrag_jax.rollout.requests import Completion, Request, check_pages, measure
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.rollout.serve import Machine, Run
from evisrag_jax.runtime.mesh import BATCH_AXES, batch_sharding, replicated

UNSAMPLED = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")

log = logging.getLogger(__name__)


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
      slots: responses decoded at once; by default all of a bucket's prompts times the group. Fewer
        leave rows free, so that the next prompts move in while long responses of the last ones go on.
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
        slots: int | None = None,
        banned_ids: Sequence[int] | None = None,
        model: Any = qwen25vl,
    ):
        vocab = config.text.vocab
        if not stop_ids or not all(0 <= i < vocab for i in stop_ids):
            raise ValueError(f"stop_ids {tuple(stop_ids)} must be ids of the vocabulary of {vocab}")
        start_up_check()
        self.params, self.config, self.model = params, config, model
        self.tokenizer, self.buckets = tokenizer, buckets
        self.layout = layout or VisionLayout()
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self._mesh, self._shards, fuse = mesh, 1, True
        if mesh is not None:
            self._shards = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
            fuse = mesh.shape["tensor"] == 1
            uneven = [b.prompts for b in buckets.buckets if b.prompts % self._shards]
            if uneven:
                raise ValueError(
                    f"buckets of {uneven[0]} prompts do not divide over {self._shards} devices"
                )
        self._fuse = fuse
        if slots is not None and (slots < 1 or slots % self._shards):
            raise ValueError(f"slots={slots} must be a positive multiple of {self._shards} devices")
        self._slots = slots
        if banned_ids is None:
            banned_ids = unsampled_ids(tokenizer, vocab, self.stop_ids)
        banned = np.zeros(vocab, bool)
        banned[np.asarray(banned_ids, np.int64)] = True
        if banned[list(self.stop_ids)].any():
            raise ValueError(f"stop_ids {self.stop_ids} must not be among the banned ids")
        self._banned = banned
        self._ends = self._place(
            device.Ends(
                stop_ids=np.asarray(self.stop_ids, np.int32),
                banned=banned,
                pad=np.int32(self.stop_ids[0]),
            ),
            split=False,
        )
        self.times = dict.fromkeys(("encode", "prefill", "decode"), 0.0)  # seconds, last call
        self.totals = dict(self.times)  # seconds, all calls
        log.info("end of a response: ids %s", list(self.stop_ids))

    def set_params(self, params: Any) -> None:
        """Replaces the parameters; nothing is compiled anew while shapes and dtypes stay."""
        self.params = params

    def warm_up(self, group: int = 1) -> int:
        """Compiles the programs of every bucket, the largest first; returns the number of buckets."""
        machine = self._machine(self.params)
        for bucket in self.buckets.buckets:
            Run(machine, bucket, [], [], group).warm_up()
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
        on_group: Callable[[int, list[Completion]], None] = lambda index, completions: None,
    ) -> list[list[Completion]]:
        """G completions of every request, in the order of the requests.

        Args:
          requests: prompts with their pages.
          sampling: settings of all, or one a request.
          group: G, responses a request.
          seed, step: fold into every key, with the request's id, the sample's and the token's index.
          params: used instead of the engine's own for this call.
          on_group: called with (index, completions) of a request when its last response is done, in this
            thread and while others are still decoded.

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
            check_pages(request)
        needs = [measure(r, s) for r, s in zip(requests, settings, strict=True)]
        params = self.params if params is None else params
        self.times = dict.fromkeys(self.times, 0.0)
        completions: list[list[Completion]] = [[] for _ in requests]
        if not requests:
            return completions
        machine = self._machine(params)
        for bucket, indices in self.buckets.classes(needs):
            batch = [requests[i] for i in indices]
            run = Run(machine, bucket, batch, [settings[i] for i in indices], group)
            found = run(seed, step, lambda i, done, of=indices: on_group(of[i], done))
            for i, group_of in zip(indices, found, strict=True):
                completions[i] = group_of
        return completions

    def _machine(self, params: Any) -> Machine:
        return Machine(
            program=(self.model, self.config, params),
            prepared=device.prepare(self.model, self.config, params, fuse=self._fuse),
            ends=self._ends,
            tokenizer=self.tokenizer,
            layout=self.layout,
            mesh=self._mesh,
            shards=self._shards,
            slots=self._slots,
            place=self._place,
            timed=self._timed,
        )

    def _place(self, arrays: Any, *, split: bool = True) -> Any:
        """Explicit transfer: the first axis over the mesh's batch axes, or whole on every device."""
        if self._mesh is None:
            return jax.device_put(arrays)
        sharding = batch_sharding(self._mesh) if split else replicated(self._mesh)
        return jax.device_put(arrays, sharding)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.times[phase] += seconds
        self.totals[phase] += seconds


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
