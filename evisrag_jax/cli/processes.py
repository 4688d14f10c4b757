"""The flags of a command that several processes may run together."""

from __future__ import annotations

from typing import Any


def define(values: Any) -> None:
    """Adds --coordinator, --processes and --process-id to a command's flags."""
    from absl import flags

    flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of process 0; with --processes and --process-id for a job of several processes that "
        "was not started by srun or mpirun, which say all three by themselves",
        flag_values=values,
    )
    flags.DEFINE_integer("processes", None, "how many processes the job has", flag_values=values)
    flags.DEFINE_integer("process-id", None, "which of them this is, from 0", flag_values=values)


def join(values: Any) -> bool:
    """Joins the job that flags or the environment describe; whether this process writes and prints. To be
    called before any device is used."""
    from evisrag_jax.runtime.processes import find_job, is_primary, start

    start(find_job(values.coordinator, values.processes, values["process-id"].value))
    return is_primary()
