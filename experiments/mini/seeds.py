"""``python -m experiments.mini.seeds --out DIR``: the quickstart under several seeds, as a table.

Seeds change the training questions and the sampling; the 200 held-out questions and the model at the
start are the same. Seeds that are done are not run again. DIR/seeds.md holds the table.
"""

from __future__ import annotations

from evisrag_jax.runtime.json_files import read_json
from experiments.mini.command import arguments, run

COLUMNS = ("seed", "accuracy before", "after", "gain (95 % interval)", "evidence F1", "format")


def main() -> None:
    """Runs what is missing and writes the table."""
    seeds = {"type": int, "nargs": "+", "default": [0, 1, 2, 3]}
    args = arguments("experiments.mini.seeds", __doc__, seeds=seeds)
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    for seed in args.seeds:
        out = args.out / f"seed-{seed}"
        summary = out / "summary.json"
        if not (summary.is_file() and read_json(summary).get("command") == "quickstart"):
            run("quickstart", "--out", out, "--seed", seed, "--noopen")
        lines.append(_row(_cells(seed, read_json(summary))))
    table = "\n".join(lines) + "\n"
    (args.out / "seeds.md").write_text(table, encoding="utf-8")
    print(table)


def _cells(seed: int, s: dict) -> list[str]:
    gain = s["gain"]
    return [
        str(seed),
        f"{s['accuracy_before']:.3f}",
        f"{s['accuracy_after']:.3f}",
        f"{gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})",
        f"{s['eval_before']['evidence_f1']:.3f} → {s['evidence_after']:.3f}",
        f"{s['format_after']:.3f}",
    ]


def _row(cells) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
