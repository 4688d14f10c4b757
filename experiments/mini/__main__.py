"""``python -m experiments.mini --out DIR``: trains both bundled mini models from scratch.

    reader  tower + word, place and page losses on single pages      → DIR/reader
    sft     decoder on episodes, tower frozen                        → DIR/sft-STEP, DIR/mini-sft
    rl      `evisrag rl` from mini-sft on fresh train questions      → DIR/rl, DIR/mini
    eval    `evisrag eval` of both on held-out questions             → DIR/eval-*, printed

Stages that are there already are not run again. About two hours on two cores; DIR/*.jsonl hold the
curves. The folders to ship are DIR/mini-sft and DIR/mini.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evisrag_jax.cli import main as cli
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.prompts.tokenizer import load_tokenizer
from experiments.mini import reader, sft, tokenizer
from experiments.mini.export import export
from experiments.mini.shapes import mini_config

READER_STEPS, SFT_STEPS, RL_STEPS = 3100, 2400, 240


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.mini",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-at", type=int, default=SFT_STEPS, help="SFT step of mini-sft")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.build(out / "tokenizer")
    tok = load_tokenizer(out / "tokenizer")
    config = mini_config(len(tok), sft.special_ids(tok))
    if not (out / "reader").is_dir():
        sft.save(out / "reader", reader.train(args.seed, READER_STEPS, out / "reader.jsonl"))
    if not (out / f"sft-{args.start_at}").is_dir():
        words = sft.load(out / "reader")
        params = sft.init_from_reader(config, words, tokenizer.word_ids(), args.seed)
        keep = {args.start_at, SFT_STEPS}
        sft.train(config, tok, params, args.seed, SFT_STEPS, out / "sft.jsonl", out, keep=keep)
    if not (out / "mini-sft").is_dir():
        export(sft.load(out / f"sft-{args.start_at}"), config, out / "mini-sft")
    if not (out / "mini").is_dir():
        rl(out, args.seed)
    for name in ("mini-sft", "mini"):
        if not (out / f"eval-{name}" / "summary.json").is_file():
            run("eval", "--model", out / name, "--out", out / f"eval-{name}")


def rl(out: Path, seed: int) -> None:
    """The long RS-GRPO run behind `mini`."""
    data = write_dataset(out / "data", 16 * RL_STEPS, "train", seed + 100)
    run(
        "rl",
        "--config=rl.py:mini",
        "--model",
        out / "mini-sft",
        "--data",
        data,
        "--out",
        out / "rl",
        f"--config.steps={RL_STEPS}",
        f"--config.seed={seed}",
    )
    (out / "rl" / "model").rename(out / "mini")


def run(*argv: object) -> None:
    """One `evisrag` command; ends the program if it fails."""
    if code := cli.main([str(word) for word in argv]):
        raise SystemExit(code)


if __name__ == "__main__":
    main()
