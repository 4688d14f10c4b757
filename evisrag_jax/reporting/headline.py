"""The head of the report: what ran, with what, and the few numbers one looks for first."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from evisrag_jax.reporting.display import finite, mapping, number, text, texts
from evisrag_jax.reporting.folder import RunFolder

# Rows of the headline table: label, names a summary may use for it, shown even where it is missing.
HEADLINE = (
    ("Accuracy", ("accuracy", "acc", "global_acc"), True),
    ("Exact match", ("em", "exact_match", "global_em"), False),
    ("Token F1", ("f1", "token_f1", "global_f1"), False),
    ("Evidence", ("evidence", "evidence_f1", "perception"), True),
    ("Format", ("format", "format_rate", "format_valid"), True),
)
_STEPS = ("steps", "step", "num_steps")
_COMPILES = ("compiles", "compile_count", "compile/count")
_DURATION = ("duration", "duration_s", "seconds", "wall_seconds", "time")
_QUESTIONS = ("n", "questions", "count", "n_expected", "cnt_global")
_DATES = ("date", "started", "start_time", "created", "finished", "timestamp")
_MAIN_VERSIONS = ("evisrag_jax", "git", "commit", "python", "jax", "backend", "device", "devices")


@dataclass(frozen=True)
class Estimate:
    """A metric's value with its 95 % interval; low and high are None where none was computed."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class HeadlineRow:
    """A metric before and after the run; `change` is None unless both are there."""

    label: str
    before: Estimate | None
    after: Estimate | None
    change: float | None


@dataclass(frozen=True)
class Headline:
    """Everything above the first chart, already chosen but not yet formatted."""

    name: str
    command: str
    digest: str
    date: str
    date_source: str
    duration: float | None
    steps: float | None
    compiles: float | None
    questions: float | None
    rejected: int
    versions: list[tuple[str, str]]
    rows: list[HeadlineRow]
    mode: str
    source: str
    others: list[tuple[str, float | None, float | None]]


def headline(run: RunFolder) -> Headline:
    """The head of a run. What the summary does not say is taken from metrics.jsonl, and `source` says so."""
    summary = run.summary or {}
    before, after, source = _evaluations(run)
    rows = []
    for label, names, always in HEADLINE:
        first, last = _estimate(before, names), _estimate(after, names)
        if always or first or last:
            change = last.value - first.value if first and last else None
            rows.append(HeadlineRow(label, first, last, change))
    shown = {name for _, names, _ in HEADLINE for name in names}
    flat_before, flat_after = _flat(before), _flat(after)
    others = [
        (name, flat_before.get(name), flat_after.get(name))
        for name in dict.fromkeys([*flat_before, *flat_after])
        if name not in shown
    ]
    date, date_source = _date(run)
    final = run.metrics[-1] if run.metrics else {}
    return Headline(
        name=run.name,
        command=_command(run),
        digest=config_digest(run.config),
        date=date,
        date_source=date_source,
        duration=_first(summary, _DURATION, final.get("time")),
        steps=_first(summary, _STEPS, final.get("step")),
        compiles=_first(summary, _COMPILES, _last(run, "compile/count")),
        questions=_first(after, _QUESTIONS, _first(summary, _QUESTIONS, None)),
        rejected=len(run.rejected),
        versions=_versions(run),
        rows=rows,
        mode=text(after.get("mode") or before.get("mode") or summary.get("mode")),
        source=source,
        others=others,
    )


def config_digest(config: dict[str, Any] | None) -> str:
    """First 12 hex digits of the SHA-256 of the config as canonical JSON (sorted keys, no blanks); "" without."""
    if config is None:
        return ""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:12]


def interval(metrics: dict[str, Any], name: str) -> tuple[float | None, float | None]:
    """The 95 % interval of a metric from the `ci` dict beside it, as [low, high] or {"low", "high"}."""
    ends = mapping(metrics.get("ci")).get(name)
    if isinstance(ends, dict):
        ends = [ends.get("low"), ends.get("high")]
    if isinstance(ends, (list, tuple)) and len(ends) == 2:
        low, high = finite(ends[0]), finite(ends[1])
        if low is not None and high is not None:
            return low, high
    return None, None


def _evaluations(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any], str]:
    summary = run.summary or {}
    before, after = mapping(summary.get("eval_before")), mapping(summary.get("eval_after"))
    if before or after:
        return before, after, ""
    names = [name for _, aliases, _ in HEADLINE for name in aliases]
    if any(finite(summary.get(name)) is not None for name in names):
        facts = {*_STEPS, *_COMPILES, *_DURATION}
        return {}, {name: value for name, value in summary.items() if name not in facts}, ""
    points = [
        {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
        | {"at": row["step"]}
        for row in run.metrics
        if any(key.startswith("eval/") for key in row)
    ]
    if not points:
        return {}, {}, ""
    first, last = points[0], points[-1]
    source = f"From the evaluations in metrics.jsonl at step {last['at']}"
    if len(points) > 1:
        source = f"From the evaluations in metrics.jsonl at steps {first['at']} and {last['at']}"
    for point in points:
        del point["at"]
    return (first if len(points) > 1 else {}), last, source + "; no intervals there."


def _estimate(metrics: dict[str, Any], names: tuple[str, ...]) -> Estimate | None:
    for name in names:
        value = finite(metrics.get(name))
        if value is not None:
            return Estimate(value, *interval(metrics, name))
    return None


def _flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    out: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            if name != "ci":
                out |= _flat(value, f"{prefix}{name}/")
        elif (x := number(value)) is not None:
            out[prefix + name] = x
    return out


def _first(source: dict[str, Any], names: tuple[str, ...], default: Any) -> float | None:
    for name in names:
        if (value := finite(source.get(name))) is not None:
            return value
    return finite(default)


def _last(run: RunFolder, key: str) -> float | None:
    return next(
        (x for row in reversed(run.metrics) if (x := finite(row.get(key))) is not None), None
    )


def _command(run: RunFolder) -> str:
    for source in (run.summary, run.versions, run.config):
        for key in ("command", "argv"):
            value = (source or {}).get(key)
            if isinstance(value, str) and value:
                return value
            if isinstance(value, list) and value:
                return shlex.join(text(part) for part in value)
    return ""


def _date(run: RunFolder) -> tuple[str, str]:
    for source in (run.summary, run.versions, run.config):
        for key in _DATES:
            value = (source or {}).get(key)
            if isinstance(value, str) and value:
                return value, key
            seconds = finite(value)  # since 1970
            if seconds is not None and 1e9 < seconds < 1e11:
                return _utc(seconds), key
    files = [run.path / name for name in run.present if name != "rollouts"]
    written = [file.stat().st_mtime for file in files if file.is_file()]
    return (_utc(max(written)), "last file written") if written else ("", "")


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _versions(run: RunFolder) -> list[tuple[str, str]]:
    versions = run.versions or {}
    packages = mapping(versions.get("packages"))
    named = [(name, versions.get(name, packages.get(name))) for name in _MAIN_VERSIONS]
    return [(name, ", ".join(texts(value))) for name, value in named if value is not None]
