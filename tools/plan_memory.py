#!/usr/bin/env python
"""What a training job needs on each device, before you ask for a machine: bytes of every part, whether it fits, and
the largest batch that does.

    python tools/plan_memory.py --model 7b --mesh data=1,fsdp=8 --pages 5 --prompt 10240 --response 1536 \\
        --group 8 --device a100-80
    python tools/plan_memory.py --table      the table of docs/memory.md
    python tools/plan_memory.py --check      the plan against the compiler, float32 on this machine's CPU

The bytes follow from shapes and from what the code keeps (tools/plan/parts.py); nothing is compiled, no device is
used. Exit code 1 when the job does not fit, or when --check finds a difference above 15 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main() -> int:
    """Plans, prints the table, or checks."""
    args = arguments()
    if args.check:
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
        )
        return check()
    from plan.devices import DEVICES, available
    from plan.parts import plan
    from plan.report import lines, table

    if args.table:
        print(table())
        return 0
    job = job_of(args)
    memory = args.memory_gib or DEVICES[args.device]
    print("\n".join(lines(job, memory)))
    found = plan(job)
    if args.json:
        facts = {
            "job": {k: v for k, v in vars(job).items() if k != "model"},
            "bytes": dataclasses.asdict(found),
            "rollout_peak": found.rollout_peak,
            "update_peak": found.update_peak,
            "available": available(memory),
        }
        Path(args.json).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0 if found.peak <= available(memory) else 1


def arguments() -> argparse.Namespace:
    """The command line."""
    from plan.devices import DEVICES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="7b", help="3b, 7b, 32b, 72b, or a folder with config.json"
    )
    parser.add_argument("--mesh", default="data=1,fsdp=8,tensor=1", help="sizes of the axes")
    parser.add_argument("--processes", type=int, default=1, help="of the job")
    parser.add_argument("--method", choices=("rl", "sft"), default="rl")
    parser.add_argument("--prompts", type=int, default=32, help="an update, over all devices")
    parser.add_argument(
        "--micro", type=int, default=1, help="prompts a slice on each device, 0 for all"
    )
    parser.add_argument("--group", type=int, default=8, help="responses a prompt")
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--page-tokens", type=int, default=2048, help="merged tokens a page")
    parser.add_argument("--prompt", type=int, default=10752, help="tokens, pages included")
    parser.add_argument("--response", type=int, default=1536, help="tokens")
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--moments", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: the whole decoder trains")
    parser.add_argument("--remat", choices=("none", "dots", "attention", "full"), default="full")
    parser.add_argument("--chunk", type=int, default=2048, help="positions whose logits are held")
    parser.add_argument("--slots", type=int, default=0, help="responses decoded at once a process")
    parser.add_argument("--rollout-tensor", type=int, default=0, help="devices of a sampling copy")
    parser.add_argument("--device", choices=tuple(DEVICES), default="a100-80")
    parser.add_argument("--memory-gib", type=float, help="of a device that is not in the list")
    parser.add_argument("--json", help="write the plan here")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


def job_of(args: argparse.Namespace):
    """The job of a command line."""
    from plan.job import Job

    from evisrag_jax.models.qwen25vl.config import load_config
    from evisrag_jax.models.qwen25vl.sizes import SIZES, published

    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    for part in args.mesh.split(","):
        name, _, size = part.partition("=")
        if name not in mesh or not size.isdecimal():
            raise SystemExit(
                f"--mesh {args.mesh}: sizes of data, fsdp and tensor, such as data=1,fsdp=8"
            )
        mesh[name] = int(size)
    names = ("processes", "method", "prompts", "micro", "group", "pages", "page_tokens", "prompt")
    names += ("response", "compute", "moments", "lora_rank", "remat", "chunk", "slots")
    fields = {name: getattr(args, name) for name in (*names, "rollout_tensor")}
    config = published(args.model) if args.model in SIZES else load_config(args.model)
    try:
        return Job(config, param=args.param_dtype, **mesh, **fields)
    except ValueError as error:
        raise SystemExit(f"plan_memory: {error}") from error


def check() -> int:
    """The plan beside the compiler's account, as a table."""
    from plan.check import LIMIT, compare, jobs

    worst = 0.0
    print(f"{'float32, MiB a device':36}{'planned':>9}{'compiled':>10}{'error':>9}")
    for name in jobs():
        one = compare(name)
        worst = max(worst, abs(one.error))
        print(
            f"{name:36}{one.planned / 2**20:9.1f}{one.compiled / 2**20:10.1f}{one.error:+9.1%}",
            flush=True,
        )
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
