"""XLA's persistent compile cache, on by default, and a count of what was compiled.

The cache makes a second run of the same shapes start at once. The count makes a compile storm
(one program an image size) visible as a metric.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import jax

ENV = "EVISRAG_COMPILE_CACHE"
LIMIT_BYTES = 4 * 2**30
_OFF = ("0", "off", "no", "false")
_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"

log = logging.getLogger(__name__)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where compiled programs are kept; None when switched off.

    EVISRAG_COMPILE_CACHE (a folder, or "off") first, then JAX_COMPILATION_CACHE_DIR, then
    ``$XDG_CACHE_HOME/evisrag_jax/xla`` (``~/.cache`` without XDG_CACHE_HOME).
    """
    word = environ.get(ENV, "")
    if word.lower() in _OFF:
        return None
    if word:
        return Path(word).expanduser()
    if environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(environ["JAX_COMPILATION_CACHE_DIR"])
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "evisrag_jax" / "xla"


def enable_compile_cache(limit_bytes: int = LIMIT_BYTES) -> Path | None:
    """Switch the persistent cache on, for programs of any size; returns its folder.

    A folder that cannot be written switches it off with a warning. A broken entry is compiled anew
    with jax's own warning. When the folder has outgrown ``limit_bytes``, its oldest entries go.
    """
    folder = cache_folder()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"{folder} is not writable")
            _drop_oldest(folder, limit_bytes)
        except OSError as error:
            log.warning("compile cache is off: %s (set %s to another folder)", error, ENV)
            folder = None
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


def _drop_oldest(folder: Path, limit_bytes: int) -> None:
    entries = []
    for path in folder.glob("*-cache"):
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process drops too
            continue
        entries.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size


class _Totals:
    """Events of this process since the listeners were registered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.registered = False
        self.count = 0
        self.cached = 0
        self.seconds = 0.0
        self.names: collections.Counter[str] = collections.Counter()

    def register(self) -> None:
        with self.lock:
            if self.registered:
                return
            jax.monitoring.register_event_duration_secs_listener(self.on_duration)
            jax.monitoring.register_event_listener(self.on_event)
            self.registered = True

    def on_duration(self, event: str, seconds: float, **facts: str | int | float) -> None:
        if event == _COMPILE:
            with self.lock:
                self.count += 1
                self.seconds += seconds
                self.names[str(facts.get("fun_name", "?"))] += 1

    def on_event(self, event: str, **facts: str | int | float) -> None:
        if event == _HIT:
            with self.lock:
                self.cached += 1


_TOTALS = _Totals()


class CompileCounter:
    """Programs made ready since this counter was created, in the whole process.

    A program is counted whether it was compiled or loaded from the persistent cache, so the count
    does not depend on what an earlier run left behind: a second epoch of the same shapes adds 0.
    """

    def __init__(self) -> None:
        _TOTALS.register()
        with _TOTALS.lock:
            self._count, self._cached = _TOTALS.count, _TOTALS.cached
            self._seconds, self._names = _TOTALS.seconds, _TOTALS.names.copy()

    @property
    def count(self) -> int:
        """Programs made ready."""
        return _TOTALS.count - self._count

    @property
    def cached(self) -> int:
        """How many of them came from the persistent cache."""
        return _TOTALS.cached - self._cached

    @property
    def seconds(self) -> float:
        """Seconds spent compiling or loading them."""
        return _TOTALS.seconds - self._seconds

    def names(self) -> dict[str, int]:
        """How often each function was made ready, e.g. ``{"jit(update)": 1}``."""
        with _TOTALS.lock:
            return dict(_TOTALS.names - self._names)

    def metrics(self) -> dict[str, float]:
        """compile/count, compile/cached and compile/seconds, as metrics."""
        return {
            "compile/count": float(self.count),
            "compile/cached": float(self.cached),
            "compile/seconds": round(self.seconds, 3),
        }
