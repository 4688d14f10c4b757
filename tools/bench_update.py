"""Update speed and memory: our shared-prefix RS-GRPO update against a torch step of the same loss.

    python tools/bench_update.py --shape rag-cpu --json out.json
    python tools/bench_update.py --tiny                             a check of the plumbing, no figure

One prompt with its pages and G given responses of T tokens, float32, AdamW. Ours is the jitted
`rl_update` with the package's defaults; torch runs transformers' model over the G copies, logits at
response positions only, without gradient checkpointing. Both freeze the vision tower and run it inside
the timed region. Loss and gradients are compared before anything is timed, with old log-probs off the
policy so that ratios differ from 1; the timed steps are on the policy. The sides take turns in one
process; memory is measured in a fresh process a side: the largest resident set during two steps, and
its rise over what the process held with its model and inputs loaded (ours: and its program compiled).

JSON ratios: update_time (torch / ours), update_peak_memory (rise, ours / torch),
update_peak_memory_process (largest resident set of the process, imports, loading and, on our side,
compiling included, ours / torch), update_peak_memory_steps (largest resident set during the steps).
Needs the extra `bench` (torch).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench.command import model_folder, parser, shape_of
from bench.machine import facts, memory_of, use_threads
from bench.report import Report
from bench.timing import alternate, median, spread

OURS, TORCH = "ours", "torch"
TOLERANCE = 1e-4  # of gradients, relative L2 a tensor
STEPS = 2  # in a memory run: the first makes the moments, the second has moments and gradients


def main() -> int:
    """Runs the benchmark, or one side of its memory run."""
    arguments = parser(__doc__)
    arguments.add_argument("--memory-of", choices=(OURS, TORCH), help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    use_threads(args.threads)
    shape = shape_of(args)
    if args.memory_of:
        side = {OURS: memory_of_ours, TORCH: memory_of_torch}[args.memory_of]
        print(json.dumps(side(shape, args)))
        return 0
    with model_folder(shape, args.seed) as folder:
        report = measure(shape, folder, args)
        memory = {side: fresh_process(side, folder, args) for side in (OURS, TORCH)}
    fill(report, memory)
    report.finish(args.json)
    return 0


def measure(shape, folder: Path, args) -> Report:
    """Checks loss and gradients, times both sides in turn."""
    from bench import ours, peer
    from bench.agreement import gradient_errors
    from bench.case import describe, make_case, make_responses

    case, responses = make_case(shape, folder, args.seed), make_responses(shape)
    params = ours.load(case)
    checked = ours.gradients(case, params, responses)
    model = peer.load(folder, args.threads)
    torch_side = torch_update(model, case, responses, checked.advantages)
    loss, (torch_loss, torch_grads) = checked.loss, torch_side.gradients(checked.old)
    errors = gradient_errors(shape, checked.grads, torch_grads)
    del checked, torch_grads
    worst = max(errors, key=errors.get)
    if abs(loss - torch_loss) > TOLERANCE * abs(torch_loss) or errors[worst] > TOLERANCE:
        raise SystemExit(
            f"the sides differ: loss {loss:.7f} and {torch_loss:.7f}, gradient of {worst} by "
            f"{errors[worst]:.1e} relative (limit {TOLERANCE}); nothing was timed"
        )
    batch = ours.make_batch(case, responses.tokens, responses.rewards, responses.masks)
    our_side = ours.Update(case, batch)
    our_side.start(params)
    times = alternate({OURS: our_side, TORCH: torch_side}, args.repeats)
    return Report(
        name=f"update, shape {shape.name}",
        columns=("side", "median s", "least – most", "memory: rise", "during steps", "process"),
        shapes={shape.name: describe(case)},
        versions=facts(
            args.threads,
            "float32",
            repeats=args.repeats,
            remat=our_side.settings.remat,
            torch="sdpa, AdamW fused, no checkpointing",
        ),
        times=times,
        checks={
            "loss": f"{loss:.7f} ours, {torch_loss:.7f} torch",
            "largest relative gradient error": f"{errors[worst]:.1e} ({worst}), "
            f"of {len(errors)} tensors",
        },
    )


def torch_update(model, case, responses, advantages):
    """torch's side with our objective's settings."""
    from bench import peer

    from evisrag_jax.rl.losses import PolicyLossConfig
    from evisrag_jax.training.optimiser import OptimConfig

    loss, optim = PolicyLossConfig.paper(), OptimConfig()
    return peer.Update(
        model,
        case,
        responses,
        advantages,
        learning_rate=optim.learning_rate,
        weight_decay=optim.weight_decay,
        clip_norm=optim.clip_norm,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
    )


def memory_of_ours(shape, args) -> dict:
    """Compiles first, then loads: what compiling took is given back and is in `process` only."""
    from bench import ours
    from bench.case import make_case, make_responses

    case, responses = make_case(shape, args.folder, args.seed), make_responses(shape)
    batch = ours.make_batch(case, responses.tokens, responses.rewards, responses.masks)
    update = ours.Update(case, batch)
    params = [ours.load(case)]

    def run():
        update.start(params.pop())
        for _ in range(STEPS):
            update()

    return memory_of(run)


def memory_of_torch(shape, args) -> dict:
    """Loads, then runs the same number of steps."""
    import numpy as np
    from bench import peer
    from bench.case import make_case, make_responses

    case, responses = make_case(shape, args.folder, args.seed), make_responses(shape)
    # Any advantages take the same memory; ours are computed with jax, which is not imported here.
    advantages = np.random.default_rng(0).normal(size=responses.tokens.shape).astype(np.float32)
    update = torch_update(peer.load(args.folder, args.threads), case, responses, advantages)
    return memory_of(lambda: [update() for _ in range(STEPS)])


def fresh_process(side: str, folder: Path, args) -> dict:
    """The memory run of one side in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", side, "--folder", str(folder)]
    command += ["--shape", "tiny" if args.tiny else args.shape, "--seed", str(args.seed)]
    command += ["--threads", str(args.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def fill(report: Report, memory: dict[str, dict]) -> None:
    """Rows and ratios from times and memory."""
    for side, seconds in report.times.items():
        sizes = [f"{memory[side][part]:,.0f} MiB" for part in ("rise", "peak", "process")]
        report.row(side, median(seconds), spread(seconds), *sizes)
    ours, torch = (memory[side] for side in (OURS, TORCH))
    report.ratios |= {
        "update_time": median(report.times[TORCH]) / median(report.times[OURS]),
        "update_peak_memory": ours["rise"] / torch["rise"],
        "update_peak_memory_process": ours["process"] / torch["process"],
        "update_peak_memory_steps": ours["peak"] / torch["peak"],
    }
    report.checks["memory"] = memory
    if not (ours["reset"] and torch["reset"]):
        report.notes.append("this system cannot start a peak anew: rise is over the whole process")


if __name__ == "__main__":
    sys.exit(main())
