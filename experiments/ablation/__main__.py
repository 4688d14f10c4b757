"""``python -m experiments.ablation``: the ablation of RS-GRPO, arm by arm and seed by seed.

    python -m experiments.ablation --quick                  three arms, two seeds: within 15 minutes on two cores
    python -m experiments.ablation --out DIR                all arms, five seeds; started again it goes on
    python -m experiments.ablation --recompute              results.json, table and figures from kept predictions
    python -m experiments.ablation --cluster-configs        the evisrag commands of the arms at 7B

What is kept (DIR/results) is all that the statistics need; DIR/runs may be deleted. The committed result
lies in experiments/ablation/results.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from evisrag_jax.data.sources import read_records
from evisrag_jax.runtime.compile_cache import enable_compile_cache
from experiments.ablation.arms import ARMS, Budget, cluster_command
from experiments.ablation.data import generic_start, test_set, training_set
from experiments.ablation.report import recompute, table
from experiments.ablation.run import keep_start, results, run_arm

COMMITTED = Path(__file__).parent / "results"
QUICK_ARMS = ("rs_grpo_paper", "evidence_dapo", "generic_dapo")
QUICK = Budget(steps=15, questions=200, lessons=150)


def main() -> None:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, help="folder of runs and results (default: ablation, ablation-quick)"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=None, metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="default: 0 1 2 3 4")
    parser.add_argument("--quick", action="store_true", help="a small version of everything")
    parser.add_argument("--recompute", action="store_true", help="no training: statistics again")
    parser.add_argument("--cluster-configs", action="store_true", help="print commands for 7B")
    args = parser.parse_args()
    if args.cluster_configs:
        for name in ARMS:
            print(cluster_command(name))
        return
    if args.recompute:
        again(args.out / "results" if args.out else COMMITTED)
        return
    enable_compile_cache()
    budget = QUICK if args.quick else Budget()
    out = args.out or Path("ablation-quick" if args.quick else "ablation")
    arms = args.arms or (QUICK_ARMS if args.quick else tuple(ARMS))
    seeds = args.seeds or ((0, 1) if args.quick else (0, 1, 2, 3, 4))
    test = test_set(out / "data", budget.questions)
    done = 0
    for seed in seeds:  # all arms of a seed, so that a part of the whole compares all of them
        for name in arms:
            done += 1
            print(f"[{done}/{len(seeds) * len(arms)}] {name}, seed {seed}", flush=True)
            start = "mini-sft"
            if ARMS[name].start == "generic":
                start = str(generic_start(out / "data", steps=budget.lessons))
            keep_start(f"start_{ARMS[name].start}", start, out=out, test=test)
            data = training_set(out / "data", budget.prompts * budget.steps, seed)
            run_arm(name, seed, budget, out=out, model=start, data=data, test=test)
    print(table(recompute(out / "results", read_records(test))))


def again(folder: Path) -> None:
    """`--recompute`: the held-out questions are generated again, nothing else is needed."""
    questions = results(folder)[0]["budget"]["questions"]
    with tempfile.TemporaryDirectory() as scratch:
        print(table(recompute(folder, read_records(test_set(Path(scratch), questions)))))


if __name__ == "__main__":
    main()
