#!/usr/bin/env python
"""Runs a command as several processes of one job on this machine, over its loopback interface.

    python tools/launch_local.py -n 2 --devices 4 -- evisrag rl --config=rl.py:mini --data train.jsonl --out RUN
    python tools/launch_local.py -n 2 --gpus 4 -- evisrag sft --config=sft.py:7b --model FOLDER --data … --out RUN

Each process gets --coordinator, --processes and --process-id, and either so many virtual CPU devices or so
many of the machine's GPUs. Lines of the processes are shown with their number. As soon as one fails, the
others are ended, and its exit code is returned.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE = 10.0  # seconds between asking the others to end and making them


def main() -> int:
    """Starts the processes and waits for them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--processes", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices a process")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs a process, in place of the CPU")
    parser.add_argument("--port", type=int, default=0, help="of process 0 (default: a free one)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command or args.processes < 1:
        parser.error("give a command after --, and at least one process")
    port = args.port or free_port()
    running = [start(command, i, args, port) for i in range(args.processes)]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda got, _: forward(running, got))
    return wait(running)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list[str], index: int, args: argparse.Namespace, port: int) -> subprocess.Popen:
    """Process `index`, its lines shown with a number in front."""
    env = dict(os.environ)
    if args.gpus:
        first = index * args.gpus
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + args.gpus)))
    else:
        flags = env.get("XLA_FLAGS", "").split()
        flags = [flag for flag in flags if "host_platform_device_count" not in flag]
        flags.append(f"--xla_force_host_platform_device_count={args.devices}")
        env |= {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    joined = [f"--coordinator=127.0.0.1:{port}", f"--processes={args.processes}"]
    process = subprocess.Popen(
        [*command, *joined, f"--process-id={index}"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def show() -> None:
        for line in process.stdout:
            print(f"[{index}] {line}", end="", flush=True)

    process.shown = threading.Thread(target=show, daemon=True)
    process.shown.start()
    return process


def forward(running: list[subprocess.Popen], number: int) -> None:
    """Hands a signal on."""
    for process in running:
        if process.poll() is None:
            process.send_signal(number)


def wait(running: list[subprocess.Popen]) -> int:
    """The first exit code that is not 0, or 0. Ends the others after a failure."""
    code = 0
    while True:
        codes = [process.poll() for process in running]
        code = next(filter(None, codes), 0)
        if code or None not in codes:
            break
        time.sleep(0.1)
    if code:
        forward(running, signal.SIGTERM)
        limit = time.monotonic() + GRACE
        while any(process.poll() is None for process in running) and time.monotonic() < limit:
            time.sleep(0.1)
        forward(running, signal.SIGKILL)
    for process in running:
        process.wait()
        process.shown.join(timeout=5)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
