#!/usr/bin/env python
"""Imports, runs and exports a checkpoint of a published size on this machine, and measures the memory.

    python tools/check_real_size.py --size 3b                 makes one of random weights, checks, deletes it
    python tools/check_real_size.py --folder Qwen2.5-VL-3B-Instruct

    step      what                                                    limit of the peak (ru_maxrss)
    import    read into bfloat16 arrays on the CPU device             1.15 x weights + 1 GiB
    forward   the same, and one forward of 8 tokens with its logits   2.2 x weights + 1 GiB
    export    the same, written again and compared bit by bit         none; no difference

The forward is compiled without hoisting out of loops, which on a CPU would widen every layer's bfloat16 weights to
float32 at once (GPUs compute in bfloat16). Each step is a process of its own, so a peak is that step's alone; what
Python and its libraries take by themselves is shown, and counts. Exit code 1 when a limit is passed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evisrag_jax.models.qwen25vl.sizes import SIZES

GIB = 2**30
# XLA's CPU backend has no bfloat16 slices: it would widen all layers to float32 before the loop over them.
FLAGS = (
    "--xla_disable_hlo_passes=while-loop-invariant-code-motion,"
    "while-loop-expensive-invariant-code-motion"
)
STEPS = ("nothing", "import", "forward", "export")


def step(name: str, folder: Path) -> dict:
    """One step in this process; its facts."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from evisrag_jax.models.qwen25vl import model
    from evisrag_jax.models.qwen25vl.shards import Shards
    from evisrag_jax.models.qwen25vl.weights import load_params, save_params

    jax.block_until_ready(jnp.zeros(1))
    begin = time.perf_counter()
    facts: dict = {}
    if name != "nothing":
        params, config = load_params(folder, jnp.bfloat16)
        jax.block_until_ready(params)
    if name == "forward":
        prompt = model.PromptInputs(
            tokens=jnp.arange(8)[None],
            positions=jnp.broadcast_to(jnp.arange(8), (1, 3, 8)),
            lengths=jnp.array([8]),
            image_index=jnp.full((1, 8), -1),
            next_position=jnp.array([8]),
        )

        @jax.jit
        def forward(params):
            hidden, _ = model.prefill(params, config, prompt)
            return model.logits(params, config, hidden[:, -1])

        out = np.asarray(forward(params))
        facts["finite"] = bool(np.isfinite(out).all()) and bool(out.std() > 0)
    if name == "export":
        with tempfile.TemporaryDirectory(dir=folder.parent) as there:
            save_params(params, config, there)
            facts["different"] = different(Shards(folder), Shards(Path(there)))
    facts["seconds"] = time.perf_counter() - begin
    facts["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return facts


def different(ours: object, theirs: object) -> list[str]:
    """Names of the tensors that are not bitwise the same in both folders."""
    import numpy as np

    wrong = sorted(ours.where.keys() ^ theirs.where.keys())
    for name in ours.where.keys() & theirs.where.keys():
        a, b = (np.empty(s.where[name].shape, s.where[name].dtype) for s in (ours, theirs))
        ours.copy(name, a)
        theirs.copy(name, b)
        if a.dtype != b.dtype or not np.array_equal(a.view(np.uint8), b.view(np.uint8)):
            wrong.append(name)
    return wrong


def run(name: str, folder: Path) -> dict:
    """`step` in a process of its own."""
    command = [sys.executable, __file__, "--step", name, "--folder", str(folder)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"step {name} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def check(folder: Path) -> int:
    """All steps, as a table; the exit code."""
    from evisrag_jax.models.qwen25vl.weights import check_folder

    weights = check_folder(folder)[1].nbytes
    found = {name: run(name, folder) for name in STEPS}
    limits = {"import": 1.15 * weights + GIB, "forward": 2.2 * weights + GIB}
    print(f"{folder}: {weights / GIB:.2f} GiB of weights; Python alone {_gib(found['nothing'])}")
    print(f"{'step':8}  {'seconds':>7}  {'peak GiB':>8}  {'limit':>6}  ")
    good = True
    for name in STEPS[1:]:
        facts, limit = found[name], limits.get(name)
        fine = limit is None or facts["peak"] <= limit
        fine &= facts.get("finite", True) and not facts.get("different")
        good &= fine
        shown = "-" if limit is None else f"{limit / GIB:.2f}"
        print(
            f"{name:8}  {facts['seconds']:7.1f}  {_gib(facts):>8}  {shown:>6}  "
            f"{'ok' if fine else 'FAILED'}"
        )
    print(f"tensors that differ after export and reload: {len(found['export']['different'])}")
    return 0 if good else 1


def _gib(facts: dict) -> str:
    return f"{facts['peak'] / GIB:.2f}"


def main() -> int:
    """Runs the checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("small", *SIZES), default="3b")
    parser.add_argument(
        "--folder", type=Path, help="an existing checkpoint in place of a random one"
    )
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(step(args.step, args.folder)))
        return 0
    if args.folder:
        return check(args.folder)
    with tempfile.TemporaryDirectory() as there:
        maker = Path(__file__).with_name("make_checkpoint.py")
        command = [sys.executable, maker, "--size", args.size, "--out", Path(there) / args.size]
        if subprocess.run([str(word) for word in command]).returncode:
            return 1
        return check(Path(there) / args.size)


if __name__ == "__main__":
    sys.exit(main())
