"""The environment of single-turn RL: prompts in, judged groups out.

    stream ─► P prepared records ─engine─► G completions each ─rewards, scopes─► filter ─► Collected
                                                     └─ without a filter ─► batch arrays meanwhile

Everything here is host work around the engine's device programs. A group is judged in a thread as soon
as its last response is done, while others are still decoded. Of several processes each samples and
judges the prompts of its own rows; what they tell each other (`rl.told`) makes filter, metrics and the
choice of the batch those of a single process.
Other environments (many turns) give the trainer the same `Collected`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
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
from evisrag_jax.rl.told import Judged, Told, rebuild, rollout_metrics, tell
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion, Request
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.processes import gather
from evisrag_jax.runtime.timeline import Span
from evisrag_jax.runtime.watchdog import beat
from evisrag_jax.training.batching import Bucket, Prepared, make_group_batch, with_features
from evisrag_jax.training.feature_cache import FeatureCache
from evisrag_jax.training.forward import GroupBatch


@dataclass
class Collected:
    """One step's groups on the host; arrays have this process's rows of the batch (P of one process),
    those beyond the kept groups are empty.

    groups, sampled, rewards, masks, valid, trained: see `update.RLBatch`.  metrics: scalars of the
    rollout, of all processes.  rows: rollout rows for the run folder (`reporting`), of what this process
    sampled.  places: their rows in the whole batch.  spans: phases and when they were.
    """

    groups: GroupBatch
    sampled: Float32[np.ndarray, "P G T"]
    rewards: Float32[np.ndarray, "P G C"]
    masks: Bool[np.ndarray, "P G C T"]
    valid: Bool[np.ndarray, "P G"]
    trained: Bool[np.ndarray, "P G"]
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    places: list[int]
    spans: list[Span] = field(default_factory=list)


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
        self.own = rl.prompts // jax.process_count()  # rows of this process
        self.first = self.own * jax.process_index()

    def __call__(self, params: Any, step: int) -> Collected:
        """Rollouts of step `step` (counted from 1) under `params`."""
        P = self.rl.prompts
        sampled: list[list[Judged]] = []  # of this process, by round
        told: list[Told] = []
        kept: list[tuple[int, int]] = []  # (round, row)
        spans: list[Span] = []
        if self.features is not None:
            with span("encode", spans):
                self.features.take(params)
        reasons: Counter[str] = Counter()
        groups = None
        while len(kept) < P and len(told) < self.rl.tries:
            beat(f"step {step}: rollout {len(told) + 1}")
            judging = self._round(params, step * MAX_TRIES + len(told), spans)
            if self.rl.filter is None and not kept and len(judging) == self.own:  # all will be kept
                with span("prepare", spans):
                    groups = self._groups([(item, done) for item, done, _ in judging])
            judged, times = zip(*(future.result() for _, _, future in judging), strict=True)
            spans.append(("reward", min(b for b, _ in times), max(e for _, e in times)))
            beat(f"step {step}: rewards {len(told) + 1}")
            sampled.append(list(judged))
            told.append(tell(judged, self.rl, moves=self.rl.filter is not None))
            keep, dropped = self._filter(told[-1])
            kept += [(len(told) - 1, row) for row, ok in enumerate(keep) if ok]
            reasons.update(dropped)
        kept = kept[:P]
        metrics = rollout_metrics(told, self.rl) | {
            "filter/kept": float(len(kept)),
            "filter/groups": float(sum(len(one.length) for one in told)),
            "filter/rounds": float(len(told)),
            **{f"filter/dropped_{name}": float(n) for name, n in sorted(reasons.items())},
        }
        with span("prepare", spans):
            mine = [
                self._group(sampled, told, *place)
                for place in kept[self.first : self.first + self.own]
            ]
            shown = mine or [sampled[0][0]]
            if groups is None:
                groups = self._groups([(group.item, group.completions) for group in shown])
            return self._arrays(groups, shown, bool(mine), metrics, spans, step)

    def _group(
        self, sampled: Sequence[Sequence[Judged]], told: Sequence[Told], turn: int, row: int
    ) -> Judged:
        """A kept group: this process's own, or rebuilt from what another one told."""
        first = len(sampled[turn]) * jax.process_index()
        if first <= row < first + len(sampled[turn]):
            return sampled[turn][row - first]
        record = self.stream.record(int(told[turn].position[row]))
        return rebuild(self.stream.prepare(record), told[turn], row, self.rl)

    def close(self) -> None:
        """Ends the reward threads."""
        self._threads.shutdown()

    def _round(
        self, params: Any, fold: int, spans: list[Span]
    ) -> list[tuple[Prepared, list[Completion], Future[tuple[Judged, tuple[float, float]]]]]:
        """P prompts sampled, and being judged; `fold` is the step number of their random keys."""
        examples = next(self.stream)
        items = [example.item for example in examples]
        if self.features is not None:
            with span("encode", spans):
                items = with_features(items, self.features)
        ids = self._ids(examples)
        requests = [
            Request(i, x.prompt, x.pages, x.features) for i, x in zip(ids, items, strict=True)
        ]
        futures: dict[int, Future[tuple[Judged, tuple[float, float]]]] = {}

        def judge(index: int, completions: list[Completion]) -> None:
            position = examples[index].position
            futures[index] = self._threads.submit(self._judge, items[index], completions, position)

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

    def _ids(self, examples: Sequence[Any]) -> list[str]:
        """Ids of the requests, told apart where a record stands twice in the batch of all processes."""
        count = jax.process_count()
        if count == 1:
            return occurrence_ids([example.item.id for example in examples])
        own = np.array([example.position for example in examples], np.int32)
        positions = gather(own).reshape(-1).tolist()
        ids = occurrence_ids([self.stream.record(position).id for position in positions])
        first = len(examples) * jax.process_index()
        return ids[first : first + len(examples)]

    def _judge(
        self, item: Prepared, completions: list[Completion], position: int
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
        judged = Judged(item, completions, rewards, np.stack(masks), found, position)
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
                prompts=self.own,
            )
        )

    def _filter(self, told: Told) -> tuple[list[bool], list[str]]:
        if self.rl.filter is None:
            return [True] * len(told.length), []
        result = filter_groups(told.rewards.astype(np.float64), told.valid, self.rl.filter)
        return result.keep.tolist(), [reason for reason in result.reasons if reason]

    def _arrays(
        self,
        groups: GroupBatch,
        kept: Sequence[Judged],
        any_kept: bool,
        metrics: dict[str, float],
        spans: list[Span],
        step: int,
    ) -> Collected:
        """This process's rows of the batch; where it has none, one group that takes no part."""
        P, G, T = self.own, self.rl.group, self.rl.max_tokens
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
        # What another process sampled is in that one's memory only.
        here = [p for p, group in enumerate(kept) if group.found]
        rows = [rollout_row(step, kept[p]) for p in here]
        places = [self.first + p for p in here]
        trained &= valid
        return Collected(
            groups, sampled, rewards, masks, valid, trained, metrics, rows, places, spans
        )


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
