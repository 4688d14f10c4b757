"""Qwen2.5-VL 3B- and 7B-shaped speed on one GPU: utilisation, bandwidth, sharing, and transformers.

    python tools/bench_gpu.py --json out.json         both models, bf16, at most 8 minutes with compiles
    python tools/bench_gpu.py --model qwen-3b         one of them
    python tools/bench_gpu.py --tiny                  every section on any machine; no figure of a GPU

Random weights; prompts of 10,000 tokens with five pages. Rows:

    prefill            tower, prompt, last logits of one prompt; MFU
    update             one RS-GRPO update of 8 responses of 1,024 tokens; MFU. The table says what trains
                       and in which dtype: all of the decoder with float32 masters where memory allows,
                       otherwise the attention projections on bf16 weights
    decode             64 responses (8 prompts, G=8): measured step against the time that reading every
                       weight once and every resident key and value once takes at the card's bandwidth
    shared / repeated  a rollout of 10,000 / 1,024 / G=8 against one that holds 8 copies of the prompt
    transformers       the same rollout with 128 tokens a response, ours and generate(num_return_sequences=8)
                       with SDPA in turn on the same card

FLOPs and bytes are counted from the shapes (bench/counts.py): causal halves, no padding, no
recomputation. Peaks of known cards are built in; --peak-tflops and --bandwidth-gbs give others. Without
a GPU it says so and gives no figure. Sections run in the order that matters most, and those that the
time budget cuts off are named.

JSON ratios, each after MODEL/: prefill_mfu, update_mfu, decode_of_floor (floor / measured),
shared_over_repeated (rollouts of equal work, repeated / shared time), ours_over_transformers.
Needs torch with CUDA for the last one only.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench.machine import facts
from bench.report import Report
from bench.timing import alternate, median, spread

# Both libraries share the card: neither takes all of its memory in advance.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

MODELS = ("qwen-3b", "qwen-7b")
SECTION_SECONDS = 60  # left at least for a section to begin: it compiles first


def main() -> int:
    """Runs the benchmark."""
    args = options()
    import jax
    from bench import counts
    from bench.gpu import Clock
    from bench.shapes import SHAPES

    from evisrag_jax.runtime.compile_cache import enable_compile_cache

    enable_compile_cache()
    kind, on_gpu = jax.devices()[0].device_kind, jax.default_backend() == "gpu"
    names = ("tiny",) if args.tiny else tuple(args.model or MODELS)
    report = Report(
        name="one GPU" if not args.tiny else "one GPU (tiny: plumbing only)",
        columns=("model", "measurement", "median s", "least – most", "figure"),
        shapes={name: SHAPES[name].sizes() for name in names},
        versions=facts(0, "bfloat16", repeats=args.repeats),
    )
    peaks = counts.card(kind) if on_gpu else None
    if args.peak_tflops and args.bandwidth_gbs:
        peaks = args.peak_tflops * 1e12, args.bandwidth_gbs * 1e9
    if not on_gpu and not args.tiny:
        report.notes.append(f"no GPU here (jax sees {kind}): nothing was measured; try --tiny")
    else:
        if peaks is None:
            report.notes.append(f"{kind}: its peaks are not known, so there is no utilisation")
        clock = Clock(args.minutes)
        for name in names:
            measure(report, SHAPES[name], args, peaks, clock)
    report.finish(args.json)
    return 0


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios and times here")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs (default 5)")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run (default 8)")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the card")
    parser.add_argument("--bandwidth-gbs", type=float, help="memory bandwidth of the card, GB/s")
    return parser.parse_args()


def measure(report: Report, shape, args, peaks, clock) -> None:
    """All sections of one model, each if there is time to begin it."""
    import gc

    import jax

    for section in (prefill, update, decode, sharing, transformers):
        if clock.left() < SECTION_SECONDS and not args.tiny:
            report.notes.append(f"{shape.name}: {section.__name__} left out, the time is over")
            continue
        section(report, shape, args, peaks)
        gc.collect()
        jax.clear_caches()
        print(f"{shape.name} {section.__name__}: {clock.left():.0f} s left", file=sys.stderr)


def _mfu(report: Report, name: str, flops: int, seconds: float, peaks) -> str:
    rate = f"{flops / seconds / 1e12:.1f} TFLOP/s"
    if peaks is None:
        return rate
    report.ratios[name] = flops / seconds / peaks[0]
    return f"{rate}, MFU {100 * report.ratios[name]:.1f} %"


def prefill(report: Report, shape, args, peaks) -> None:
    """Tower and prompt of one prompt."""
    import jax.numpy as jnp
    from bench import gpu
    from bench.case import make_case

    run = gpu.prefill(make_case(shape, None), gpu.random_params(shape, jnp.bfloat16))
    times = alternate({"prefill": run}, args.repeats)["prefill"]
    report.times[f"{shape.name} prefill"] = times
    figure = _mfu(
        report, f"{shape.name}/prefill_mfu", gpu.prefill_flops(shape), median(times), peaks
    )
    report.row(shape.name, "prefill", median(times), spread(times), figure)


def decode(report: Report, shape, args, peaks) -> None:
    """64 responses at work: seconds a step against the bandwidth floor."""
    import jax.numpy as jnp
    from bench import counts, gpu
    from bench.case import make_case

    tokens = min(shape.response, 256)
    many = replace(shape, prompts=64 // shape.group if shape.group == 8 else 2, response=tokens)
    run = gpu.rollout(make_case(many, None), gpu.random_params(shape, jnp.bfloat16))
    run()
    steps = [run()["decode"] / tokens for _ in range(args.repeats)]
    report.times[f"{shape.name} decode step"] = steps
    responses = many.prompts * many.group
    lengths = [many.prompt] * many.prompts
    needed = counts.mean_decode_bytes(many.text, lengths, responses, tokens)
    figure = f"{needed / median(steps) / 1e9:.0f} GB/s"
    if peaks is not None:
        floor = needed / peaks[1]
        report.ratios[f"{shape.name}/decode_of_floor"] = floor / median(steps)
        figure += f", {100 * floor / median(steps):.1f} % of the floor"
    name = f"decode step, {responses} responses"
    report.row(shape.name, name, median(steps), spread(steps), figure)


def sharing(report: Report, shape, args, peaks) -> None:
    """A shared and a repeated prefix, in turn."""
    import jax.numpy as jnp
    from bench import gpu
    from bench.case import make_case

    case, params = make_case(shape, None), gpu.random_params(shape, jnp.bfloat16)
    sides = {
        "rollout, shared prefix": gpu.rollout(case, params),
        "rollout, repeated prefix": gpu.rollout(case, params, repeated=True),
    }
    key = f"{shape.name}/shared_over_repeated"
    _in_turn(report, shape, alternate(sides, args.repeats), key)


def transformers(report: Report, shape, args, peaks) -> None:
    """The same rollout of ours and of transformers, in turn."""
    import jax.numpy as jnp
    from bench import gpu
    from bench.case import make_case

    try:
        from bench import gpu_peer
    except ImportError as error:
        why = f"torch is not here ({error})"
    else:
        why = gpu_peer.reason_against(tiny=args.tiny)
    if why is not None:
        report.notes.append(f"{shape.name}: transformers was not measured: {why}")
        return
    short = replace(shape, response=min(shape.response, 128))
    case, params = make_case(short, None), gpu.random_params(shape, jnp.bfloat16)
    sides = {
        f"rollout of {short.response}, ours": gpu.rollout(case, params),
        f"rollout of {short.response}, transformers SDPA": gpu_peer.rollout(
            gpu_peer.make_model(case), case
        ),
    }
    key = f"{shape.name}/ours_over_transformers"
    _in_turn(report, shape, alternate(sides, args.repeats), key)
    gpu_peer.free()


def _in_turn(report: Report, shape, times: dict[str, list[float]], key: str) -> None:
    """Rows of two sides; the ratio is the second's time over the first's."""
    first, second = times
    for name, seconds in times.items():
        report.times[f"{shape.name} {name}"] = seconds
        factor = f"{median(seconds) / median(times[first]):.2f} × the first"
        report.row(shape.name, name, median(seconds), spread(seconds), factor)
    report.ratios[key] = median(times[second]) / median(times[first])


def update(report: Report, shape, args, peaks) -> None:
    """One RS-GRPO update."""
    from bench import gpu

    plan = gpu.train_plan(shape, gpu.device_memory())
    run = gpu.update(shape, plan)
    times = alternate({"update": run}, args.repeats)["update"]
    report.times[f"{shape.name} update"] = times
    flops = gpu.update_flops(shape, plan)
    figure = _mfu(report, f"{shape.name}/update_mfu", flops, median(times), peaks)
    report.row(shape.name, f"update: {plan.words}", median(times), spread(times), figure)


if __name__ == "__main__":
    sys.exit(main())
