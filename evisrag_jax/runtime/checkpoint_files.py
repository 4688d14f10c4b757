"""The files of a checkpoint: listed with their sizes when it is committed, compared before it is read.

<step>/_SIZES.json            {"params/d/…": bytes, ...}, written before the folder gets its name
<step>/_CHECKPOINT_METADATA   Orbax's own mark that the step was committed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import orbax.checkpoint as ocp

from evisrag_jax.runtime.json_files import write_json

_COMMITTED = "_CHECKPOINT_METADATA"  # written last, so not among the sizes
_SIZES = "_SIZES.json"


def _files(folder: Path) -> dict[str, int]:
    """Relative path and size of every file of a step but those written at its commit."""
    sizes = {}
    for inside, _, names in os.walk(folder):
        for name in names:
            path = Path(inside, name)
            with contextlib.suppress(FileNotFoundError):  # an old step is being deleted meanwhile
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return {name: sizes[name] for name in sorted(sizes) if name not in (_COMMITTED, _SIZES)}


class Listed(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The folder that a step is written in, which lists its files before it gets its name."""

    async def finalize(self) -> None:
        folder = Path(self.get())
        sizes = await asyncio.to_thread(_files, folder)
        await asyncio.to_thread(write_json, folder / _SIZES, sizes)
        await super().finalize()


def damage(folder: Path) -> str | None:
    """What is wrong with a step's folder, in words; None when it is whole.

    Sizes are compared, not contents: a check costs no reading. What was changed without changing
    its size, the read itself notices or not.
    """
    try:
        facts = json.loads((folder / _COMMITTED).read_text(encoding="utf-8"))
        if not facts["commit_timestamp_nsecs"]:
            return "it was never committed"
        sizes = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return "it was never committed"
    there = _files(folder)
    for name, size in sizes.items():
        if there.get(name) != size:
            found = f"has {there[name]} bytes" if name in there else "is missing"
            return f"{folder / name} {found}, it was written with {size}"
    return None
