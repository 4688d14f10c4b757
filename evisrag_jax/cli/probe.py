"""``evisrag probe ced`` and ``evisrag probe attention``: what responses depend on, and where they look.

    questions with boxes ─G responses each─┬─ interventions ─► OUT/ced.jsonl ─────► summary.json, ced.png
                                           └─ attention ─────► OUT/attention.jsonl ─► …, attention.png

Started again with the same config a probe goes on behind the questions that its rows hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, parse, to_dataclass
from evisrag_jax.cli.eval import generated
from evisrag_jax.cli.probing import ProbeConfig, asker, with_boxes
from evisrag_jax.cli.session import SessionError, open_model, read_set

SUMMARY = "what answers depend on (`probe ced`) and where they look (`probe attention`)"


@dataclass(frozen=True)
class CedProbeConfig(ProbeConfig):
    """The fields of configs/probe_ced.py.  blindfold: also on uniform pages.  perturb: also moved, scaled
    and random regions.  pictures: questions whose masked tokens are drawn into OUT/regions."""

    blindfold: bool = True
    perturb: bool = True
    pictures: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pictures < 0:
            raise SessionError(f"pictures={self.pictures} must not be negative")


@dataclass(frozen=True)
class AttentionProbeConfig(ProbeConfig):
    """The fields of configs/probe_attention.py.  row: "own", the query of a token, or "predicting", of the
    one before.  layers: to average over, none for the last half.  sections: scopes beside "all"."""

    row: str = "own"
    layers: tuple[int, ...] = ()
    sections: tuple[str, ...] = ("observe", "evidence", "think", "answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row not in ("own", "predicting"):
            raise SessionError(f"row={self.row!r}; own or predicting")


def run(argv: Sequence[str]) -> int:
    """Writes rows, summary and figure into --out and prints a table."""
    words = list(argv)
    kind = words.pop(0) if words and not words[0].startswith("-") else None
    parsed = parse(
        words,
        command=f"probe {kind or 'ced'}",
        summary=SUMMARY,
        usage="[--data FILE] --out DIR",
        default_config=f"probe_{kind if kind in KINDS else 'ced'}.py:mini",
        define=_flags,
    )
    if kind not in KINDS or parsed.args:
        raise ConfigError(f"probe takes one of {', '.join(KINDS)} and then flags; got {kind!r}")
    if parsed.out is None:
        raise ConfigError(f"probe {kind} needs --out DIR, the folder for rows, summary and figure")
    if parsed.flags.data is not None:
        parsed.config.data.path = parsed.flags.data
    print(KINDS[kind](parsed.config, parsed.out))
    return 0


def _flags(values: Any) -> None:
    from absl import flags

    flags.DEFINE_string("data", None, "short for --config.data.path", flag_values=values)


def _ced(config: Any, out: Path) -> str:
    from evisrag_jax.reporting.ced import format_table

    return format_table(probe_ced(to_dataclass(config, CedProbeConfig), out))


def _attention(config: Any, out: Path) -> str:
    from evisrag_jax.reporting.attention import format_table

    return format_table(probe_attention(to_dataclass(config, AttentionProbeConfig), out))


KINDS: dict[str, Callable[[Any, Path], str]] = {"ced": _ced, "attention": _attention}


def probe_ced(config: CedProbeConfig, out: Path) -> dict[str, Any]:
    """One probe of interventions into the folder `out`; returns its summary.

    Raises:
        SessionError: a set without a question that has evidence boxes.
        RunFolderError: the folder holds rows of another config; lists the differences.
    """
    from evisrag_jax.evaluation.ced_probe import BLINDFOLD, probe_batch, summarise_probe
    from evisrag_jax.evaluation.proposals import NAMES
    from evisrag_jax.reporting.ced import draw_figure

    names = (*(NAMES if config.perturb else NAMES[:2]), *(BLINDFOLD,) * config.blindfold)

    def measure(part: list[Any], pretrained: Any, first: int) -> list[dict[str, Any]]:
        if first < config.pictures:
            _draw(part[: config.pictures - first], pretrained, config, out / "regions")
        return probe_batch(
            pretrained.params,
            pretrained.config,
            part,
            config.bucket,
            pretrained.layout,
            config.ced,
            config.scope,
            names,
        )

    def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return summarise_probe(rows, config.ced)

    summary = _probe(config, out, "ced", measure, summarise)
    draw_figure(summary, out / "ced.png")
    return summary


def probe_attention(config: AttentionProbeConfig, out: Path) -> dict[str, Any]:
    """One probe of attention into the folder `out`, with the counterfactual margins of the same responses
    to correlate with; returns its summary. Raises as `probe_ced`."""
    from evisrag_jax.evaluation.attention_rows import attention_batch, summarise_attention_rows
    from evisrag_jax.evaluation.ced_probe import probe_batch
    from evisrag_jax.reporting.attention import draw_figure

    def measure(part: list[Any], pretrained: Any, first: int) -> list[dict[str, Any]]:
        model = (pretrained.params, pretrained.config)
        shape = (config.bucket, pretrained.layout)
        rows = probe_batch(*model, part, *shape, config.ced, config.scope, ("evidence",))
        return attention_batch(
            *model,
            part,
            rows,
            *shape,
            config.ced.region.rule,
            sections=config.sections,
            row=config.row,
            layers=config.layers or None,
        )

    summary = _probe(config, out, "attention", measure, summarise_attention_rows)
    draw_figure(summary, out / "attention.png")
    return summary


def _probe(
    config: ProbeConfig,
    out: Path,
    kind: str,
    measure: Callable[[list[Any], Any, int], list[dict[str, Any]]],
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Rows of the questions that the folder lacks, then the summary of all."""
    from rich.progress import Progress

    from evisrag_jax.runtime.compile_cache import enable_compile_cache
    from evisrag_jax.runtime.json_files import dump_row, read_jsonl
    from evisrag_jax.runtime.run_folder import RunFolder

    enable_compile_cache()
    with RunFolder(out) as folder:
        path, rows = out / f"{kind}.jsonl", []
        resumed = path.is_file()
        if resumed:
            rows = list(read_jsonl(path))
        data = config.data.path or str(generated(out / "data", config.data, fresh=not resumed))
        records, _ = read_set(data, config.data.image_root)
        boxed = with_boxes(records, data)
        chosen = boxed[: config.data.limit or None]
        known = {row["id"] for row in rows}
        waiting = [record for record in chosen if record.id not in known]
        if waiting:
            pretrained = open_model(config.model)
            ask = asker(config, pretrained)
        folder.start(config, resume=resumed, may_differ=("data.limit", "pictures"))
        with path.open("a", encoding="utf-8") as file, Progress(transient=True) as bar:
            task = bar.add_task("probing", total=len(waiting))
            for start in range(0, len(waiting), config.prompts):
                part = ask(waiting[start : start + config.prompts])
                new = measure(part, pretrained, len(known) + start)
                file.writelines(map(dump_row, new))
                file.flush()
                rows += new
                bar.advance(task, len(part))
        wanted = {record.id for record in chosen}
        summary = {
            "command": f"probe {kind}",
            "model": config.model.path,
            "data": data,
            "scope": config.scope,
            "without_boxes": len(records) - len(boxed),
            **summarise([row for row in rows if row["id"] in wanted]),
        }
        folder.write_summary(summary)
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
        controls = draw_controls(evidence, item.id, options, ink=one.ink).regions
        shown = [
            load_page(path, exif_transpose=config.method.exif_transpose)
            for path in item.record.images[: len(item.pages)]
        ]
        draw_regions(shown, item.record.boxes, evidence, controls, folder / f"{number}.png")
