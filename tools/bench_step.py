"""One whole RS-GRPO step: evisrag_jax against TRL's GRPOTrainer, on the same weights and prompts.

    python tools/bench_step.py --shape rag-cpu --json out.json
    python tools/bench_step.py --tiny                               a check of the plumbing, no figure

A step goes from pictures and text to new parameters: patches, rollout of G responses of T tokens at
temperature 1, a reward of the ids (the same function on both sides), loss, AdamW; float32, frozen
tower, one optimiser step a rollout. TRL runs `trainer.train()` with num_generations=G, images in the
dataset, no gradient checkpointing and no KL; between its on_step_begin and on_step_end its clock runs
(decoding the dataset's pictures comes before and is not counted). Ours takes its turn after each of
TRL's steps. Ours computes token advantages over three scopes, TRL one advantage a response.

TRL needs a ProcessorMixin; Qwen's own wants torchvision for videos, so pages and text go through a
processor without that half, and its prompt ids are compared with ours before anything is timed.

JSON ratios: step_time (TRL / ours), compiles_after_first (programs compiled in our timed steps).
Needs the extra `bench` (trl, torch).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.command import model_folder, parser, shape_of
from bench.machine import facts, use_threads
from bench.report import Report
from bench.timing import median, spread

WARMUP = 1  # steps of both sides before the first that counts


def share_of_even_ids(ids) -> float:
    """The reward: any function of the ids that differs between responses will do."""
    return sum(int(i) % 2 == 0 for i in ids) / max(1, len(ids))


def main() -> int:
    """Runs the benchmark."""
    args = parser(__doc__).parse_args()
    use_threads(args.threads)
    shape = shape_of(args)
    with model_folder(shape, args.seed) as folder:
        report = measure(shape, folder, args)
    report.finish(args.json)
    return 0


def measure(shape, folder: Path, args) -> Report:
    """Compares the prompts, runs the steps of both sides in turn."""
    try:
        from bench import trl_side
    except ImportError as error:
        raise SystemExit(f"TRL is not here ({error}); pip install 'evisrag-jax[bench]'") from error
    from bench.case import describe, make_case
    from bench.ours import OPTIM
    from bench.step import Step

    from evisrag_jax.runtime.compile_cache import CompileCounter

    case = make_case(shape, folder, args.seed)
    theirs = trl_side.prompt_ids(case, trl_side.make_processor(case))
    if theirs != [prompt.ids.tolist() for prompt in case.prompts]:
        raise SystemExit("TRL's processor lays the prompts out otherwise; nothing was timed")
    step, compiles = Step(case, share_of_even_ids), []

    def turn():
        counter = CompileCounter()
        step()
        compiles.append(counter.count)

    with tempfile.TemporaryDirectory(prefix="evisrag-bench-trl-") as scratch:
        out = trl_side.run(
            case,
            folder,
            other=turn,
            reward=share_of_even_ids,
            steps=WARMUP + args.repeats,
            threads=args.threads,
            learning_rate=OPTIM.learning_rate,
            weight_decay=OPTIM.weight_decay,
            scratch=Path(scratch),
        )
    report = Report(
        name=f"whole step, shape {shape.name}",
        columns=("side", "median s", "least – most", "response tokens"),
        shapes={shape.name: describe(case)},
        versions=facts(
            args.threads,
            "float32",
            repeats=args.repeats,
            remat=step.update.settings.remat,
            trl=out["settings"],
        ),
        times={side: out[side][WARMUP:] for side in ("ours", "trl")},
        checks={
            "prompt ids equal to TRL's processor": f"all {shape.prompts * shape.prompt}",
            "our sampled against trained log-probs, mean": step.metrics["rollout/logp_gap_mean"],
            "our programs compiled in each step": compiles,
        },
    )
    fill(report, {"ours": step.lengths[WARMUP:], "trl": out["tokens"][WARMUP:]}, compiles[WARMUP:])
    return report


def fill(report: Report, tokens: dict[str, list[int]], compiles: list[int]) -> None:
    """Rows and ratios from times, response tokens a step and programs compiled a step."""
    for side, seconds in report.times.items():
        report.row(side, median(seconds), spread(seconds), int(median(tokens[side])))
    report.ratios["step_time"] = median(report.times["trl"]) / median(report.times["ours"])
    report.ratios["compiles_after_first"] = float(sum(compiles))


if __name__ == "__main__":
    sys.exit(main())
