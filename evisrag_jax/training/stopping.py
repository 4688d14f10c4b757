"""Asking a run to stop: Ctrl-C, and the signals by which a cluster takes its machine back.

    SIGINT            the running step ends and is saved; a second one stops at once
    SIGTERM, SIGUSR1  the same, within a bound: SLURM sends one of them before its SIGKILL

A step cannot be broken off from outside, so a run that is not saved when the bound is over ends its
process with exit code 1; its last checkpoint is whole then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from evisrag_jax.runtime import processes

REASONS = (None, "interrupted", "preempted")
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(Exception):
    """The run was asked to make room, and has been saved; no failure."""

    exit_code = 0


@contextlib.contextmanager
def preemption_ends_this() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise Preempted in the block: for what needs no saving, around the steps."""

    def handle(number: int, frame: Any) -> None:
        raise Preempted("preempted outside the steps; run the same command to go on")

    with _handlers(dict.fromkeys(PREEMPTION, handle)):
        yield


@contextlib.contextmanager
def _handlers(handlers: dict[int, Any]) -> Iterator[None]:
    """Signal handlers during the block; in another thread than the main one, none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handlers[number]) for number in handlers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Stopping:
    """Whether the run shall stop, and why; `with` it, in the main thread, signals are heard.

    Args:
        seconds: what may pass between SIGTERM or SIGUSR1 and the end of the block.
    """

    def __init__(self, seconds: float):
        if seconds <= 0:
            raise ValueError(f"preempt_seconds={seconds} must be positive")
        self.seconds = seconds
        self.reason: str | None = None
        self._step = 0
        self._handlers: Any = None
        self._timer: threading.Timer | None = None

    def at(self, step: int) -> bool:
        """Whether to stop after `step`; with several processes, whether any of them was asked to."""
        self._step = step
        if jax.process_count() > 1:
            told = processes.gather(np.int32(REASONS.index(self.reason)))
            self.reason = REASONS[int(told.max())]
        return self.reason is not None

    def interrupt(self) -> None:
        """Note an interrupt that came as an exception."""
        self.reason = self.reason or "interrupted"

    def __enter__(self) -> Stopping:
        asked = dict.fromkeys(PREEMPTION, self._on_preemption)
        self._handlers = _handlers({signal.SIGINT: self._on_interrupt, **asked})
        self._handlers.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._handlers.__exit__(*exc)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = "interrupted"

    def _on_preemption(self, number: int, frame: Any) -> None:
        if self._timer is None:
            self.reason = "preempted"
            self._timer = threading.Timer(self.seconds, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self) -> None:
        print(
            f"preempted, but step {self._step + 1} and its save took more than "
            f"{self.seconds:g} s (preempt_seconds); the last checkpoint is whole",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
