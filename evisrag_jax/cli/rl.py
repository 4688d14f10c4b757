"""``evisrag rl``: reinforcement learning with scoped rewards from a fine-tuned model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evisrag_jax.cli import processes
from evisrag_jax.cli.config import ConfigError, parse, to_dataclass

SUMMARY = "train with RS-GRPO, or another recipe, on rewards that reach the tokens they judge"


def run(argv: Sequence[str]) -> int:
    """Trains into --out, exports OUT/model, writes the report; the same command resumes."""
    parsed = parse(
        argv,
        command="rl",
        summary=SUMMARY,
        usage="--model FOLDER --data FILE --out RUN",
        default_config="rl.py:mini",
        define=_flags,
    )
    if parsed.args:
        raise ConfigError(f"rl takes no positional arguments, got {' '.join(parsed.args)}")
    config = parsed.config
    if parsed.flags.data is not None:
        config.data.path = parsed.flags.data
    if not config.data.path:
        raise ConfigError(
            "rl needs training records: --data FILE.jsonl (evisrag validate checks it)"
        )
    if not config.model.path:
        raise ConfigError("rl needs a fine-tuned model folder to start from: --model FOLDER")
    if parsed.out is None:
        raise ConfigError("rl needs --out RUN, the folder of the run")
    from evisrag_jax.reporting.page import write_report
    from evisrag_jax.rl.config import RLRunConfig
    from evisrag_jax.rl.run import train
    from evisrag_jax.runtime.compile_cache import enable_compile_cache

    settings = to_dataclass(config, RLRunConfig)
    primary = processes.join(parsed.flags)
    enable_compile_cache()
    summary = train(
        settings,
        parsed.out,
        make_validate=make_validate,
        facts=parsed.facts(),
        progress=parsed.flags.progress,
    )
    if not primary:
        return 0
    for name, value in summary.items():
        print(f"{name:20} {value}")
    print(f"{'report':20} {write_report(parsed.out)}")
    return 0


def _flags(values: Any) -> None:
    from absl import flags

    flags.DEFINE_string(
        "data", None, "training records, short for --config.data.path", flag_values=values
    )
    flags.DEFINE_bool("progress", None, "a live bar (default: on a terminal)", flag_values=values)
    processes.define(values)


def make_validate(run: Any) -> Callable[[Any, int], Mapping[str, Any]]:
    """eval/accuracy, f1, format and evidence of greedy answers on `data.validation`."""
    import jax

    from evisrag_jax.cli.session import read_set
    from evisrag_jax.evaluation.suite import evaluate
    from evisrag_jax.methods.one_call import OneCall
    from evisrag_jax.rollout.sampling import SamplingConfig

    data, config = run.config.data, run.config
    records, _ = read_set(data.validation, data.image_root)
    method = OneCall(
        template=run.template,
        budget=run.pretrained.budget,
        sampling=SamplingConfig(temperature=0.0, max_tokens=run.rl.max_tokens),
        images_first=data.images_first,
        system=data.system or None,
        exif_transpose=data.exif_transpose,
        on_error="record",
        pages=run.cache,
        features=run.features,
    )

    def validate(params: Any, step: int) -> Mapping[str, Any]:
        run.engine.set_params(params)
        if run.features is not None:
            run.features.take(params)
        try:
            summary = evaluate(
                records,
                method,
                run.engine,
                limit=config.eval_limit or None,
                chunk=run.rl.prompts // jax.process_count(),
                share=(jax.process_index(), jax.process_count()),
                resamples=100,
                progress=False,
            )
        finally:
            run.engine.set_params(None)  # or it would hold a copy through the next updates
        names = ("accuracy", "em", "f1", "format_rate", "evidence_f1")
        return {f"eval/{name}": summary[name] for name in names if summary.get(name) is not None}

    return validate
