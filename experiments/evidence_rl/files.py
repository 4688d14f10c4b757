"""Writes questions on scenes and pages as PNG pictures and a JSONL file of records."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from evisrag_jax.data.miniworld.world import stream
from evisrag_jax.data.schema import Record, write_records
from experiments.evidence_rl.questions import Question, question, respond, text_question

TASK = 14  # of the random streams: which evidence a written response names


def record(asked: Question, name: str, image: Path | None, response: str) -> Record:
    """The record of a question whose picture is stored at `image`. Its evidence line names every piece
    of evidence, its response one."""
    pictured = asked.image is not None
    return Record(
        id=name,
        question=asked.text,
        images=(str(image),) if pictured else (),
        answers=(asked.answer,),
        is_sufficient=True,
        evidence=(" , ".join(asked.cues),) if pictured else (),
        response=response,
        boxes=(tuple(tuple(float(v) for v in box) for box in asked.boxes),) if pictured else None,
        family=asked.family,
        source=asked.source,
    )


def write_dataset(
    folder: str | Path,
    n: int,
    split: str,
    seed: int = 0,
    *,
    start: int = 0,
    family: str | None = None,
    source: str | None = None,
) -> Path:
    """Writes questions start .. start + n - 1 of `split` to `folder`, returns the path of
    `<split>.jsonl`.

    Pictures are `pictures/<split>-<index>.png`. Every record has boxes, `family` and `source`, and as
    `response` a grounded one. Equal arguments write equal bytes.
    """
    folder = Path(folder).absolute()
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(start, start + n):
        asked = question(seed, split, index, family, source)
        file = pictures / f"{split}-{index:06d}.png"
        Image.fromarray(asked.image).save(file, compress_level=1)
        response = respond(asked, False, stream(seed, "train", index, task=TASK))
        records.append(record(asked, f"{split}-{seed}-{index:06d}", file, response))
    path = folder / f"{split}.jsonl"
    write_records(path, records)
    return path


def write_text_dataset(folder: str | Path, n: int, seed: int = 0, *, start: int = 0) -> Path:
    """Writes comparisons start .. start + n - 1 of `text_question`, without pictures, to `text.jsonl`
    in `folder`; returns its path."""
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    asked = [text_question(seed, index) for index in range(start, start + n)]
    path = folder / "text.jsonl"
    rows = zip(range(start, start + n), asked, strict=True)
    write_records(path, [record(q, f"text-{seed}-{i:06d}", None, q.response) for i, q in rows])
    return path
