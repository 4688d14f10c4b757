"""The machine of a measurement: how many threads, which versions, and how much memory a run takes."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PEERS = ("torch", "transformers", "trl", "accelerate")
MIB = 2**20


def use_threads(count: int) -> list[int]:
    """Keeps this process, and so both sides, on `count` of its CPUs; returns them.

    To be called before jax's backend starts: XLA has as many threads as it finds CPUs. Where the
    system has no affinity (macOS) nothing is limited and the list is empty; torch's own limit is set
    in `peer`. 0 leaves everything as it is.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    if count:
        os.sched_setaffinity(0, allowed[:count])
    return sorted(os.sched_getaffinity(0))


def facts(threads: int, dtype: str, **more: Any) -> dict[str, Any]:
    """Versions, devices, threads and dtype: what a figure depends on beside its shape."""
    import jax

    from evisrag_jax.runtime.run_folder import versions

    peers = {}
    for name in PEERS:
        try:
            peers[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            peers[name] = None
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return versions(
        devices=[f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        processor=_processor(),
        affinity=sorted(affinity),
        load=[round(x, 2) for x in os.getloadavg()],
        threads=threads,
        dtype=dtype,
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        peers=peers,
        **more,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def peak_bytes() -> int:
    """Largest resident memory of this process so far (since `reset_peak`, where that works).

    Linux's own counter is read before getrusage, which begins with the parent's size at the fork.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Resident memory now; the peak where the system does not tell."""
    status = Path("/proc/self/statm")
    if not status.is_file():
        return peak_bytes()
    return int(status.read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def reset_peak() -> bool:
    """Gives freed memory back and starts the peak anew; False where Linux's clear_refs is missing."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except (OSError, AttributeError):
        return False
    return True


def memory_of(run: Callable[[], Any]) -> dict[str, Any]:
    """Memory of `run` in a process that holds its model and inputs and nothing else, in MiB.

    base  resident before.  peak  largest resident during.  rise  peak - base: gradients, moments,
    activations and the library's own working space.  process  largest resident of the process from
    its start, imports and loading included.  reset  whether the peak could be started anew before
    the run (otherwise `peak` is that of the process).
    """
    gc.collect()
    before = peak_bytes()
    reset = reset_peak()
    base = resident_bytes()
    run()
    peak = peak_bytes()
    return {
        "base": base / MIB,
        "peak": peak / MIB,
        "rise": (peak - base) / MIB,
        "process": max(peak, before) / MIB,
        "reset": reset,
    }
