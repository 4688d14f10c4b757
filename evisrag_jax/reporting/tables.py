"""Raw values as tables: the metric log by group, configuration and summary as name–value pairs, rejected records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evisrag_jax.reporting.curves import metric_keys
from evisrag_jax.reporting.display import number, plural, text
from evisrag_jax.reporting.folder import NONFINITE

MAX_ROWS = 200
_ORDINAL = {2: "nd", 3: "rd"}


@dataclass(frozen=True)
class Table:
    """A plain table; `note` says what was left out ("" for nothing)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def metric_tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """The metric log, a table a group of metrics: at most `MAX_ROWS` evenly spaced rows, the last among them."""
    groups: dict[str, list[str]] = {}
    for key in metric_keys(rows):
        groups.setdefault(key.split("/")[0], []).append(key)
    tables = []
    for group, keys in groups.items():
        filled = [row for row in rows if any(key in row for key in keys)]
        every = math.ceil(len(filled) / MAX_ROWS)
        kept = filled[::-1][::every][::-1]
        body = tuple((str(row["step"]), *(_logged(row, key) for key in keys)) for row in kept)
        note = (
            ""
            if every == 1
            else f"{len(kept)} of {len(filled)} rows: every {every}{_ORDINAL.get(every, 'th')} step."
        )
        title = f"{group} ({plural(len(keys), 'column')}, {plural(len(kept), 'row')})"
        tables.append(Table(title, ("step", *(key.split("/", 1)[-1] for key in keys)), body, note))
    return tables


def _logged(row: dict[str, Any], key: str) -> str:
    return "not finite" if key in row.get(NONFINITE, ()) else exact(row.get(key))


def exact(value: Any) -> str:
    """A raw value with six significant digits; nothing where there is none."""
    x = number(value)
    return "" if x is None else f"{x:.6g}"


def pairs(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested JSON object as dotted names and values, in the file's order."""
    out: list[tuple[str, str]] = []
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            out += pairs(inner, f"{prefix}{name}.")
        elif isinstance(inner, float):
            out.append((prefix + name, exact(inner)))
        elif isinstance(inner, (list, tuple)):
            out.append((prefix + name, ", ".join(text(item) for item in inner)))
        else:
            out.append((prefix + name, "none" if inner is None else text(inner)))
    return out


def rejected_table(rows: Sequence[dict[str, Any]], limit: int = 50) -> Table | None:
    """The first `limit` rejected records with their own fields as columns, or None without any."""
    if not rows:
        return None
    columns = tuple(dict.fromkeys(key for row in rows[:limit] for key in row))[:6]
    body = tuple(tuple(text(row.get(key))[:300] for key in columns) for row in rows[:limit])
    note = "" if len(rows) <= limit else f"The first {limit} of {len(rows)}."
    return Table(plural(len(rows), "rejected record"), columns, body, note)
