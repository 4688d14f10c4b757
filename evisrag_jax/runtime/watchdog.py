"""A job that stands still ends: a thread that watches how long the last sign of life is ago.

    main thread   beat("step 7: rollout") … beat("step 7: update") …      (a collective waits for a peer)
    watchdog      |----- seconds since the last beat -----| > limit ─► says where everybody was, exit 75

A process that waits in a collective cannot raise, so the watchdog ends it. Every process watches itself;
the peers' last beats are in the message, and the one that lags is the one that is stuck.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from evisrag_jax.runtime import processes

EXIT_STUCK = 75  # "temporary failure": the job may be started again

_running: Watchdog | None = None


class Watchdog:
    """Ends the process when `beat` has not been called for `seconds`.

    Args:
        seconds: the limit; longer than any step, compiles included.
        end: called with the message; by default it prints it and exits with EXIT_STUCK at once.
    """

    def __init__(self, seconds: float | int, end: Callable[[str], None] | None = None):
        self.seconds = seconds
        self._end = end or _exit
        self._last = ("start", time.monotonic())
        self._published = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, place: str) -> None:
        """A sign of life: what begins now."""
        self._last = (place, time.monotonic())

    def close(self) -> None:
        """Stops watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 4)):
            place, at = self._last
            if time.monotonic() - at > self.seconds:
                self._end(self._message(place))
                return
            if place != self._published:  # here, so that a slow coordinator costs no step
                self._published = place
                with contextlib.suppress(Exception):
                    processes.publish(_key(jax.process_index()), place)

    def _message(self, place: str) -> str:
        lines = [
            f"process {jax.process_index()} of {jax.process_count()}: no progress for "
            f"{self.seconds:g} s after {place!r}; the job ends here and can go on from its last "
            "checkpoint"
        ]
        for i in range(jax.process_count()):
            if i != jax.process_index():
                lines.append(f"  process {i} was last at {processes.published(_key(i)) or '?'!r}")
        return "\n".join(lines)


def _key(process: int) -> str:
    return f"beat/{process}"


def _exit(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_STUCK)


@contextlib.contextmanager
def watching(seconds: float | int) -> Iterator[None]:
    """A watchdog for the block, fed by `beat`; 0 seconds: none."""
    global _running
    if not seconds:
        yield
        return
    _running = Watchdog(seconds)
    try:
        yield
    finally:
        _running.close()
        _running = None


def beat(place: str) -> None:
    """Feeds the running watchdog, if there is one."""
    if _running is not None:
        _running.beat(place)
