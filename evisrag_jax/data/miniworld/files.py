"""Writes mini-world questions as PNG pages and a JSONL file of records (schema version 1)."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from evisrag_jax.data.miniworld.episodes import Episode, episode

SCHEMA_VERSION = 1


def record_row(ep: Episode, name: str, images: list[str]) -> dict:
    """JSON row of an episode; `images` are the page files relative to the JSONL file, in prompt
    order.

    `boxes` has for each image a list of [x, y, w, h] (pixels of the page). The extra key `novelty`
    says what is new.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "id": name,
        "question": ep.question,
        "images": images,
        "answers": list(ep.answers),
        "is_sufficient": ep.is_sufficient,
        "evidence": list(ep.evidence),
        "response": ep.response,
        "boxes": list(ep.boxes),
        "family": ep.kind,
        "novelty": ep.novelty,
    }


def write_dataset(
    folder: str | Path, n: int, split: str, seed: int = 0, *, start: int = 0, **options
) -> Path:
    """Writes questions start .. start + n - 1 of `split` to `folder` and returns the path of
    `<split>.jsonl`.

    Pages are `pages/<split>-<index>-<k>.png`. `options` go to make_episode. Several splits may
    share one folder; equal arguments write equal bytes.
    """
    folder = Path(folder)
    pages = folder / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for index in range(start, start + n):
            ep = episode(seed, split, index, **options)
            names = []
            for k, pixels in enumerate(ep.images):
                file = pages / f"{split}-{index:06d}-{k}.png"
                Image.fromarray(pixels).save(file, compress_level=1)
                names.append(f"pages/{file.name}")
            row = record_row(ep, f"{split}-{seed}-{index:06d}", names)
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path
