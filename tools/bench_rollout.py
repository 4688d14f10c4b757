"""Rollout speed: a group sampled by evisrag_jax against transformers' generate, on the same weights.

    python tools/bench_rollout.py --shape rag-cpu --json out.json
    python tools/bench_rollout.py --tiny                            a check of the plumbing, no figure

One prompt with its pages, G responses of exactly T tokens, float32. Ours is Engine.generate; the
other side is model.generate(num_return_sequences=G), which repeats prompt and pages G times (greedy
search has no such option: its inputs are repeated before). Both run the vision tower inside the timed
region; "features cached" is a row of its own and in no ratio. The sides take turns in one process, and
greedy tokens are compared before anything is timed.

JSON ratios: rollout_tokens_per_s (sampled, ours / transformers), rollout_tokens_per_s_greedy.
Needs the extra `bench` (torch).
"""

from __future__ import annotations

import sys

from bench.command import model_folder, parser, shape_of
from bench.machine import facts, use_threads
from bench.report import Report
from bench.timing import alternate, median, spread

SIDES = {
    "sampled": ("ours", "transformers generate"),
    "greedy": ("ours, greedy", "transformers generate, greedy"),
}
CACHED = "ours, features cached"


def main() -> int:
    """Runs the benchmark."""
    args = parser(__doc__).parse_args()
    use_threads(args.threads)
    shape = shape_of(args)
    with model_folder(shape, args.seed) as folder:
        report = measure(shape, folder, args)
    report.finish(args.json)
    return 0


def measure(shape, folder, args) -> Report:
    """Checks agreement, times all sides in turn."""
    from bench import ours, peer
    from bench.agreement import equal_tokens
    from bench.case import describe, make_case

    case = make_case(shape, folder, args.seed)
    params = ours.load(case)
    engine = ours.make_engine(case, params)
    plain = ours.make_requests(case)
    warm = ours.make_requests(case, ours.image_features(case, params))
    model = peer.load(folder, args.threads)
    once, repeated = peer.make_inputs(case), peer.make_inputs(case, shape.group)
    limits = {
        "tokens": shape.response,
        "group": shape.group,
        "suppress": case.never_sampled,
        "stop_ids": case.stop_ids,
    }

    def sample(requests, *, greedy, seed=0):
        how = ours.sampling(shape, greedy=greedy)
        return engine.generate(requests, how, group=shape.group, seed=seed)

    greedy_ids = [done.ids for group in sample(plain, greedy=True) for done in group]
    theirs = peer.generate(model, repeated, greedy=True, **limits).numpy()
    equal, total = equal_tokens(greedy_ids, theirs)
    seed = full_length_seed(sample, plain, shape.response)
    words = len({int(i) for ids in greedy_ids for i in ids})

    times = alternate(
        {
            "ours": lambda: sample(plain, greedy=False, seed=seed),
            "transformers generate": lambda: peer.generate(model, once, greedy=False, **limits),
            "ours, greedy": lambda: sample(plain, greedy=True),
            "transformers generate, greedy": lambda: peer.generate(
                model, repeated, greedy=True, **limits
            ),
            CACHED: lambda: sample(warm, greedy=False, seed=seed),
        },
        args.repeats,
    )
    report = Report(
        name=f"rollout, shape {shape.name}",
        columns=("side", "tokens/s", "median s", "least – most"),
        shapes={shape.name: describe(case)},
        versions=facts(args.threads, "float32", repeats=args.repeats),
        times=times,
        checks={
            "greedy tokens equal to transformers'": f"{equal} of {total} ({words} different words)"
        },
    )
    fill(report, shape.prompts * shape.group * shape.response)
    report.notes.append(
        f"{shape.prompts} prompt of {shape.prompt} tokens with {shape.pages} pages of "
        f"{shape.page_tokens}, G={shape.group}, T={shape.response}"
    )
    return report


def full_length_seed(sample, requests, tokens: int) -> int:
    """The first seed whose sampled responses all run to the end, as the other side's are made to."""
    for seed in range(20):
        groups = sample(requests, greedy=False, seed=seed)
        if all(done.length == tokens for group in groups for done in group):
            return seed
    raise SystemExit("every seed below 20 samples an end token; give another --seed")


def fill(report: Report, tokens: int) -> None:
    """Rows and ratios from the times; `tokens` are those of one call."""
    for name, seconds in report.times.items():
        report.row(name, tokens / median(seconds), median(seconds), spread(seconds))
    for key, (mine, other) in (
        ("rollout_tokens_per_s", SIDES["sampled"]),
        ("rollout_tokens_per_s_greedy", SIDES["greedy"]),
    ):
        report.ratios[key] = median(report.times[other]) / median(report.times[mine])


if __name__ == "__main__":
    sys.exit(main())
