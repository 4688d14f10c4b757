"""``evisrag sft --data FILE --out RUN``: supervised fine-tuning from a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from evisrag_jax.cli import processes
from evisrag_jax.cli.config import ConfigError, parse, to_dataclass

SUMMARY = "fine-tune on tagged responses; started again, it goes on where it stopped"


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_string(
        "data", None, "training records, short for --config.data.path", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "progress", None, "a live bar (default: on a terminal)", flag_values=values
    )
    processes.define(values)


def run(argv: Sequence[str]) -> int:
    """Trains, exports RUN/model, writes RUN/summary.json and prints it as a table."""
    parsed = parse(
        argv,
        command="sft",
        summary=SUMMARY,
        usage="--data FILE --out RUN",
        default_config="sft.py:mini",
        define=_define,
    )
    if parsed.args:
        raise ConfigError(f"sft takes no positional arguments, got {' '.join(parsed.args)}")
    config = parsed.config
    if parsed.flags.data is not None:
        config.data.path = parsed.flags.data
    if not config.data.path:
        raise ConfigError(
            "sft needs training records: --data FILE.jsonl (evisrag validate checks it)"
        )
    if not config.model.path:
        raise ConfigError("sft needs a model folder to start from: --model FOLDER")
    if parsed.out is None:
        raise ConfigError("sft needs a folder for the run: --out RUN")

    from evisrag_jax.runtime.compile_cache import enable_compile_cache
    from evisrag_jax.sft.config import SFTConfig
    from evisrag_jax.sft.trainer import train

    settings = to_dataclass(config, SFTConfig)
    primary = processes.join(parsed.flags)
    enable_compile_cache()
    summary = train(settings, parsed.out, facts=parsed.facts(), progress=parsed.flags.progress)
    if primary:
        _show(summary)
    return 0


def _show(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="evisrag sft", show_header=False)
    for name, value in summary.items():
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        table.add_row(name, text)
    Console().print(table)
