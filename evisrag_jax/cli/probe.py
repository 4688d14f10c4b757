"""``evisrag probe ced``: whether responses depend on their evidence regions more than on others.

    questions with boxes ─G responses each─► interventions ─► OUT/ced.jsonl ─► OUT/summary.json, OUT/ced.png

Started again with the same config it goes on behind the questions that ced.jsonl holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, parse, to_dataclass
from evisrag_jax.cli.eval import EvalData, generated
from evisrag_jax.cli.session import (
    Answering,
    Model,
    SessionError,
    make_engine,
    make_method,
    open_model,
    read_set,
)
from evisrag_jax.rewards.ced.config import CedConfig

SUMMARY = "probe what answers depend on: `probe ced`, evidence regions against others"
KINDS = ("ced",)
ROWS = "ced.jsonl"


@dataclass(frozen=True)
class CedProbeConfig:
    """One probe; the fields of configs/probe_ced.py.

    prompts, pages, windows, tokens, prompt_length: the one shape of a batch (pages a prompt, windows and
    merged tokens a page).  group: responses a question.  scope: what is scored, see
    `evaluation.ced_probe.scored_tokens`.  blindfold: also on uniform pages.  perturb: also moved, scaled
    and random regions.  pictures: questions whose masked tokens are drawn into OUT/regions.
    """

    model: Model
    data: EvalData
    prompts: int
    pages: int
    windows: int
    tokens: int
    prompt_length: int
    method: Answering = field(default_factory=Answering)
    group: int = 6
    scope: str = "records"
    blindfold: bool = True
    perturb: bool = True
    pictures: int = 3
    ced: CedConfig = field(default_factory=CedConfig)

    def __post_init__(self) -> None:
        from evisrag_jax.evaluation.ced_probe import SCOPES

        if self.scope not in SCOPES:
            raise SessionError(f"scope={self.scope!r}; one of {', '.join(SCOPES)}")
        if self.group < 1 or self.pictures < 0:
            raise SessionError(
                f"group={self.group} must be at least 1, pictures={self.pictures} not negative"
            )


def run(argv: Sequence[str]) -> int:
    """Writes rows, summary and figure into --out and prints a table."""
    words = list(argv)
    kind = words.pop(0) if words and not words[0].startswith("-") else None
    parsed = parse(
        words,
        command="probe ced",
        summary=SUMMARY,
        usage="[--data FILE] --out DIR",
        default_config="probe_ced.py:mini",
        define=_flags,
    )
    if kind not in KINDS or parsed.args:
        raise ConfigError(f"probe takes one of {', '.join(KINDS)} and then flags; got {kind!r}")
    if parsed.out is None:
        raise ConfigError("probe ced needs --out DIR, the folder for rows, summary and figure")
    if parsed.flags.data is not None:
        parsed.config.data.path = parsed.flags.data
    summary = probe_ced(to_dataclass(parsed.config, CedProbeConfig), parsed.out)
    from evisrag_jax.reporting.ced import format_table

    print(format_table(summary))
    return 0


def _flags(values: Any) -> None:
    from absl import flags

    flags.DEFINE_string("data", None, "short for --config.data.path", flag_values=values)


def probe_ced(config: CedProbeConfig, out: Path) -> dict[str, Any]:
    """One probe into the folder `out`; returns its summary.

    Raises:
        SessionError: a set without a question that has evidence boxes.
        RunFolderError: the folder holds rows of another config; lists the differences.
    """
    from rich.progress import Progress

    from evisrag_jax.evaluation.ced_probe import BLINDFOLD, probe_batch, summarise_probe
    from evisrag_jax.evaluation.proposals import NAMES
    from evisrag_jax.reporting.ced import draw_figure
    from evisrag_jax.runtime.compile_cache import enable_compile_cache
    from evisrag_jax.runtime.json_files import dump_row, read_jsonl
    from evisrag_jax.runtime.run_folder import RunFolder
    from evisrag_jax.training.batching import Bucket

    enable_compile_cache()
    bucket = Bucket(
        prompts=config.prompts,
        images=config.pages,
        windows=config.windows,
        tokens=config.tokens,
        prompt_length=config.prompt_length,
        group=config.group,
        response_length=config.method.sampling.max_tokens,
    )
    with RunFolder(out) as folder:
        path, rows = out / ROWS, []
        resumed = path.is_file()
        if resumed:
            rows = list(read_jsonl(path))
        data = config.data.path or str(generated(out / "data", config.data, fresh=not resumed))
        records, _ = read_set(data, config.data.image_root)
        folder.start(config, resume=resumed, may_differ=("data.limit", "pictures"))
        known = {row["id"] for row in rows}
        chosen = [record for record in records if record.boxes and any(record.boxes)]
        if not chosen:
            raise SessionError(f"{data}: none of its {len(records)} questions has evidence boxes")
        chosen = chosen[: config.data.limit or None]
        waiting = [record for record in chosen if record.id not in known]
        names = (*(NAMES if config.perturb else NAMES[:2]), *(BLINDFOLD,) * config.blindfold)
        pretrained = open_model(config.model)
        ask = _asker(config, pretrained)
        with path.open("a", encoding="utf-8") as file, Progress(transient=True) as bar:
            task = bar.add_task("probing", total=len(waiting))
            for start in range(0, len(waiting), config.prompts):
                part = ask(waiting[start : start + config.prompts])
                new = probe_batch(
                    pretrained.params,
                    pretrained.config,
                    part,
                    bucket,
                    pretrained.layout,
                    config.ced,
                    config.scope,
                    names,
                )
                file.writelines(map(dump_row, new))
                file.flush()
                rows += new
                if start < config.pictures:
                    _draw(part[: config.pictures - start], pretrained, config, out / "regions")
                bar.advance(task, len(part))
        wanted = {record.id for record in chosen}
        rows = [row for row in rows if row["id"] in wanted]
        summary = {
            "command": "probe ced",
            "model": config.model.path,
            "data": data,
            "scope": config.scope,
            "without_boxes": len(records) - len(chosen) if not config.data.limit else None,
            **summarise_probe(rows, config.ced),
        }
        folder.write_summary(summary)
        draw_figure(summary, out / "ced.png")
    return summary


def _draw(questions: Sequence[Any], pretrained: Any, config: CedProbeConfig, folder: Path) -> None:
    """The masked tokens of these questions' pages."""
    from evisrag_jax.pages.decode import load_page
    from evisrag_jax.reporting.ced import draw_regions
    from evisrag_jax.rewards.ced.audit import evidence_grids
    from evisrag_jax.rewards.ced.controls import draw_controls

    folder.mkdir(exist_ok=True)
    for number, one in enumerate(questions):
        item, options = one.item, config.ced.region
        evidence = evidence_grids(item.record.boxes, item.pages, pretrained.layout, options.rule)
        controls = draw_controls(evidence, item.id, options).regions
        shown = [
            load_page(path, exif_transpose=config.method.exif_transpose)
            for path in item.record.images[: len(item.pages)]
        ]
        draw_regions(shown, item.record.boxes, evidence, controls, folder / f"{number}.png")


def _asker(config: CedProbeConfig, pretrained: Any) -> Any:
    """records → their prompts and responses."""
    from evisrag_jax.evaluation.ced_probe import Probed
    from evisrag_jax.rollout.buckets import bucket_table
    from evisrag_jax.training.batching import Prepared

    sampling = config.method.sampling
    table = bucket_table(
        prompts=(config.prompts,),
        pages=((config.pages, config.windows, config.tokens),),
        lengths=(config.prompt_length,),
        responses=(sampling.max_tokens,),
    )
    engine, method = make_engine(pretrained, table), make_method(config.method, pretrained)

    def ask(records: Sequence[Any]) -> list[Probed]:
        requests = [method.request(record, engine) for record in records]
        done = engine.generate(requests, sampling, group=config.group, seed=config.method.seed)
        return [
            Probed(Prepared(r.id, r.prompt, tuple(r.pages), None, record), list(group))
            for r, record, group in zip(requests, records, done, strict=True)
        ]

    return ask
