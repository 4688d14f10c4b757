"""``python -m experiments.mini --out DIR``: trains both bundled mini models from scratch.

    reader    tower + word, place and page losses on single pages    → DIR/reader
    lessons   decoder on episodes, tower frozen                      → DIR/lessons
    practice  more of what is hard                                   → DIR/practice
    absences  whether an asked field is among those of its page      → DIR/absences, DIR/mini-ceiling
    habits    a short leg behind an imperfect teacher                → DIR/mini-sft
    rl        `evisrag rl` from mini-sft on fresh train questions    → DIR/rl, DIR/mini
    eval      `evisrag eval` of all three on held-out questions      → DIR/eval-*, printed

Stages that are there already are not run again. Under two hours on two cores; DIR/*.jsonl hold the
curves. The folders to ship are DIR/mini-sft and DIR/mini.
"""

from __future__ import annotations

from pathlib import Path

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.prompts.tokenizer import load_tokenizer
from experiments.mini import reader, sft, tokenizer
from experiments.mini.command import arguments, run
from experiments.mini.export import export
from experiments.mini.shapes import mini_config

READER_STEPS, RL_STEPS = 3100, 240
LESSONS, LESSON_HORIZON = 2500, 3000  # the next leg raises the rate again: the cosine's tail is cut
PRACTICE, PRACTICE_HORIZON, PRACTICE_RATE = 1000, 1500, 1e-3
ABSENCES = ((800, 8e-4), (400, 6e-4))  # two falls of the rate
HABITS, HABIT_RATE = 200, 3e-4


def main() -> None:
    """Runs what is missing."""
    args = arguments("experiments.mini", __doc__, seed={"type": int, "default": 0})
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.build(out / "tokenizer")
    tok = load_tokenizer(out / "tokenizer")
    config = mini_config(len(tok), sft.special_ids(tok))
    if not (out / "reader").is_dir():
        sft.save(out / "reader", reader.train(args.seed, READER_STEPS, out / "reader.jsonl"))
    layout = sft.Layout(tok)
    if not (out / "lessons").is_dir():
        words = sft.load(out / "reader")
        params = sft.init_from_reader(config, words, tokenizer.word_ids(), args.seed)
        make, log = sft.lessons(layout, args.seed), out / "lessons.jsonl"
        params = sft.train(config, layout, params, make, LESSONS, log, horizon=LESSON_HORIZON)
        sft.save(out / "lessons", params)
    if not (out / "practice").is_dir():
        params = sft.load(out / "lessons")
        make, log = sft.practice(layout, args.seed), out / "practice.jsonl"
        leg = {"start": LESSONS, "rate": PRACTICE_RATE, "horizon": PRACTICE_HORIZON}
        params = sft.train(config, layout, params, make, PRACTICE, log, **leg)
        sft.save(out / "practice", params)
    if not (out / "absences").is_dir():
        params, start = sft.load(out / "practice"), LESSONS + PRACTICE
        make, log = sft.absences(layout, args.seed), out / "absences.jsonl"
        for steps, rate in ABSENCES:
            params = sft.train(config, layout, params, make, steps, log, start=start, rate=rate)
            start += steps
        sft.save(out / "absences", params)
        export(params, config, out / "mini-ceiling")
    if not (out / "mini-sft").is_dir():
        params = sft.load(out / "absences")
        make, log = sft.habits(layout, args.seed), out / "habits.jsonl"
        start = LESSONS + PRACTICE + sum(steps for steps, _ in ABSENCES)
        params = sft.train(config, layout, params, make, HABITS, log, start=start, rate=HABIT_RATE)
        export(params, config, out / "mini-sft")
    if not (out / "mini").is_dir():
        rl(out, args.seed)
    for name in ("mini-ceiling", "mini-sft", "mini"):
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


if __name__ == "__main__":
    main()
