"""The environment of single-turn RL: prompts in, judged groups out.

    stream ─► P prepared records ─engine─► G completions each ─rewards, scopes─► filter ─► Collected
                                                     └─ without a filter ─► batch arrays meanwhile

Everything here is host work around the engine's device programs. A group is judged in a thread as soon
as its last response is done, while others are still decoded.
Other environments (many turns) give the trainer the same `Collected`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from evisrag_jax.data.schema import Record
from evisrag_jax.prompts.sections import TAGS, parse_sections
from evisrag_jax.rewards.evisrag import score_response
from evisrag_jax.rewards.gold import gold_text
from evisrag_jax.rl import scopes
from evisrag_jax.rl.advantages import occurrence_ids
from evisrag_jax.rl.config import MAX_TRIES, RLConfig
from evisrag_jax.rl.filter import filter_groups
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion, Request
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.timeline import Span
from evisrag_jax.training.batching import Bucket, Prepared, make_group_batch, with_features
from evisrag_jax.training.feature_cache import FeatureCache
from evisrag_jax.training.forward import GroupBatch


@dataclass
class Collected:
    """One step's groups on the host; arrays have P rows, those beyond the kept groups are empty.

    groups, sampled, rewards, masks, valid, trained: see `update.RLBatch`.  metrics: scalars of the
    rollout.  rows: rollout rows for the run folder (`reporting`).  spans: phases and when they were.
    """

    groups: GroupBatch
    sampled: Float32[np.ndarray, "P G T"]
    rewards: Float32[np.ndarray, "P G C"]
    masks: Bool[np.ndarray, "P G C T"]
    valid: Bool[np.ndarray, "P G"]
    trained: Bool[np.ndarray, "P G"]
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    spans: list[Span] = field(default_factory=list)


@dataclass
class Judged:
    """A prompt with its completions, their channel values, scope masks, and which tags were found."""

    item: Prepared
    completions: list[Completion]
    rewards: list[dict[str, float]]
    masks: Bool[np.ndarray, "G C T"]
    found: list[dict[str, bool]]

    @property
    def valid(self) -> list[bool]:
        """The completions that exist: their logits were finite to the end."""
        return [done.finish != "error" for done in self.completions]


class Collector:
    """`collect(params, step)` for records with gold answers and evidence; `close` it after use.

    Args:
        engine: generates; its parameters are replaced every step.
        stream: yields lists of `data.pipeline.Example` whose items are `Prepared`.
        rl: the run's settings.
        buckets: training shapes; P = rl.prompts, G = rl.group.
        encode: plain text → ids, for scope_match "token_ids".
        seed: of sampling.
        features: of the pages, for a frozen tower: engine and update then never run it.
        put: places the arrays of a batch on its devices, while responses are still being judged.
        workers: threads that judge responses.
    """

    def __init__(
        self,
        engine: Engine,
        stream: Iterator[Sequence[Any]],
        rl: RLConfig,
        buckets: Sequence[Bucket],
        encode: Callable[[str], Sequence[int]],
        *,
        seed: int,
        features: FeatureCache | None = None,
        put: Callable[[GroupBatch], GroupBatch] = lambda groups: groups,
        workers: int = 2,
    ):
        self.engine, self.stream, self.rl = engine, stream, rl
        self.buckets, self.seed = buckets, seed
        self.features, self.put = features, put
        self.sampling = SamplingConfig(
            temperature=rl.temperature, top_p=rl.top_p, max_tokens=rl.max_tokens
        )
        self.scope_mode = "code" if rl.reward.mode == "code" else "paper"
        self.tag_ids = scopes.encode_tags(encode) if rl.scope_match == "token_ids" else None
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    def __call__(self, params: Any, step: int) -> Collected:
        """Rollouts of step `step` (counted from 1) under `params`."""
        kept: list[Judged] = []
        seen: list[Judged] = []
        spans: list[Span] = []
        if self.features is not None:
            with span("encode", spans):
                self.features.take(params)
        dropped: dict[str, int] = {}
        groups, rounds = None, 0
        while len(kept) < self.rl.prompts and rounds < self.rl.tries:
            rounds += 1
            judging = self._round(params, step * MAX_TRIES + rounds - 1, spans)
            if (
                self.rl.filter is None and not kept and len(judging) == self.rl.prompts
            ):  # all will be kept
                with span("prepare", spans):
                    groups = self._groups([(item, done) for item, done, _ in judging])
            judged, times = zip(*(future.result() for _, _, future in judging), strict=True)
            spans.append(("reward", min(b for b, _ in times), max(e for _, e in times)))
            seen += judged
            keep, reasons = self._filter(judged)
            kept += [group for group, ok in zip(judged, keep, strict=True) if ok]
            for reason in reasons:
                dropped[reason] = dropped.get(reason, 0) + 1
        kept = kept[: self.rl.prompts]
        metrics = self._metrics(seen) | {
            "filter/kept": float(len(kept)),
            "filter/groups": float(len(seen)),
            "filter/rounds": float(rounds),
            **{f"filter/dropped_{name}": float(n) for name, n in sorted(dropped.items())},
        }
        with span("prepare", spans):
            shown = kept or seen[:1]
            if groups is None:
                groups = self._groups([(group.item, group.completions) for group in shown])
            return self._arrays(groups, shown, bool(kept), metrics, spans, step)

    def close(self) -> None:
        """Ends the reward threads."""
        self._threads.shutdown()

    def _round(
        self, params: Any, fold: int, spans: list[Span]
    ) -> list[tuple[Prepared, list[Completion], Future[tuple[Judged, tuple[float, float]]]]]:
        """P prompts sampled, and being judged; `fold` is the step number of their random keys."""
        items = [example.item for example in next(self.stream)]
        if self.features is not None:
            with span("encode", spans):
                items = with_features(items, self.features)
        ids = occurrence_ids([item.id for item in items])
        requests = [
            Request(i, x.prompt, x.pages, x.features) for i, x in zip(ids, items, strict=True)
        ]
        futures: dict[int, Future[tuple[Judged, tuple[float, float]]]] = {}

        def judge(index: int, completions: list[Completion]) -> None:
            futures[index] = self._threads.submit(self._judge, items[index], completions)

        begin = time.perf_counter()
        groups = self.engine.generate(
            requests,
            self.sampling,
            group=self.rl.group,
            seed=self.seed,
            step=fold,
            params=params,
            on_group=judge,
        )
        # The engine's phases take turns; in the timeline each is put together.
        for phase, seconds in getattr(self.engine, "times", {}).items():
            spans.append((phase, begin, begin + seconds))
            begin += seconds
        return [(item, groups[i], futures[i]) for i, item in enumerate(items)]

    def _judge(
        self, item: Prepared, completions: list[Completion]
    ) -> tuple[Judged, tuple[float, float]]:
        """The judged group, and when that was done."""
        begin = time.perf_counter()
        gold = gold_text(item.record)
        rewards, masks, found = [], [], []
        for done in completions:
            rewards.append(score_response(done.text, gold, done.length, self.rl.reward))
            row = np.full(self.rl.max_tokens, -1, np.int64)
            row[: done.length] = done.ids
            mask, tags = scopes.scope_masks(
                done.text,
                done.offsets,
                row,
                done.length,
                mode=self.scope_mode,
                match=self.rl.scope_match,
                tag_ids=self.tag_ids,
            )
            masks.append(mask)
            found.append(tags)
        judged = Judged(item, completions, rewards, np.stack(masks), found)
        return judged, (begin, time.perf_counter())

    def _groups(self, groups: Sequence[tuple[Prepared, list[Completion]]]) -> GroupBatch:
        """Prompts, pages and sampled ids of these groups, placed."""
        items, completions = zip(*groups, strict=True)
        return self.put(
            make_group_batch(
                items,
                self.buckets,
                responses=[[c.ids.tolist() for c in group] for group in completions],
                layout=self.engine.layout,
                features=self.features,
            )
        )

    def _filter(self, judged: Sequence[Judged]) -> tuple[list[bool], list[str]]:
        if self.rl.filter is None:
            return [True] * len(judged), []
        rewards = np.array([[list(r.values()) for r in g.rewards] for g in judged], np.float64)
        valid = np.array([group.valid for group in judged])
        result = filter_groups(rewards, valid, self.rl.filter)
        return result.keep.tolist(), [reason for reason in result.reasons if reason]

    def _metrics(self, judged: Sequence[Judged]) -> dict[str, float]:
        """Means over everything sampled, before filter and masks."""
        done = [c for group in judged for c in group.completions]
        rewards = [r for group in judged for r in group.rewards]
        names = self.rl.reward.channels
        spread = [np.ptp([sum(r.values()) for r in g.rewards]) for g in judged]
        return {
            **{f"reward/{n}": float(np.mean([r[n] for r in rewards])) for n in names},
            "reward/overall": float(np.mean([sum(r.values()) for r in rewards])),
            "reward/group_spread": float(np.mean(spread)),
            "rollout/length_mean": float(np.mean([c.length for c in done])),
            "rollout/length_max": float(max(c.length for c in done)),
            "rollout/clipped_ratio": float(np.mean([c.finish == "length" for c in done])),
            "rollout/failed": float(sum(c.finish == "error" for c in done)),
            "rollout/degenerate": float(np.mean([c.degenerate for c in done])),
            **scopes.found_rates([f for group in judged for f in group.found]),
        }

    def _arrays(
        self,
        groups: GroupBatch,
        kept: Sequence[Judged],
        any_kept: bool,
        metrics: dict[str, float],
        spans: list[Span],
        step: int,
    ) -> Collected:
        """The batch of the kept groups; without any, of one group that takes no part."""
        P, G, T = self.rl.prompts, self.rl.group, self.rl.max_tokens
        names = self.rl.reward.channels
        sampled = np.zeros((P, G, T), np.float32)
        rewards = np.zeros((P, G, len(names)), np.float32)
        masks = np.zeros((P, G, len(names), T), bool)
        valid, trained = np.zeros((P, G), bool), np.zeros((P, G), bool)
        for p, group in enumerate(kept):
            masks[p], valid[p] = group.masks, any_kept & np.array(group.valid)
            for g, (done, score) in enumerate(zip(group.completions, group.rewards, strict=True)):
                sampled[p, g, : done.length] = done.logp
                rewards[p, g] = [score[name] for name in names]
                trained[p, g] = not (self.rl.mask_truncated and done.finish == "length")
        rows = [rollout_row(step, group) for group in kept]
        trained &= valid
        return Collected(groups, sampled, rewards, masks, valid, trained, metrics, rows, spans)


@contextlib.contextmanager
def span(name: str, spans: list[Span]) -> Iterator[None]:
    """Notes the block as a phase."""
    begin = time.perf_counter()
    yield
    spans.append((name, begin, time.perf_counter()))


def rollout_row(step: int, group: Judged) -> dict[str, Any]:
    """A prompt with its samples, as rollouts/step_*.jsonl holds it; advantages are added later."""
    record: Record = group.item.record
    samples = []
    for index, (done, rewards) in enumerate(zip(group.completions, group.rewards, strict=True)):
        sections = parse_sections(done.text)
        samples.append(
            {
                "index": index,
                "text": done.text,
                "length": done.length,
                "finish": done.finish,
                "sections": {tag: sections[tag].text for tag in TAGS if tag in sections},
                "rewards": rewards,
                "advantages": {},
            }
        )
    return {
        "step": step,
        "id": record.id,
        "question": record.question,
        "images": list(record.images),
        "answers": list(record.answers),
        "is_sufficient": record.is_sufficient,
        "evidence": list(record.evidence),
        "samples": samples,
    }
