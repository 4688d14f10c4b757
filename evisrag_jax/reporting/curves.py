"""Learning curves: which metrics share a chart, in which order, and in which colours.

Colours are CSS classes: a reward channel and a scope wear the colour of the section of the response that they pay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evisrag_jax.reporting.display import finite, number
from evisrag_jax.reporting.drawing import Chart, Line, draw
from evisrag_jax.reporting.folder import NONFINITE

LINES = 6  # most lines in one chart

# Section colours of the response, shared with the rollout viewer.
_SECTION = {
    "accuracy": "answer",
    "derivation": "answer",
    "answer": "answer",
    "evidence": "evidence",
    "perception": "evidence",
    "observe": "observe",
    "isobserve": "observe",
    "think": "think",
    "isthink": "think",
    "format": "neutral",
    "overlong": "alert",
}
_PENALTIES = {"overlong", "isobserve", "isthink"}


@dataclass(frozen=True)
class Family:
    """Metrics that belong together: `pattern` matches whole keys, `unit` is said under the title.

    `split` puts lines of different magnitude into charts of their own; `log` allows a log axis; `fraction` draws
    0 to 1 where all values lie there; `smooth` allows the running mean.
    """

    id: str
    title: str
    unit: str
    pattern: str
    split: bool = False
    log: bool = False
    fraction: bool = False
    smooth: bool = True


# The first pattern that matches a key takes it; charts appear in the order of `ORDER`.
FAMILIES = (
    Family(
        "gradient",
        "Gradient norm",
        "before clipping",
        r".*grad(ient)?_norm.*",
        split=True,
        log=True,
        smooth=False,
    ),
    Family(
        "gap",
        "Sampler–trainer gap",
        "difference of log-probs per token",
        r".*(log_?p(rob)?s?_?(gap|diff)|mismatch|sampler_trainer|trainer_sampler).*",
        split=True,
        log=True,
    ),
    Family(
        "reward",
        "Reward channels",
        "mean over the step’s samples",
        r"reward/(?!overall|mean$|total$|group_)(?!.*_(std|flat|low|high)$).+",
    ),
    Family(
        "signal",
        "Groups without signal",
        "share in which all responses have one value",
        r"reward/.+_flat",
        fraction=True,
    ),
    Family("spread", "Reward spread", "standard deviation over responses", r"reward/.+_std"),
    Family(
        "bounds",
        "Values at the bounds",
        "share of responses",
        r"reward/.+_(low|high)",
        fraction=True,
    ),
    Family(
        "hollow",
        "Hollow and soft responses",
        "share of responses",
        r"rollout/(all_no_info|empty_sections|exact|soft_credit)",
    ),
    Family(
        "interference",
        "Interference",
        "cosine of the perception and the derivation gradient",
        r"grad/cosine",
        smooth=False,
    ),
    Family(
        "overall",
        "Overall reward",
        "sum of the channels",
        r"reward/(overall|mean$|total$|group_).*",
    ),
    Family("length", "Response length", "tokens", r"rollout/length.*"),
    Family(
        "clipped", "Clipped responses", "share that reached the token limit", r"rollout/clipped.*"
    ),
    Family("loss", "Loss", "per step", r"loss(/(?!clipfrac|ppo_kl).*)?", split=True, log=True),
    Family(
        "scope",
        "Scopes found",
        "share of samples whose tag was found",
        r"scope/found.*",
        fraction=True,
    ),
    Family(
        "eval",
        "Evaluation",
        "held-out questions",
        r"eval/(accuracy|em|f1|evidence(_f1)?|format(_rate)?)",
        split=True,
        fraction=True,
        smooth=False,
    ),
)
ORDER = (
    "overall",
    "reward",
    "signal",
    "bounds",
    "spread",
    "hollow",
    "interference",
    "eval",
    "loss",
    "gradient",
    "gap",
    "length",
    "clipped",
    "scope",
)
_REST_UNIT = {"time": "seconds", "eval": "held-out questions", "lr": "learning rate"}


def charts(rows: Sequence[dict[str, Any]]) -> tuple[list[Chart], list[Chart]]:
    """The main charts and the remaining ones of metric rows (ascending by step)."""
    claimed: dict[str, list[str]] = {}
    rest: dict[str, list[str]] = {}
    for key in metric_keys(rows):
        family = next((f for f in FAMILIES if re.fullmatch(f.pattern, key)), None)
        if family:
            claimed.setdefault(family.id, []).append(key)
        else:
            rest.setdefault(key.split("/")[0], []).append(key)
    by_id = {family.id: family for family in FAMILIES}
    main = [
        c
        for name in ORDER
        if name in claimed
        for c in _family_charts(rows, by_id[name], claimed[name])
    ]
    more = []
    for group, keys in rest.items():
        evaluation = group == "eval"
        unit = _REST_UNIT.get(group, "")
        family = Family(
            f"more-{len(more)}", group, unit, "", True, fraction=evaluation, smooth=not evaluation
        )
        more += _family_charts(rows, family, keys)
    return main, more


def metric_keys(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names of all metrics, in order of appearance; step and time are the axes and no metrics.

    A metric is what has a number somewhere, or is named as not finite.
    """
    keys = dict.fromkeys(
        key
        for row in rows
        for key, value in row.items()
        if number(value) is not None or key in row.get(NONFINITE, ())
    )
    return [key for key in keys if key not in ("step", "time")]


def _family_charts(rows: Sequence[dict[str, Any]], family: Family, keys: list[str]) -> list[Chart]:
    lines = [_line(rows, key, i) for i, key in enumerate(keys)]
    clusters = _by_magnitude(lines, family.fraction) if family.split else [lines]
    parts = [c[i : i + LINES] for c in clusters for i in range(0, len(c), LINES)]
    drawn = []
    for i, part in enumerate(parts):
        title = family.title
        if len(parts) > 1 or family.id.startswith("more-"):
            title += ": " + ", ".join(line.label for line in part)
        if len(part) == 1 and part[0].label.lower() == family.title.lower():
            title = family.title
        flags = {"log": family.log, "fraction": family.fraction, "smooth": family.smooth}
        drawn.append(draw(f"{family.id}-{i}", title, family.unit, part, **flags))
    return drawn


def _line(rows: Sequence[dict[str, Any]], key: str, index: int) -> Line:
    label = key.split("/", 1)[-1].removeprefix("found_")
    bare = label.lower()
    style = f"tone-{_SECTION[bare]}" if bare in _SECTION else f"tone-{index % LINES}"
    if bare in _PENALTIES and not key.startswith("scope/"):
        style += " dashed"
    points = [(row["step"], number(row.get(key))) for row in rows if key in row]
    return Line(key, label, style, tuple(p[0] for p in points), tuple(p[1] for p in points))


def _by_magnitude(lines: list[Line], fraction: bool) -> list[list[Line]]:
    """Lines whose largest values lie within a factor of ten share a chart; order of appearance is kept.

    With `fraction`, lines that stay between 0 and 1 belong together however small they are.
    """
    clusters: list[tuple[float, list[Line]]] = []
    for line in lines:
        known = [v for v in line.values if finite(v) is not None]
        size = max((abs(v) for v in known), default=0.0)
        if fraction and all(0 <= v <= 1 for v in known):
            size = 1.0
        for reference, members in clusters:
            if (size == 0 and reference == 0) or (
                min(size, reference) > 0 and max(size, reference) <= 10 * min(size, reference)
            ):
                members.append(line)
                break
        else:
            clusters.append((size, [line]))
    return [members for _, members in clusters]
