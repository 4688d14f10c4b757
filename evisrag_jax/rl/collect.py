"""The environment of single-turn RL: prompts in, judged groups out.

    stream ─► P prepared records ─engine─► G completions each ─rewards, scopes─► filter ─► Collected
                  ▲                                  │              └─ beyond P: wait for the next step
                  └── too few kept: another round    └─ without a filter ─► batch arrays meanwhile

Everything here is host work around the engine's device programs. A group is judged in a thread as soon
as its last response is done, while others are still decoded. Of several processes each samples and
judges the prompts of its own rows; what they tell each other (`rl.told`) makes filter, metrics and the
choice of the batch those of a single process.
Other environments (many turns) give the trainer the same `Collected`.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32, UInt32

from evisrag_jax.data.pipeline import RecordStream
from evisrag_jax.data.schema import Record
from evisrag_jax.pages.patches import ImageArrays, stack_pages
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.prompts.sections import TAGS, parse_sections
from evisrag_jax.rewards.boxes import BoxGold, Frame, gold_boxes
from evisrag_jax.rewards.evisrag import CODE_CHANNELS, RewardConfig, score_response
from evisrag_jax.rewards.gold import gold_text
from evisrag_jax.rl import scopes, steps, surplus
from evisrag_jax.rl.advantages import occurrence_ids
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.dynamic import sampling_metrics, shortage
from evisrag_jax.rl.filter import MAX_TRIES, ShortBatch, filter_groups
from evisrag_jax.rl.told import Judged, Told, rebuild, rollout_metrics, tell
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion, Request
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.processes import gather
from evisrag_jax.runtime.timeline import Span
from evisrag_jax.runtime.watchdog import beat
from evisrag_jax.training.batching import (
    Bucket,
    Prepared,
    choose_bucket,
    make_group_batch,
    with_features,
)
from evisrag_jax.training.feature_cache import FeatureCache
from evisrag_jax.training.forward import GroupBatch


@dataclass
class Collected:
    """One step's groups on the host; arrays have this process's rows of the batch (P of one process),
    those beyond the kept groups are empty.

    groups, sampled, rewards, masks, valid, trained, stale, pages, salts: see `update.RLBatch`.  metrics:
    scalars of the rollout, of all processes.  rows: rollout rows for the run folder (`reporting`), of what this process
    sampled.  places: their rows in the whole batch.  spans: phases and when they were.
    """

    groups: GroupBatch
    sampled: Float32[np.ndarray, "P G T"]
    rewards: Float32[np.ndarray, "P G C"]
    masks: Bool[np.ndarray, "P G C T"]
    valid: Bool[np.ndarray, "P G"]
    trained: Bool[np.ndarray, "P G"]
    stale: Bool[np.ndarray, " P"]
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    places: list[int]
    spans: list[Span] = field(default_factory=list)
    pages: ImageArrays | None = None
    salts: UInt32[np.ndarray, " P"] | None = None


class Collector:
    """`collect(params, step)` for records with gold answers and evidence; `close` it after use.

    Args:
        engine: generates; its parameters are replaced every step.
        stream: yields lists of `data.pipeline.Example` whose items are `Prepared`.
        rl: the run's settings.
        buckets: training shapes; P = rl.prompts, G = rl.group.
        encode: text of a response → ids, for scope_match "token_ids" and step prompts: a tag that is one
            token of a small vocabulary is that token.
        seed: of sampling.
        features: of the pages, for a frozen tower: engine and update then never run it.
        put: places the arrays of a batch on its devices, while responses are still being judged.
        workers: threads that judge responses.
    """

    def __init__(
        self,
        engine: Engine,
        stream: RecordStream | Any,
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
        self.scope_mode = "code" if rl.reward.channels == CODE_CHANNELS else "paper"
        self._encode = encode
        self._carried: list[Judged] = []
        self.tag_ids = scopes.encode_tags(encode) if rl.scope_match == "token_ids" else None
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self.own = rl.prompts // jax.process_count()  # rows of this process
        self.first = self.own * jax.process_index()

    def __call__(self, params: Any, step: int) -> Collected:
        """Rollouts of step `step` (counted from 1) under `params`. ShortBatch when the filter leaves too
        few groups."""
        P, filter = self.rl.prompts, self.rl.filter
        carried, self._carried = self._carried, []
        sampled: list[list[Judged]] = []  # of this process, by round
        told: list[Told] = []
        kept: list[Judged | tuple[int, int]] = list(carried)  # of this step as (round, row)
        spans: list[Span] = []
        if self.features is not None:
            with span("encode", spans):
                self.features.take(params)
        reasons: Counter[str] = Counter()
        groups = None
        while len(kept) < P and len(told) < (filter.tries if filter.active else 1):
            beat(f"step {step}: rollout {len(told) + 1}")
            judging = self._round(params, step * MAX_TRIES + len(told), spans)
            if not filter.active and len(judging) == self.own:  # all will be kept
                with span("prepare", spans):
                    groups = self._groups([(item, done) for item, done, _ in judging])
            judged, times = zip(*(future.result() for _, _, future in judging), strict=True)
            spans.append(("reward", min(b for b, _ in times), max(e for _, e in times)))
            beat(f"step {step}: rewards {len(told) + 1}")
            sampled.append(list(judged))
            told.append(tell(judged, self.rl, moves=filter.active))
            keep, dropped = self._filter(told[-1])
            kept += [(len(told) - 1, row) for row, ok in enumerate(keep) if ok]
            reasons.update(dropped)
        with span("prepare", spans):
            rows = [one if isinstance(one, Judged) else self._group(sampled, told, *one)
                    for one in kept[P:]]  # fmt: skip
            if filter.surplus == "carry":
                self._carried = rows
        short = P - len(kept)
        if filter.active and short > 0 and not filter.train_on_partial:
            raise ShortBatch(shortage(self.rl, step, len(carried), told, reasons))
        metrics = rollout_metrics(told, self.rl) if told else {}
        over = (len(carried), len(self._carried))
        metrics |= sampling_metrics(self.rl, kept, over, told, reasons, spans)
        kept = kept[:P]
        with span("prepare", spans):
            mine = [
                one if isinstance(one, Judged) else self._group(sampled, told, *one)
                for one in kept[self.first : self.first + self.own]
            ]
            stale = [isinstance(one, Judged) for one in kept[self.first : self.first + self.own]]
            shown = mine or [sampled[0][0]]
            if groups is None:
                groups = self._groups([(group.item, group.completions) for group in shown])
            return self._arrays(groups, shown, stale, metrics, spans, step)

    def _group(
        self, sampled: Sequence[Sequence[Judged]], told: Sequence[Told], turn: int, row: int
    ) -> Judged:
        """A kept group: this process's own, or rebuilt from what another one told."""
        first = len(sampled[turn]) * jax.process_index()
        if first <= row < first + len(sampled[turn]):
            return sampled[turn][row - first]
        record = self.stream.record(int(told[turn].position[row]))
        return rebuild(self.stream.prepare(record), told[turn], row, self.rl)

    def get_state(self) -> dict[str, Any]:
        """The stream's place, and the groups that wait for the next step."""
        return {"stream": self.stream.get_state(), "carried": surplus.to_json(self._carried)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `get_state`; texts, rewards and scopes of waiting groups are computed again."""
        self.stream.set_state(state["stream"])
        self._carried = []
        for row in state["carried"]:
            item = self.stream.prepare(self.stream.record(row["position"]))
            completions = surplus.completions_of(row, self.engine.tokenizer)
            self._carried.append(self._judge(item, completions, row["position"])[0])

    def metrics(self) -> dict[str, float]:
        """Counters of the stream."""
        return self.stream.metrics()

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
        positions = [example.position for example in examples]
        if self.rl.step_prompts == "none":
            return self._sample(params, fold, spans, ids, items, positions)
        first = self._sample(params, fold, spans, ids, items, positions, "perception")
        taught = self.rl.step_prompts == "gold"
        behind = [
            steps.behind_evidence(item, self._encode, () if taught else done)
            for item, done, _ in first
        ]
        ids = [f"{id}#derivation" for id in ids]
        second = self._sample(params, fold, spans, ids, behind, positions, "derivation")
        return [group for pair in zip(first, second, strict=True) for group in pair]

    def _sample(
        self,
        params: Any,
        fold: int,
        spans: list[Span],
        ids: Sequence[str],
        items: Sequence[Prepared],
        positions: Sequence[int],
        step: str = "",
    ) -> list[tuple[Prepared, list[Completion], Future[tuple[Judged, tuple[float, float]]]]]:
        """The groups of these prompts, each being judged from its last response on."""
        requests = [
            Request(i, x.prompt, x.pages, x.features) for i, x in zip(ids, items, strict=True)
        ]
        done: dict[int, list[Completion]] = {}
        futures: dict[int, Future[tuple[Judged, tuple[float, float]]]] = {}

        def judge(index: int, completions: list[Completion]) -> None:
            if step == "perception":
                completions = [steps.cut_at_evidence(one) for one in completions]
            done[index] = completions
            futures[index] = self._threads.submit(
                self._judge, items[index], completions, positions[index], step
            )

        begin = time.perf_counter()
        self.engine.generate(
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
        return [(item, done[i], futures[i]) for i, item in enumerate(items)]

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
        self, item: Prepared, completions: list[Completion], position: int, step: str = ""
    ) -> tuple[Judged, tuple[float, float]]:
        """The judged group, and when that was done."""
        begin = time.perf_counter()
        gold = gold_of(item, self.rl.reward, self.engine.layout)
        rewards, masks, found = [], [], []
        for done in completions:
            scores = score_response(done.text, gold, done.length, self.rl.reward)
            rewards.append(steps.only(scores, step) if step else scores)
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
                names=self.rl.reward.channels,
            )
            masks.append(mask)
            found.append(tags)
        judged = Judged(item, completions, rewards, np.stack(masks), found, position, step)
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
        names, reward = list(self.rl.reward.channels), self.rl.reward
        counts = told.rewards[..., [names.index(name) for name in reward.paid]]
        metric = self.rl.filter.metric
        channel = None if metric == "overall" else reward.paid.index(metric)
        result = filter_groups(counts.astype(np.float64), told.valid, self.rl.filter, channel)
        return result.keep.tolist(), [reason for reason in result.reasons if reason]

    def _arrays(
        self,
        groups: GroupBatch,
        kept: Sequence[Judged],
        stale: Sequence[bool],
        metrics: dict[str, float],
        spans: list[Span],
        step: int,
    ) -> Collected:
        """This process's rows of the batch; where it has none (`stale` is empty), one group that takes
        no part."""
        P, G, T = self.own, self.rl.group, self.rl.max_tokens
        names = self.rl.reward.channels
        sampled = np.zeros((P, G, T), np.float32)
        rewards = np.zeros((P, G, len(names)), np.float32)
        masks = np.zeros((P, G, len(names), T), bool)
        valid, trained = np.zeros((P, G), bool), np.zeros((P, G), bool)
        salts = np.zeros(P, np.uint32)
        for p, group in enumerate(kept):
            masks[p], valid[p] = group.masks, bool(stale) & np.array(group.valid)
            # An epoch or a record that stands twice in a batch has another position.
            salts[p] = zlib.crc32(f"{self.seed} {step} {group.position} {group.step}".encode())
            for g, (done, score) in enumerate(zip(group.completions, group.rewards, strict=True)):
                sampled[p, g, : done.length] = done.logp
                rewards[p, g] = [score[name] for name in names]
                trained[p, g] = not (self.rl.mask_truncated and done.finish == "length")
        # What another process sampled is in that one's memory only.
        here = [p for p, group in enumerate(kept) if group.found]
        rows = [rollout_row(step, kept[p]) for p in here]
        places = [self.first + p for p in here]
        trained &= valid
        old = np.zeros(P, bool)
        old[: len(stale)] = stale
        masked = self.rl.masked.active
        return Collected(
            groups=groups,
            sampled=sampled,
            rewards=rewards,
            masks=masks,
            valid=valid,
            trained=trained,
            stale=old,
            pages=self._pages(kept) if masked and self.features is not None else None,
            salts=salts if masked else None,
            metrics=metrics,
            rows=rows,
            places=places,
            spans=spans,
        )

    def _pages(self, kept: Sequence[Judged]) -> ImageArrays:
        """The pages of a batch that holds their features."""
        bucket = choose_bucket([group.item for group in kept], self.buckets)
        spare = self.own - len(kept)
        return stack_pages(
            [*(group.item.pages for group in kept), *[()] * spare],
            images=bucket.images,
            windows=bucket.windows,
            tokens=bucket.tokens,
            layout=self.engine.layout,
        )


def gold_of(item: Prepared, reward: RewardConfig, layout: VisionLayout) -> str | BoxGold:
    """What the responses to a record are compared with.

    Raises GoldError for a record without it, naming it, and PageError for a box outside its page.
    """
    if not reward.reads_boxes:
        return gold_text(item.record)
    frames = [Frame.of(page, layout) for page in item.pages]
    return gold_boxes(item.record, frames, reward.units)


@contextlib.contextmanager
def span(name: str, spans: list[Span]) -> Iterator[None]:
    """Notes the block as a phase."""
    begin = time.perf_counter()
    yield
    spans.append((name, begin, time.perf_counter()))


def rollout_row(step: int, group: Judged) -> dict[str, Any]:
    """A prompt with its samples, as rollouts/step_*.jsonl holds it but for the advantages, which take the
    place of `offsets`."""
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
                "offsets": done.offsets,
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
        **({"step_prompt": group.step} if group.step else {}),
        "samples": samples,
    }
