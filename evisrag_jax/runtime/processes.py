"""Several processes: start-up, agreement between them, and an end for a job that is stuck.

    process 0 ─┐                    every process runs the same program; each reads its share of the
    process 1 ─┼─ start ─ gather …  pages and owns its devices; process 0 alone writes metrics and
    process 2 ─┘                    reports

With one process everything here is trivial and nothing is started. What processes tell each other are
small host arrays (`gather`) and short texts (`from_primary`); both are explicit transfers.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from evisrag_jax.runtime.mesh import put_rows

START_SECONDS = 300  # to wait for the other processes at start-up
LOST_SECONDS = 100  # without a sign of life after which a process counts as lost
LEAVE_SECONDS = 30  # to wait for the others at the end
_PORTS = 61440  # a job's port is one of the 4,096 from here on

log = logging.getLogger(__name__)
_calls = {"primary": 0, "barrier": 0}


class ProcessError(RuntimeError):
    """Processes that cannot be started, or do not agree; the message says which."""


@dataclass(frozen=True)
class Job:
    """One process of a job.

    coordinator: "host:port" that process 0 listens on.  local: ids of this process's devices; None
    for all of the machine's.
    """

    coordinator: str
    processes: int
    process_id: int
    local: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.process_id < self.processes:
            raise ProcessError(f"process {self.process_id} of {self.processes} does not exist")
        if not re.fullmatch(r".+:\d+", self.coordinator):
            raise ProcessError(
                f"coordinator {self.coordinator!r}: HOST:PORT of process 0 is needed"
            )


def find_job(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Job | None:
    """The job this process belongs to: what is given, else what `srun` or `mpirun` say; None for a
    process of its own.

    Several tasks on one machine get a device each, a task alone on its machine gets all of them.
    Raises ProcessError when only a part is known.
    """
    given = (coordinator, processes, process_id)
    if any(value is not None for value in given):
        if None in given:
            raise ProcessError(
                "--coordinator, --processes and --process-id belong together: HOST:PORT of process 0, "
                "how many there are, and which one this is"
            )
        return Job(coordinator, processes, process_id) if processes > 1 else None
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environ:
        port = _PORTS + int(environ["SLURM_JOB_ID"]) % 4096
        shared = not re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        return Job(
            f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
            int(environ["SLURM_STEP_NUM_TASKS"]),
            int(environ["SLURM_PROCID"]),
            (int(environ["SLURM_LOCALID"]),) if shared else None,
        )
    if int(environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        total, local = (int(environ[f"OMPI_COMM_{w}_SIZE"]) for w in ("WORLD", "WORLD_LOCAL"))
        return Job(
            _ompi_coordinator(environ, total == local),
            total,
            int(environ["OMPI_COMM_WORLD_RANK"]),
            (int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),) if local > 1 else None,
        )
    return None


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: "gpu[07-09,12],cpu1" → "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ProcessError(f"SLURM node list {nodes!r}: no host name")
    return match[1] + (match[2] or "")


def _ompi_coordinator(environ: Mapping[str, str], one_machine: bool) -> str:
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    number = re.match(r"\d+", uri)
    port = _PORTS + (int(number[0]) // 4096 if number else os.getuid()) % 4096
    if one_machine:
        return f"127.0.0.1:{port}"
    address = re.search(r"tcp://([^,:]+)", uri)
    if address is None:
        raise ProcessError(
            "mpirun does not say where it runs (OMPI_MCA_orte_hnp_uri is not set): give --coordinator "
            "HOST:PORT, --processes and --process-id"
        )
    return f"{address[1]}:{port}"


def start(job: Job | None) -> None:
    """Joins the job, before any device is used. ProcessError when the others do not come."""
    if job is None:
        return
    # A preempted run saves by itself (training.loop); jax would take the signal away from it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            job.coordinator,
            job.processes,
            job.process_id,
            local_device_ids=None if job.local is None else list(job.local),
            cluster_detection_method="deactivate",
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=LOST_SECONDS,
            shutdown_timeout_seconds=LEAVE_SECONDS,
        )
    except Exception as error:
        raise ProcessError(
            f"process {job.process_id} of {job.processes}: cannot join {job.coordinator} ({error})"
        ) from error


def leave(code: int) -> None:
    """Ends a process of a job at once where it has failed: the others must not wait for it."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_primary() -> bool:
    """Whether this process writes metrics, reports and summaries."""
    return jax.process_index() == 0


# Agreement.


@functools.cache
def _one_each() -> Mesh:
    """A mesh of one device a process, in the order of the processes."""
    found: dict[int, Any] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, device)
    devices = np.array([found[i] for i in range(jax.process_count())])
    return Mesh(devices, ("process",), axis_types=(AxisType.Auto,))


@jax.jit
def _everywhere(tree: Any) -> Any:
    whole = NamedSharding(_one_each(), PartitionSpec())
    return jax.lax.with_sharding_constraint(tree, whole)


def gather(tree: Any) -> Any:
    """A tree of numpy arrays of every process, each with a leading process axis, on every process.

    Shapes and dtypes must be the same everywhere, and all processes must call it in the same order.
    A program is compiled for every new set of shapes. 64-bit numbers are not carried whole.
    """
    if jax.process_count() == 1:
        return jax.tree.map(lambda a: np.asarray(a)[None], tree)
    split = NamedSharding(_one_each(), PartitionSpec("process"))
    return jax.device_get(
        _everywhere(put_rows(jax.tree.map(lambda a: np.asarray(a)[None], tree), split))
    )


def gather_json(value: Any) -> list[Any]:
    """A plain JSON value of every process, on every process."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode("utf-8"), np.uint8)
    sizes = gather(np.int32(len(text)))
    room = 1 << int(max(sizes) - 1).bit_length()  # few sizes, few programs
    padded = np.zeros(room, np.uint8)
    padded[: len(text)] = text
    rows = gather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def any_process(flag: bool) -> bool:
    """Whether the flag is set in some process."""
    return bool(flag) if jax.process_count() == 1 else bool(gather(np.bool_(flag)).any())


def from_primary(work: Callable[[], Any], what: str, seconds: float | int = START_SECONDS) -> Any:
    """What `work` gives in process 0, where alone it runs, as plain JSON; the others wait for it.

    Raises what `work` raises there, and ProcessError with its message in the others.
    """
    if jax.process_count() == 1:
        return work()
    _calls["primary"] += 1
    key = f"evisrag/primary/{_calls['primary']}"
    client = _client()
    if is_primary():
        try:
            answer = work()
        except Exception as error:
            client.key_value_set(key, json.dumps({"error": str(error)}))
            raise
        client.key_value_set(key, json.dumps({"answer": answer}))
        return answer
    try:
        found = json.loads(client.blocking_key_value_get(key, int(1000 * seconds)))
    except Exception as error:
        raise ProcessError(f"process 0 has not come through {what!r} ({error})") from error
    if "error" in found:
        raise ProcessError(f"process 0: {found['error']}")
    return found["answer"]


def barrier(name: str, seconds: float | int = START_SECONDS) -> None:
    """Waits until every process is here. ProcessError, naming the barrier, when one does not come."""
    if jax.process_count() == 1:
        return
    _calls["barrier"] += 1
    try:
        _client().wait_at_barrier(f"evisrag/{_calls['barrier']}/{name}", int(1000 * seconds))
    except Exception as error:
        raise ProcessError(f"barrier {name!r}: not all processes came ({error})") from error


def publish(key: str, text: str) -> None:
    """Leaves a short text for the other processes; an older one under this key goes."""
    if jax.process_count() > 1:
        _client().key_value_set(f"evisrag/{key}", text, allow_overwrite=True)


def published(key: str) -> str | None:
    """What a process has left under this key; None for nothing."""
    if jax.process_count() == 1:
        return None
    try:
        return _client().key_value_try_get(f"evisrag/{key}")
    except Exception:  # jax raises its runtime's own error for a key that is not there
        return None


def _client() -> Any:
    # jax has no public name for its coordination service's client.
    from jax._src import distributed

    return distributed.global_state.client
