"""``evisrag construct``: training sets from raw questions, their pages and what a search ranked for each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, parse, to_dataclass
from evisrag_jax.cli.session import (
    Answering,
    Model,
    SessionError,
    Shapes,
    make_engine,
    make_method,
    open_model,
    setting,
)
from evisrag_jax.construction.config import ConstructionConfig
from evisrag_jax.construction.teacher import Teacher
from evisrag_jax.runtime.remote import ServerConfig
from evisrag_jax.runtime.request_cache import RequestCache

SUMMARY = "make SFT and GRPO sets from raw questions with a teacher; resumes without asking twice"

# What may change when a construction goes on: nothing that a reply or a set depends on.
MAY_DIFFER = (
    *("shapes", "sets.chunk"),
    *(f"server.{name}" for name in ("key_env", "timeout", "attempts", "deadline", "concurrency")),
    *(f"server.{name}" for name in ("price_in", "price_out", "max_cost")),
)


@dataclass(frozen=True)
class RawData:
    """path: raw questions (see `construction.sources`); "" generates `questions` mini-world questions and
    their pages into OUT/data.  image_root: folder that image paths are relative to, "" for the file's own."""

    path: str = ""
    image_root: str = ""
    questions: int = 150
    seed: int = 0

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise SessionError(f"data.questions={self.questions} must be at least 1")


@dataclass(frozen=True)
class ConstructRunConfig:
    """One construction; the fields of configs/construct.py.

    teacher: "local" (`model`, `shapes`) or "server" (`server`).  prompt: of the teacher and of the SFT model.
    difficulty_model: the SFT model; sets.difficulty.samples=0 leaves its stage out.
    """

    data: RawData
    model: Model
    shapes: Shapes
    teacher: str = "local"
    prompt: Answering = field(default_factory=Answering)
    server: ServerConfig = field(default_factory=ServerConfig)
    difficulty_model: Model = field(default_factory=Model)
    sets: ConstructionConfig = field(default_factory=ConstructionConfig)

    def __post_init__(self) -> None:
        if self.teacher not in ("local", "server"):
            raise SessionError(f"teacher={self.teacher!r}; local or server")
        if self.teacher == "server":
            missing = [name for name in ("base_url", "model") if not getattr(self.server, name)]
            if missing:
                raise SessionError(f"server.{missing[0]}: the teacher is a server and needs it")
        elif not self.model.path:
            raise SessionError("model.path: the teacher's folder is needed (--model FOLDER)")
        if self.sets.difficulty.samples and not self.difficulty_model.path:
            raise SessionError(
                "difficulty_model.path: the difficulty filter needs the SFT model's folder "
                "(sets.difficulty.samples=0 leaves the filter out)"
            )


def run(argv: Sequence[str]) -> int:
    """Writes the sets, the sheet for inspection and the report of every drop; prints the counts."""
    parsed = parse(
        argv,
        command="construct",
        summary=SUMMARY,
        usage="--data FOLDER --out RUN",
        default_config="construct.py:mini",
        define=_flags,
    )
    if parsed.args:
        raise ConfigError(f"construct takes no positional arguments, got {' '.join(parsed.args)}")
    if parsed.flags.data is not None:
        parsed.config.data.path = parsed.flags.data
    if parsed.out is None:
        raise ConfigError("construct needs --out RUN, the folder of the run")
    config = to_dataclass(parsed.config, ConstructRunConfig)
    summary = build(config, parsed.out, facts=parsed.facts(), show=parsed.flags.progress)
    _print(summary)
    print(f"{'inspection':28} {parsed.out / 'inspection.html'}")
    return 0


def _flags(values: Any) -> None:
    from absl import flags

    flags.DEFINE_string(
        "data", None, "raw questions, short for --config.data.path", flag_values=values
    )
    flags.DEFINE_bool("progress", None, "a live bar (default: on a terminal)", flag_values=values)


def build(
    config: ConstructRunConfig,
    out: Path,
    *,
    facts: dict[str, Any] | None = None,
    show: bool | None = None,
) -> dict[str, Any]:
    """The construction in a run folder, and its sheet for inspection; returns the summary.

    Raises:
        SessionError: settings that cannot be, or no usable question.
        RunFolderError: the folder holds the sets of another config; lists the differences.
        SplitError, BudgetExceeded: see `construction.pipeline.construct`.
    """
    from evisrag_jax.construction.pipeline import Source, construct
    from evisrag_jax.reporting.inspection import write_inspection
    from evisrag_jax.runtime.compile_cache import enable_compile_cache
    from evisrag_jax.runtime.run_folder import RunFolder

    enable_compile_cache()
    begin = time.perf_counter()
    with RunFolder(out) as folder:
        folder.start(config, resume=True, may_differ=MAY_DIFFER, **(facts or {}))
        path = config.data.path or str(_generated(out / "data", config.data))
        with _bar(show) as progress:
            summary = construct(
                Source(path, config.data.image_root),
                out,
                config.sets,
                make_teacher=lambda cache: make_teacher(config, cache),
                make_solver=(lambda: make_solver(config))
                if config.sets.difficulty.samples
                else None,
                progress=progress,
            )
        sheet = write_inspection(out)
        summary = {
            "command": "construct",
            "data": path,
            **summary,
            "inspection": str(sheet),
            "seconds": round(time.perf_counter() - begin, 3),
        }
        folder.write_summary(summary)
    return summary


def _generated(folder: Path, data: RawData) -> Path:
    """The mini-world corpus of these settings; equal settings write equal bytes."""
    from evisrag_jax.data.miniworld.corpus import write_corpus

    return write_corpus(folder, data.questions, "train", data.seed)


def make_teacher(config: ConstructRunConfig, cache: RequestCache) -> Teacher:
    """The configured teacher; a server's replies go into `cache`."""
    if config.teacher == "local":
        return _local(config, config.model, config.sets.filters.samples)
    from evisrag_jax.construction.teacher import ServerTeacher
    from evisrag_jax.prompts.template import load_template

    prompt = config.prompt
    with setting("prompt.template"):
        template = load_template(prompt.template)
    return ServerTeacher(
        config.server,
        cache,
        template,
        prompt.sampling,
        system=prompt.system,
        images_first=prompt.images_first,
        seed=prompt.seed,
    )


def make_solver(config: ConstructRunConfig) -> Teacher:
    """The SFT model as one that answers."""
    return _local(config, config.difficulty_model, config.sets.difficulty.samples)


def _local(config: ConstructRunConfig, model: Model, samples: int) -> Teacher:
    from evisrag_jax.construction.teacher import LocalTeacher, fingerprint

    pretrained = open_model(model)
    method = make_method(config.prompt, pretrained)
    engine = make_engine(pretrained, config.shapes.table())
    weights = {"path": model.path, "dtype": model.dtype, "files": fingerprint(pretrained.folder)}
    return LocalTeacher(method, engine, samples, weights)


@contextmanager
def _bar(show: bool | None) -> Iterator[Callable[[str, int, int | None], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = not (console.is_terminal if show is None else show)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield progress


def _print(summary: dict[str, Any], prefix: str = "") -> None:
    for name, value in summary.items():
        if isinstance(value, dict):
            _print(value, f"{prefix}{name}/")
        else:
            print(f"{prefix + name:28} {value}", file=sys.stdout)
