"""The rollout viewer's content: which steps and groups are shown, and each group as pages, rewards and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evisrag_jax.reporting.display import (
    finite,
    format_number,
    format_signed,
    mapping,
    number,
    plural,
    text,
    texts,
)
from evisrag_jax.reporting.folder import RunFolder, read_rows
from evisrag_jax.reporting.images import ImageStore, PageImage
from evisrag_jax.reporting.response import Block, is_no_evidence, missing_tags, response_blocks

OVERALL = "overall"
_ADVANTAGE_STEP = 0.5  # one shade of the diverging colour; four shades a side


@dataclass(frozen=True)
class PageView:
    """A page beside the responses. `gold` is its gold evidence ("" where the record names none);
    `relevant` is None where the record says nothing about the page."""

    number: int
    image: PageImage
    gold: str
    relevant: bool | None


@dataclass(frozen=True)
class Cell:
    """A channel of a sample: reward and advantage as written, and the shade of the advantage."""

    reward: str
    advantage: str
    shade: str


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one advantage ("" where the channel pays none of them), and its shade."""

    text: str
    advantage: str
    shade: str


@dataclass(frozen=True)
class SampleView:
    """One response of a group. `best` and `worst` mark the group's highest and lowest reward where these differ
    (a group of one value has a best only); `missing` names absent or open sections; `tokens` holds, by
    channel, the text in stretches of one advantage."""

    id: str
    index: str
    cells: tuple[Cell, ...]
    total: str
    length: str
    finish: str
    best: bool
    worst: bool
    blocks: tuple[Block, ...]
    missing: tuple[str, ...]
    tokens: tuple[tuple[str, tuple[Stretch, ...]], ...] = ()


@dataclass(frozen=True)
class GroupView:
    """A question with its pages and the samples drawn for it, the best and the worst first. `sufficient` is None
    where the record does not say."""

    id: str
    step: int
    record_id: str
    question: str
    answers: tuple[str, ...]
    sufficient: bool | None
    pages: tuple[PageView, ...]
    columns: tuple[str, ...]
    total_name: str
    samples: tuple[SampleView, ...]


@dataclass(frozen=True)
class RolloutViewer:
    """All groups shown, and in words how many of how many these are."""

    groups: tuple[GroupView, ...]
    shown: str


def rollout_viewer(
    run: RunFolder, images: ImageStore, *, steps: int, groups: int
) -> RolloutViewer | None:
    """The viewer of at most `steps` steps, spread evenly from first to last, and the first `groups` groups of each.

    None where the run kept no rollouts. Unreadable lines are added to the run's notes.
    """
    if not run.rollouts:
        return None
    chosen = spread(len(run.rollouts), steps)
    views: list[GroupView] = []
    most = 0
    for step, file in (run.rollouts[i] for i in chosen):
        rows = read_rows(file, run.notes, f"rollouts/{file.name}")
        most = max(most, len(rows))
        for row in rows[:groups]:
            views.append(_group(f"group-{len(views)}", step, row, images))
    shown = f"{len(chosen)} of {plural(len(run.rollouts), 'recorded step')}"
    if most > groups:
        shown += f", the first {plural(groups, 'question')} of up to {most} each"
    return RolloutViewer(tuple(views), shown)


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` indices below `count`, evenly spaced from first to last (only the last where one is wanted)."""
    if count <= wanted:
        return list(range(count))
    if wanted <= 1:
        return [count - 1][:wanted]
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def page_views(row: dict[str, Any], images: ImageStore) -> tuple[PageView, ...]:
    """The pages of a rollout or prediction row with the gold evidence of each, where the row has it."""
    evidence = row.get("evidence")
    golds = evidence if isinstance(evidence, list) else []
    pages = []
    for i, path in enumerate(texts(row.get("images"))):
        gold = text(golds[i]).strip() if i < len(golds) else ""
        relevant = bool(gold) and not is_no_evidence(gold) if i < len(golds) else None
        pages.append(PageView(i + 1, images.add(path), gold if relevant else "", relevant))
    return tuple(pages)


def shade(advantage: float | None) -> str:
    """CSS class of an advantage: adv-n4 … adv-n1 below zero, adv-p1 … adv-p4 above, "" near zero or unknown."""
    if advantage is None:
        return ""
    level = min(4, round(abs(advantage) / _ADVANTAGE_STEP))
    return f"adv-{'p' if advantage > 0 else 'n'}{level}" if level else ""


def _group(id: str, step: int, row: dict[str, Any], images: ImageStore) -> GroupView:
    raw = row.get("samples")
    samples = [s for s in raw if isinstance(s, dict)] if isinstance(raw, list) else []
    names = dict.fromkeys(
        name for s in samples for key in ("rewards", "advantages") for name in mapping(s.get(key))
    )
    has_overall = any(OVERALL in mapping(s.get("rewards")) for s in samples)
    columns = tuple(name for name in names if name != OVERALL)
    totals = [_total(mapping(s.get("rewards"))) for s in samples]
    known = [t for t in totals if t is not None]
    best = totals.index(max(known)) if known else 0
    worst = totals.index(min(known)) if known and min(known) < max(known) else -1
    order = sorted(range(len(samples)), key=lambda i: (i != best, i != worst, i))
    own_step = row.get("step")
    sufficient = row.get("is_sufficient")
    return GroupView(
        id=id,
        step=own_step if isinstance(own_step, int) and not isinstance(own_step, bool) else step,
        record_id=text(row.get("id")),
        question=text(row.get("question")),
        answers=tuple(texts(row.get("answers"))),
        sufficient=sufficient if isinstance(sufficient, bool) else None,
        pages=page_views(row, images),
        columns=columns,
        total_name=OVERALL if has_overall else "sum",
        samples=tuple(
            _sample(f"{id}-sample-{i}", i, samples[i], columns, totals[i], i == best, i == worst)
            for i in order
        ),
    )


def _sample(
    id: str,
    place: int,
    sample: dict[str, Any],
    columns: Sequence[str],
    total: float | None,
    best: bool,
    worst: bool,
) -> SampleView:
    rewards, advantages = mapping(sample.get("rewards")), mapping(sample.get("advantages"))
    cells = []
    for name in columns:
        advantage = number(advantages.get(name))
        cells.append(
            Cell(
                reward=format_number(rewards[name], 2) if name in rewards else "",
                advantage=format_signed(advantage) if advantage is not None else "",
                shade=shade(finite(advantage)),
            )
        )
    sections = {tag: text(inner) for tag, inner in mapping(sample.get("sections")).items()}
    blocks = response_blocks(text(sample.get("text")), sections)
    return SampleView(
        id=id,
        index=text(sample.get("index", place)),
        cells=tuple(cells),
        total=format_number(total, 2),
        length=format_number(sample.get("length")),
        finish=text(sample.get("finish")) or "n/a",
        best=best,
        worst=worst,
        blocks=tuple(blocks),
        missing=tuple(missing_tags(blocks)),
        tokens=tuple(
            (name, stretches(text(sample.get("text")), runs))
            for name, runs in mapping(sample.get("token_advantages")).items()
        ),
    )


def stretches(whole: str, runs: Any) -> tuple[Stretch, ...]:
    """A text cut at runs [first character, end, advantage]; what lies in no run has no advantage. Runs that
    are malformed, overlap or reach beyond the text are left out."""
    out: list[Stretch] = []
    at = 0
    for run in runs if isinstance(runs, list) else []:
        if not (
            isinstance(run, list) and len(run) == 3 and all(number(x) is not None for x in run)
        ):
            continue
        start, end, value = int(run[0]), int(run[1]), finite(number(run[2]))
        if not at <= start < end <= len(whole):
            continue
        if start > at:
            out.append(Stretch(whole[at:start], "", ""))
        out.append(Stretch(whole[start:end], format_signed(value), shade(value)))
        at = end
    if at < len(whole):
        out.append(Stretch(whole[at:], "", ""))
    return tuple(out)


def _total(rewards: dict[str, Any]) -> float | None:
    """The overall reward of a sample: as recorded, else the sum of its finite channels."""
    if OVERALL in rewards:
        return finite(rewards[OVERALL])
    values = [x for x in map(finite, rewards.values()) if x is not None]
    return sum(values) if values else None
