"""A run that is killed again and again must end like one that was left alone.

    python tools/soak_resume.py --kills 20
    python tools/soak_resume.py --kills 3 --steps 20 --out /tmp/soak

`evisrag rl` trains the bundled mini-sft on generated pages with RS-GRPO: few prompts, the filter on, so
that groups are dropped and a step may need a second rollout. The run is made once in peace and once
under SIGKILL, each time started again with the same command. A kill is aimed by turns

    step      somewhere in the step after a given one
    save      after a checkpoint's temporary folder has appeared, while it is being written
    start     at a random moment after the start of the process, which may be before its first step

Compared at the end, to the bit: the last checkpoint (parameters, moments, counters, data position), the
exported weights, every metric but those of a process (clock, compiles, caches), the rollouts of every
step, which hold the ids of its records in their order, and the rejected records. Prints kills, kills
inside a save, restarts, the steps each kill lost and the differences; the exit code is 1 if there is a
difference, or if a kill lost more than the save interval and the step at work.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

SAVE_EVERY = 3
MARGIN = 15  # steps that no kill aims at, or the run could end before the last one
KINDS = ("step", "save", "step", "start", "save")
PROCESS = ("time", "compile", "cache")  # metrics of one process, which no two runs share
TICK = 0.002  # seconds between two looks at the run folder


def get_config(steps: str = "60") -> Any:
    """The run's config (`--config=tools/soak_resume.py:STEPS`)."""
    from evisrag_jax.cli.config import load_config

    config, _ = load_config("rl.py:mini")
    with config.unlocked():
        config.steps = int(steps)
        config.rl.update(prompts=4, group=4, max_tokens=48, tries=2)
        config.rl.filter = {"rule": "both", "low": 0.01, "high": 6.9, "min_spread": 1e-6}
        config.rl.optim.learning_rate = 1e-4
        config.update(save_every=SAVE_EVERY, rollouts_every=1, rollout_rows=4)
        config.update(tensorboard=False, export_dtype="float32")
        config.data.update(threads=2, ahead=8)
    return config


def command(out: Path, data: Path, steps: int) -> list[str]:
    """What starts the run, and starts it again."""
    return [
        *(sys.executable, "-m", "evisrag_jax.cli.main", "rl", "--noprogress"),
        *(f"--config={Path(__file__).resolve()}:{steps}", f"--data={data}", f"--out={out}"),
    ]


class Kill(NamedTuple):
    """One SIGKILL: what it was aimed at, the last whole step, the step to go on from (None: from
    nothing), whether a checkpoint was being written."""

    kind: str
    reached: int
    saved: int | None
    inside_save: bool

    @property
    def lost(self) -> int:
        """Steps that have to be made again."""
        return self.reached - (self.saved or 0)


def last_step(out: Path) -> int:
    """The last step with a whole row in metrics.jsonl; 0 without one."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def saved_step(out: Path) -> int | None:
    """The last committed checkpoint."""
    folder = out / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=None)


def being_saved(out: Path) -> set[str]:
    """Names of the folders that checkpoints are written in before they are renamed."""
    folder = out / "checkpoints"
    return {p.name for p in folder.iterdir() if "tmp" in p.name} if folder.is_dir() else set()


class Victim:
    """The run as a process that is started, watched and killed."""

    def __init__(self, argv: list[str], out: Path, log: Path, rng: random.Random):
        self.argv, self.out, self.log, self.rng = argv, out, log, rng
        self.process: subprocess.Popen | None = None
        self.starts = 0

    def start(self) -> None:
        """Starts it, again or for the first time."""
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=subprocess.STDOUT)

    def wait_until(self, reached: Any) -> bool:
        """True once `reached()` holds; False when the process has ended before."""
        while not reached():
            if self.process.poll() is not None:
                return False
            time.sleep(TICK)
        return True

    def kill(
        self, kind: str, target: int, step_seconds: float, start_seconds: float
    ) -> Kill | None:
        """Kills it at a moment of the kind, not before step `target`; None if it ended by itself."""
        begun = time.perf_counter()
        old = being_saved(self.out)
        if kind == "start":
            delay = self.rng.uniform(0, 1.2 * start_seconds)
            alive = self.wait_until(lambda: time.perf_counter() - begun > delay)
        else:
            alive = self.wait_until(lambda: last_step(self.out) >= target)
            if alive and kind == "save":
                alive = self.wait_until(lambda: being_saved(self.out) - old)
                time.sleep(self.rng.uniform(0, 0.05))
            elif alive:
                time.sleep(self.rng.uniform(0, step_seconds))
        if not alive or self.process.poll() is not None:
            return None
        self.process.kill()
        self.process.wait()
        inside = bool(being_saved(self.out) - old)
        return Kill(kind, last_step(self.out), saved_step(self.out), inside)

    def finish(self) -> int:
        """Lets it end; its exit code."""
        return self.process.wait()


def soak(argv: list[str], out: Path, log: Path, kills: int, steps: int, rng: random.Random, times):
    """Starts and kills the run `kills` times, then lets it end; the kills, in order, and the starts."""
    targets = sorted(rng.sample(range(1, steps - MARGIN), kills))
    done: list[Kill] = []
    victim = Victim(argv, out, log, rng)
    victim.start()
    for number, target in enumerate(targets):
        killed = victim.kill(KINDS[number % len(KINDS)], target, *times)
        if killed is None:
            raise SystemExit(
                f"the run ended by itself (exit code {victim.process.returncode}) before kill "
                f"{number + 1} of {kills}; its output is in {log}"
            )
        done.append(killed)
        print(
            f"kill {number + 1:2}/{kills}  {killed.kind:5}  after step {killed.reached:3}  goes on "
            f"from {killed.saved or 0:3}  lost {killed.lost}"
            + ("  inside a save" if killed.inside_save else ""),
            flush=True,
        )
        victim.start()
    code = victim.finish()
    if code:
        raise SystemExit(f"the run failed with exit code {code}; its output is in {log}")
    return done, victim.starts


def rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file without what belongs to one process."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(PROCESS)}
        for line in lines
    ]


def differences(a: Path, b: Path) -> list[str]:
    """What two finished run folders do not share, a line each; [] for runs equal to the bit."""
    found = []
    left, right = rows(a / "metrics.jsonl"), rows(b / "metrics.jsonl")
    if len(left) != len(right):
        found.append(f"metrics.jsonl: {len(left)} and {len(right)} rows")
    for x, y in zip(left, right, strict=False):
        names = [name for name in {**x, **y} if x.get(name) != y.get(name)]
        found += [f"step {x['step']}: {n} {x.get(n)} and {y.get(n)}" for n in sorted(names)]
    for name in sorted({p.name for folder in (a, b) for p in (folder / "rollouts").glob("*")}):
        if not same_file(a / "rollouts" / name, b / "rollouts" / name):
            found.append(f"rollouts/{name}: other records, tokens or rewards")
    for name in ("rejected.jsonl", "config.json", "model/model.safetensors"):
        if not same_file(a / name, b / name):
            found.append(f"{name}: other content")
    return found + checkpoint_differences(a, b)


def same_file(a: Path, b: Path) -> bool:
    """Both absent, or both there with the same bytes."""
    if not (a.exists() and b.exists()):
        return a.exists() == b.exists()
    return a.read_bytes() == b.read_bytes()


def checkpoint_differences(a: Path, b: Path) -> list[str]:
    """The last checkpoints compared leaf by leaf, with the JSON facts beside them."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    steps = [saved_step(folder) for folder in (a, b)]
    if steps[0] != steps[1] or steps[0] is None:
        return [f"last checkpoints: steps {steps[0]} and {steps[1]}"]
    folders = [folder.absolute() / "checkpoints" / str(steps[0]) for folder in (a, b)]
    found = []
    if not same_file(*(folder / "extra" / "metadata" for folder in folders)):
        found.append("checkpoint: other data position, counters or identity")
    for item in ("params", "rest"):
        with ocp.PyTreeCheckpointer() as reader, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Orbax takes the sharding from the files, as it should
            trees = [reader.restore(folder / item) for folder in folders]
        leaves = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in trees]
        for path in {**leaves[0], **leaves[1]}:
            x, y = (np.asarray(side.get(path)) for side in leaves)
            if x.dtype != y.dtype or x.tobytes() != y.tobytes():
                found.append(f"checkpoint: {item}{jax.tree_util.keystr(path)} differs")
    return found


def main(argv: list[str] | None = None) -> int:
    """Both runs and their comparison; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs")
    parser.add_argument("--steps", type=int, default=75, help="RS-GRPO steps")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--out", type=Path, help="keeps the two run folders here (must be new)")
    given = parser.parse_args(argv)
    if given.kills < 1 or given.steps <= given.kills + MARGIN:
        parser.error(f"--kills must be at least 1 and --steps above kills + {MARGIN}")
    if given.out is not None and given.out.exists():
        parser.error(f"{given.out} exists already")
    out = given.out or Path(tempfile.mkdtemp(prefix="soak-"))
    out.mkdir(parents=True, exist_ok=True)
    try:
        return run(out, given.kills, given.steps, given.seed)
    finally:
        if given.out is None:
            shutil.rmtree(out, ignore_errors=True)


def run(out: Path, kills: int, steps: int, seed: int) -> int:
    """The soak in a folder; 0 when nothing differs."""
    from evisrag_jax.data.miniworld.files import write_dataset

    data = write_dataset(out / "data", 4 * steps, "train", 0)
    spoil(data)
    begin = time.perf_counter()
    peace = out / "peace"
    with (out / "peace.log").open("wb") as log:
        done = subprocess.run(command(peace, data, steps), stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"the uninterrupted run failed; its output is in {out / 'peace.log'}")
    seconds = time.perf_counter() - begin
    clock = [json.loads(line) for line in (peace / "metrics.jsonl").open()]
    step_seconds = sorted(row["time/step"] for row in clock)[len(clock) // 2]
    start_seconds = max(1.0, seconds - sum(row["time/step"] for row in clock[1:]))
    print(
        f"uninterrupted: {steps} steps in {seconds:.0f} s, {step_seconds:.2f} s a step", flush=True
    )

    times = (step_seconds, start_seconds)
    killed = out / "killed"
    argv, log = command(killed, data, steps), out / "killed.log"
    happened, starts = soak(argv, killed, log, kills, steps, random.Random(seed), times)
    found = differences(peace, killed)
    lost = [kill.lost for kill in happened]
    inside = sum(kill.inside_save for kill in happened)
    kept = [row["filter/kept"] for row in clock]
    print(f"kills {len(happened)}, inside a save {inside}, restarts {starts - 1}")
    print(f"lost steps {sum(lost)}, at most {max(lost)} a kill (save interval {SAVE_EVERY})")
    print(f"groups kept a step {min(kept):.0f} to {max(kept):.0f} of 4, records rejected "
          f"{len(rows(peace / 'rejected.jsonl'))}")  # fmt: skip
    print(f"differences {len(found)}, {time.perf_counter() - begin:.0f} s")
    for line in found[:20]:
        print(f"  {line}")
    return int(bool(found) or max(lost) > SAVE_EVERY + 1)


def spoil(data: Path) -> None:
    """Cuts one page, so that a record is rejected while the run goes on."""
    row = json.loads(data.read_text(encoding="utf-8").splitlines()[5])
    page = data.parent / row["images"][0]
    page.write_bytes(page.read_bytes()[:150])


if __name__ == "__main__":
    sys.exit(main())
