"""Asking a run to stop: Ctrl-C, and the signals by which a cluster takes its machine back.

    SIGINT            the running step ends and is saved; a second one stops at once
    SIGTERM, SIGUSR1  the same, within a bound: SLURM sends one of them before its SIGKILL

A step cannot be broken off from outside, so a run that is not saved when the bound is over ends its
process with exit code 1; its last checkpoint is whole then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import jax
import numpy as np

from evisrag_jax.runtime import processes

REASONS = (None, "interrupted", "preempted")
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(Exception):
    """The run was asked to make room, and has been saved; no failure."""

    exit_code = 0


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
        self._previous: dict[int, Any] = {}
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
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGINT: self._on_interrupt}
            handlers |= dict.fromkeys(PREEMPTION, self._on_preemption)
            for number, handler in handlers.items():
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, handler)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

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
