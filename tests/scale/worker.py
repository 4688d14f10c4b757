"""What one process of a test's job does: `python -m tests.scale.worker WORK FOLDER --coordinator=… …`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import jax

from evisrag_jax.rl import collect
from evisrag_jax.rl.run import train as train_rl
from evisrag_jax.runtime import processes, watchdog
from evisrag_jax.sft.trainer import train as train_sft
from tests.scale import jobs


def work_train(folder: Path) -> None:
    """The RL and the SFT run of `jobs` on all devices, and how many groups changed their process."""
    moved = []
    rebuild = collect.rebuild
    collect.rebuild = lambda *args: moved.append(1) or rebuild(*args)
    devices = len(jax.devices())
    train_rl(jobs.rl_config(folder, devices), folder / f"rl-{jax.process_count()}")
    train_sft(jobs.sft_config(folder, devices), folder / f"sft-{jax.process_count()}")
    told = processes.gather_json({"process": jax.process_index(), "moved": len(moved)})
    if processes.is_primary():
        (folder / "moved.json").write_text(json.dumps(told))


def work_go_on(folder: Path) -> None:
    """Goes on with the RL run of another number of processes."""
    train_rl(jobs.rl_config(folder, len(jax.devices())), folder / "resumed")


def work_asleep(folder: Path) -> None:
    """Process 1 sleeps in its step, process 0 waits for it."""
    stand_still(lambda: time.sleep(600))


def work_stopped(folder: Path) -> None:
    """Process 1 is stopped, its watchdog too."""
    stand_still(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def stand_still(stop: Callable[[], None]) -> None:
    processes.barrier("together")
    with watchdog.watching(4):
        watchdog.beat("step 7: rollout 1")
        time.sleep(2)
        if jax.process_index() == 0:
            watchdog.beat("step 7: update")
        else:
            stop()
        processes.any_process(True)


def work_refused(folder: Path) -> None:
    """Process 0 cannot start; the others hear why."""

    def fail() -> None:
        raise ValueError("the folder is of another run")

    processes.from_primary(fail, "start of the run folder")


def work_late(folder: Path) -> None:
    """Process 1 does not come to the barrier."""
    if jax.process_index() == 1:
        time.sleep(600)
    processes.barrier("step 3", seconds=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()
    processes.start(processes.find_job(args.coordinator, args.processes, args.process_id))
    try:
        globals()[f"work_{args.work}"](args.folder)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        time.sleep(5)  # the launcher ends the others as soon as one has failed
        processes.leave(3)
        raise


if __name__ == "__main__":
    main()
