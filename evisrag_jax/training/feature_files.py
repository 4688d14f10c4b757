"""Features on disk: one file a page, which other runs with the same tower read.

    {"format": 1, "key": …, "dtype": "bfloat16", "shape": [M, D], "crc32": …}\\n  then the array's bytes

A file appears whole or not at all. One that is cut, damaged or another's is reported in a line and
computed again. The folder grows with the images and may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

FORMAT = 1

log = logging.getLogger(__name__)


class FeatureFiles:
    """The files of a folder, which is made if it is not there (OSError where that fails)."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writes = True

    def path(self, key: str) -> Path:
        """Where the features of a key stand."""
        return self.folder / f"{key}.features"

    def read(
        self, key: str, shape: tuple[int, int], dtype: np.dtype
    ) -> Float[np.ndarray, "M D"] | None:
        """The features of a key, read-only; None where there are none to be used."""
        path = self.path(key)
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            facts = json.loads(head)
            if facts.pop("crc32") != zlib.crc32(body) or facts != _facts(key, shape, dtype):
                raise ValueError("its content is not what its name says")
            return np.frombuffer(body, dtype).reshape(shape)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, AttributeError) as error:
            log.warning("feature cache: %s is of no use (%s); computed again", path, error)
            return None

    def write(self, key: str, features: Float[np.ndarray, "M D"]) -> None:
        """Keep features; the first failure (a full disk, say) is reported and ends writing."""
        if not self._writes:
            return
        path, body = self.path(key), features.tobytes()
        facts = _facts(key, features.shape, features.dtype) | {"crc32": zlib.crc32(body)}
        part = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            part.write_bytes(json.dumps(facts).encode() + b"\n" + body)
            part.replace(path)
        except OSError as error:
            self._writes = False
            log.warning("feature cache: nothing more is kept in %s (%s)", self.folder, error)
            part.unlink(missing_ok=True)


def _facts(key: str, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    return {"format": FORMAT, "key": key, "dtype": np.dtype(dtype).name, "shape": list(shape)}
