"""The report of a run folder: one HTML file that needs nothing else, neither a network nor its own folder."""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from evisrag_jax.reporting import display
from evisrag_jax.reporting.curves import charts
from evisrag_jax.reporting.folder import RunFolder, read_folder
from evisrag_jax.reporting.headline import headline
from evisrag_jax.reporting.images import ImageStore
from evisrag_jax.reporting.predictions import predictions_viewer
from evisrag_jax.reporting.tables import metric_tables, pairs, rejected_table
from evisrag_jax.reporting.timing import time_chart
from evisrag_jax.reporting.viewer import rollout_viewer

# HTML allows no control characters but tab, line feed and carriage return; a model may still sample some.
_CONTROLS = dict.fromkeys(
    (*range(9), 11, 12, *range(14, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}"
)
_FILTERS = {
    "number": display.format_number,
    "signed": display.format_signed,
    "share": display.format_share,
    "seconds": display.format_seconds,
    "bytes": display.format_bytes,
}


@dataclass(frozen=True)
class Limits:
    """How much a report embeds; what is left out is said on the page.

    Attributes:
        steps: rollout steps, spread over the run.
        groups: questions of each of these steps.
        predictions: rows of predictions.jsonl.
        image_side: longest side of a picture, pixels.
        image_bytes, total_bytes: encoded bytes of one picture and of all.
    """

    steps: int = 6
    groups: int = 4
    predictions: int = 60
    image_side: int = 960
    image_bytes: int = 120_000
    total_bytes: int = 12_000_000

    def __post_init__(self) -> None:
        for name in ("steps", "groups", "predictions", "total_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"Limits.{name} must not be negative, got {getattr(self, name)}")
        for name in ("image_side", "image_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"Limits.{name} must be positive, got {getattr(self, name)}")


def write_report(run_folder: str | os.PathLike[str], *, limits: Limits | None = None) -> Path:
    """Write `report.html` into a run folder and return its path.

    Works with whatever the folder holds: an evaluation, a fine-tuning or a reinforcement-learning
    run, one that is still going on, or nothing at all. Broken lines and unreadable pictures are noted
    on the page. The file is replaced in one step, so a reader never sees half of it.

    Raises FileNotFoundError where the folder does not exist.
    """
    run = read_folder(Path(run_folder))
    html = render(run, limits or Limits())
    target = run.path / "report.html"
    part = target.with_name(f".report.{os.getpid()}.part")
    part.write_bytes(html.encode("utf-8", errors="replace"))
    part.replace(target)
    return target


def render(run: RunFolder, limits: Limits) -> str:
    """The report of an already read folder as HTML text. Adds to the run's notes what it had to leave out."""
    images = ImageStore(
        run.path,
        side=limits.image_side,
        image_bytes=limits.image_bytes,
        total_bytes=limits.total_bytes,
    )
    main, more = charts(run.metrics)
    rollouts = rollout_viewer(run, images, steps=limits.steps, groups=limits.groups)
    predictions = predictions_viewer(run.predictions, images, limit=limits.predictions)
    time = time_chart(run.timeline)
    notes = [*run.notes, *_image_notes(images)]
    if time and time.broken:
        notes.append(
            f"timeline.jsonl: left out {display.plural(time.broken, 'row')} without a valid start and end."
        )
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evisrag_jax.reporting", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    source = environment.loader.get_source
    style, script = (source(environment, name)[0] for name in ("report.css", "report.js"))
    html = environment.get_template("report.html.jinja").render(
        run=run,
        head=headline(run),
        charts=main,
        more_charts=more,
        metric_tables=metric_tables(run.metrics),
        time=time,
        rollouts=rollouts,
        predictions=predictions,
        rejected=rejected_table(run.rejected),
        files=[(n, pairs(v)) for n, v in _objects(run) if v is not None],
        notes=notes,
        alarms=[
            (
                display.text(row.get("step")),
                display.text(row.get("name")),
                display.text(row.get("message")),
            )
            for row in run.alarms
        ],
        absent=_absent(run),
        images=images,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return html.translate(_CONTROLS)


def _objects(run: RunFolder) -> list[tuple[str, dict | None]]:
    return [
        ("config.json", run.config),
        ("versions.json", run.versions),
        ("summary.json", run.summary),
    ]


def _absent(run: RunFolder) -> list[str]:
    expected = (
        "summary.json",
        "config.json",
        "versions.json",
        "metrics.jsonl",
        "timeline.jsonl",
        "rollouts",
        "predictions.jsonl",
    )
    return [name for name in expected if name not in run.present]


def _image_notes(images: ImageStore) -> list[str]:
    notes = []
    if images.missing:
        notes.append(f"{display.plural(images.missing, 'page image')} could not be read.")
    if images.left_out:
        limit = display.format_bytes(images.total_bytes)
        notes.append(
            f"{display.plural(images.left_out, 'page image')} left out: images are limited to {limit}."
        )
    return notes
