"""One whole RS-GRPO step of our side: pages to patches, rollout, rewards, update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from evisrag_jax.pages.patches import make_patches
from evisrag_jax.rl.passes import compile_params
from evisrag_jax.rollout.engine import Request
from evisrag_jax.training.batching import put_batch

from . import ours
from .case import BUDGET, Case, lay_out, scope_masks


class Step:
    """What `rl.trainer` does for one step, from pictures and text to new parameters.

    reward: of one response's ids; it stands in all three channels.
    """

    def __init__(self, case: Case, reward: Callable[[Any], float]):
        self.case, self.reward = case, reward
        shape = case.shape
        empty = np.zeros((shape.prompts, shape.group, shape.response), np.int32)
        rewards = np.zeros((shape.prompts, shape.group, 3), np.float32)
        self.masks = scope_masks(shape)
        batch = ours.make_batch(case, empty, rewards, self.masks)
        self.update = ours.Update(case, batch)
        params = ours.load(case)
        self.engine = ours.make_engine(case, params)
        self.update.start(params)
        self.sampler = compile_params(self.update.settings, self.update.shardings)
        self.count = 0
        self.lengths: list[int] = []
        self.metrics: dict[str, float] = {}

    def _requests(self) -> list[Request]:
        """Pages are cut and prompts laid out anew in every step, as the other side does."""
        case, rows = self.case, []
        for p, (text, pictures) in enumerate(zip(case.texts, case.pictures, strict=True)):
            pages = tuple(make_patches(picture, case.layout, BUDGET) for picture in pictures)
            name = f"prompt {p}"
            rows.append(Request(name, lay_out(case.tokenizer, text, pages, name), pages))
        return rows

    def __call__(self) -> dict[str, float]:
        """The step's metrics."""
        shape, update = self.case.shape, self.update
        self.count += 1
        groups = self.engine.generate(
            self._requests(),
            ours.sampling(shape, greedy=False),
            group=shape.group,
            step=self.count,
            params=self.sampler(update.state),
        )
        grid = (shape.prompts, shape.group)
        tokens = np.full((*grid, shape.response), self.case.stop_ids[1], np.int32)
        sampled = np.zeros((*grid, shape.response), np.float32)
        lengths, rewards = np.zeros(grid, np.int32), np.zeros((*grid, 3), np.float32)
        for p, group in enumerate(groups):
            for g, done in enumerate(group):
                tokens[p, g, : done.length], sampled[p, g, : done.length] = done.ids, done.logp
                lengths[p, g], rewards[p, g] = done.length, self.reward(done.ids)
        batch = ours.make_batch(
            self.case, tokens, rewards, self.masks, lengths=lengths, sampled=sampled
        )
        update.batch = put_batch(batch, update.mesh)
        self.metrics = {name: float(x) for name, x in jax.device_get(update()).items()}
        self.lengths.append(int(lengths.sum()))
        return self.metrics
