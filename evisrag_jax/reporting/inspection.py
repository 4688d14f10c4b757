"""The sheet for inspecting a constructed set by hand: pages, the four sections, and boxes to tick.

One HTML file that needs nothing else. Ticks and remarks are kept in the browser as they are made, and can be
saved to a file and read back from one.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from evisrag_jax.reporting.display import plural, text, texts
from evisrag_jax.reporting.images import ImageStore
from evisrag_jax.reporting.response import Block, response_blocks
from evisrag_jax.reporting.viewer import PageView, page_views
from evisrag_jax.runtime.json_files import read_json, read_jsonl

#: What an inspector says yes to: the name in the saved file, and the question.
CHECKS = (
    ("observe", "The pages are described as they are"),
    ("evidence", "Every evidence line stands on its page, and none is missing"),
    ("think", "The reasoning follows from the evidence alone"),
    ("answer", "The answer is right, or rightly refused"),
)


@dataclass(frozen=True)
class Item:
    """One response on the sheet; `sufficient` is whether its pages suffice."""

    id: str
    set: str
    question: str
    answers: tuple[str, ...]
    sufficient: bool
    pages: tuple[PageView, ...]
    blocks: tuple[Block, ...]


def write_inspection(run_folder: str | os.PathLike[str], *, total_bytes: int = 40_000_000) -> Path:
    """Write `inspection.html` from the `inspection.jsonl` of a construction and return its path.

    Args:
        run_folder: the run's folder; the images of its rows are relative to it.
        total_bytes: most bytes of all embedded pictures; what is left out is said on the page.

    Raises FileNotFoundError where there is no inspection.jsonl.
    """
    folder = Path(run_folder)
    source = folder / "inspection.jsonl"
    if not source.is_file():
        raise FileNotFoundError(2, "no rows to inspect", str(source))
    images = ImageStore(folder, side=1100, image_bytes=160_000, total_bytes=total_bytes)
    items = [_item(row, images) for row in read_jsonl(source)]
    report = folder / "report.json"
    target = folder / "inspection.html"
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    html = _render(folder.name, items, images, read_json(report) if report.is_file() else {})
    part.write_bytes(html.encode("utf-8", errors="replace"))
    part.replace(target)
    return target


def _item(row: dict[str, Any], images: ImageStore) -> Item:
    relevant = row.get("relevant") or []
    blocks = tuple(response_blocks(text(row.get("response"))))
    lines = {
        record.page: record.text for block in blocks for record in block.records if record.page
    }
    shown = {**row, "evidence": [None] * len(texts(row.get("images")))}
    for i, is_relevant in enumerate(relevant[: len(shown["evidence"])]):
        if is_relevant:
            shown["evidence"][i] = lines.get(str(i + 1)) or "relevant"
    return Item(
        id=text(row.get("id")),
        set=text(row.get("set")),
        question=text(row.get("question")),
        answers=tuple(texts(row.get("answers"))),
        sufficient=row.get("is_sufficient") is True,
        pages=page_views(shown, images),
        blocks=blocks,
    )


def _render(name: str, items: list[Item], images: ImageStore, report: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evisrag_jax.reporting", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = environment.loader.get_source
    style, script = (source(environment, file)[0] for file in ("report.css", "inspection.js"))
    kinds = Counter(item.sufficient for item in items)
    key = hashlib.sha256("\n".join(item.id for item in items).encode()).hexdigest()[:16]
    notes = []
    if images.missing or images.left_out:
        notes.append(
            f"{plural(images.missing + images.left_out, 'page image')} could not be read or embedded."
        )
    return environment.get_template("inspection.html.jinja").render(
        name=name,
        key=key,
        items=items,
        checks=CHECKS,
        counts=(kinds[True], kinds[False]),
        dropped=[
            (stage, reason, count)
            for stage, reasons in (report.get("dropped") or {}).items()
            for reason, count in reasons.items()
        ],
        sets=report.get("sets") or {},
        notes=notes,
        images=images,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
