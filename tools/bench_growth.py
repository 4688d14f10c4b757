"""How our step grows with the group, the prompt, the response and the pages, and with what exponent.

    python tools/bench_growth.py --json out.json            the full grid: G 1 … 16, prompt 512 … 8,192,
                                                            response 64 … 512, pages 1 … 5 (an hour)
    python tools/bench_growth.py --quick                    two values an axis
    python tools/bench_growth.py --tiny                     a check of the plumbing, no figure

One size changes at a time from the model and sizes of --shape. A step is a rollout (tower, prefill,
sampling of G responses of T tokens) and an update of them, float32. "program MiB" is XLA's own account
of the compiled update: parameters, moments, batch and working space. An exponent b is that of the
least-squares fit a·size^b over the axis: 1 is linear, 0 is free. What does not depend on the axis (the
prompt along G, the weights) keeps it below 1.

JSON ratios: step_g8_over_g1 (time of one step at G=8 over that at G=1; "g4" with --tiny), and
exponent/AXIS/FIGURE for the figures rollout, update, step and memory.
"""

from __future__ import annotations

import sys

from bench.command import model_folder, parser, shape_of
from bench.machine import MIB, facts, use_threads
from bench.report import Report
from bench.timing import alternate, median

FIGURES = ("rollout", "update", "step", "memory")


def main() -> int:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="two values an axis")
    arguments.add_argument("--axis", action="append", help="only this axis (may be repeated)")
    args = arguments.parse_args()
    use_threads(args.threads)
    from bench.growth import AXES, QUICK, TINY

    shape = shape_of(args)
    grid = TINY if args.tiny else QUICK if args.quick else AXES
    unknown = set(args.axis or ()) - set(grid)
    if unknown:
        arguments.error(f"--axis {unknown.pop()}: one of {', '.join(grid)}")
    grid = {axis: grid[axis] for axis in args.axis or grid}
    report = Report(
        name=f"growth from shape {shape.name}",
        columns=("axis", "value", "rollout s", "update s", "step s", "program MiB"),
        shapes={shape.name: shape.sizes()},
        versions=facts(args.threads, "float32", repeats=args.repeats),
    )
    with model_folder(shape, args.seed) as folder:
        for axis, values in grid.items():
            points = [measure(axis, value, shape, folder, args) for value in values]
            fill(report, axis, values, points)
    report.finish(args.json)
    return 0


def measure(axis: str, value: int, base, folder, args) -> dict:
    """Seconds of rollout and update, and bytes of the update, at one shape."""
    import jax
    from bench import ours
    from bench.case import make_case, make_responses
    from bench.growth import along

    shape = along(axis, value, base)
    case, responses = make_case(shape, folder, args.seed), make_responses(shape)
    params = ours.load(case)
    engine, requests = ours.make_engine(case, params), ours.make_requests(case)
    how = ours.sampling(shape, greedy=False)
    batch = ours.make_batch(case, responses.tokens, responses.rewards, responses.masks)
    update = ours.Update(case, batch)
    update.start(ours.load(case))
    times = alternate(
        {
            "rollout": lambda: engine.generate(requests, how, group=shape.group),
            "update": update,
        },
        args.repeats,
    )
    bytes_of_update = update.program_bytes()
    jax.clear_caches()  # the next shape's programs replace these
    print(f"{axis} {value}: rollout {median(times['rollout']):.2f} s, update "
          f"{median(times['update']):.2f} s", file=sys.stderr)  # fmt: skip
    return {"times": times, "memory": bytes_of_update}


def fill(report: Report, axis: str, values, points) -> None:
    """Rows of one axis, its exponents, and along "group" the quotient of its ends."""
    from bench.growth import exponent

    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    for value, point in zip(values, points, strict=True):
        rollout, update = (median(point["times"][name]) for name in ("rollout", "update"))
        figures = (rollout, update, rollout + update, float(point["memory"]))
        for name, figure in zip(FIGURES, figures, strict=True):
            found[name].append(figure)
        report.row(axis, value, *figures[:3], f"{point['memory'] / MIB:,.0f}")
        report.times[f"{axis} {value}"] = point["times"]
    for name in FIGURES:
        report.ratios[f"exponent/{axis}/{name}"] = exponent(values, found[name])
    if axis == "group" and 1 in values:
        many = 8 if 8 in values else values[-1]
        steps = dict(zip(values, found["step"], strict=True))
        report.ratios[f"step_g{many}_over_g1"] = steps[many] / steps[1]


if __name__ == "__main__":
    sys.exit(main())
