"""``evisrag validate FILE``: every problem of a data file before a run meets it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from evisrag_jax.cli.config import ConfigError, parse

SUMMARY = "check a data file: rows, images and prompt lengths; exit status 1 if anything is wrong"


def _define(values: absl_flags.FlagValues) -> None:
    def string(name: str, default: str | None, text: str) -> None:
        absl_flags.DEFINE_string(name, default, text, flag_values=values)

    string("image_root", None, "folder that image paths are relative to (default: the file's own)")
    string("model", None, "model folder: also measure prompts with its tokenizer and pixel budget")
    string("template", "evidence_cot", "template of the measured prompts, a name or a file")
    string("budget", None, "named pixel budget of the measured prompts (default: the model's)")
    absl_flags.DEFINE_integer(
        "max_tokens", None, "longest prompt allowed; needs --model", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "decode", True, "decode every image; --nodecode only looks the files up", flag_values=values
    )
    absl_flags.DEFINE_bool("strict", False, "warnings are problems too", flag_values=values)
    absl_flags.DEFINE_integer("threads", 2, "decoding threads", flag_values=values)
    absl_flags.DEFINE_integer("show", 50, "findings printed; 0 prints all", flag_values=values)


def run(argv: Sequence[str]) -> int:
    """Prints a table of findings and a line of counts; with --out also writes them as files."""
    parsed = parse(argv, command="validate", summary=SUMMARY, usage="FILE", define=_define)
    if len(parsed.args) != 1:
        raise ConfigError("validate takes one data file: evisrag validate FILE.jsonl")
    flags = parsed.flags
    if flags.max_tokens is not None and flags.model is None:
        raise ConfigError("--max_tokens needs --model FOLDER, whose tokenizer measures prompts")
    path = Path(parsed.args[0])
    if not path.exists():
        raise ConfigError(f"{path}: no such file")

    from evisrag_jax.data.validate import validate_file

    report = validate_file(
        path,
        decode=flags.decode,
        tokens=None if flags.model is None else _measure(flags),
        max_tokens=flags.max_tokens,
        image_root=flags.image_root,
        threads=flags.threads,
    )
    _print(report, flags.show)
    if parsed.out is not None:
        _write(report, parsed.out)
    warned = flags.strict and len(report.findings) > len(report.errors)
    return 0 if report.ok and not warned else 1


def _measure(flags: absl_flags.FlagValues) -> Callable[[Any], int]:
    """Prompt tokens of a record under a model folder's tokenizer and processor settings."""
    from evisrag_jax.pages.decode import load_page
    from evisrag_jax.pages.plan import plan_resize, processor_settings, resolve_budget
    from evisrag_jax.prompts.chat import build_prompt
    from evisrag_jax.prompts.template import load_template
    from evisrag_jax.prompts.tokenizer import load_tokenizer
    from evisrag_jax.training.pretrained import find_model

    folder = find_model(flags.model)
    tokenizer = load_tokenizer(folder)
    budget, layout = processor_settings(folder)
    budget = resolve_budget(flags.budget) if flags.budget else budget
    template = load_template(flags.template)
    sizes: dict[str, tuple[int, int]] = {}

    def grid(path: str) -> tuple[int, int]:
        if path not in sizes:
            page = load_page(path)
            sizes[path] = (page.height, page.width)
        plan = plan_resize(*sizes[path], budget, layout, name=path)
        return plan.rows, plan.cols

    def tokens(record: Any) -> int:
        grids = [grid(path) for path in record.images]
        text = template.render(record.question)
        return len(build_prompt(tokenizer, text, grids, name=record.id, merge=layout.merge).ids)

    return tokens


def _print(report: Any, show: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe gets whole lines: a wrapped reason cannot be searched for.
    console = Console(soft_wrap=not sys.stdout.isatty())
    if report.findings:
        table = Table("row", "id", "", "kind", "reason", title=report.path, title_justify="left")
        shown = report.findings[: show or None]
        for found in shown:
            style = "red" if found.severity == "error" else "yellow"
            row = (str(found.row), found.id or "", found.severity, found.kind, found.reason)
            table.add_row(*(Text(cell) for cell in row), style=style)
        if sys.stdout.isatty():
            console.print(table)
        else:
            for found in shown:
                name = "" if found.id is None else f" ({found.id})"
                line = f"row {found.row}{name}: {found.severity}: {found.kind}: {found.reason}"
                print(line)
        if len(report.findings) > len(shown):
            print(f"and {len(report.findings) - len(shown)} more (--show 0 prints all)")
    for line in summary_lines(report):
        print(line)


def summary_lines(report: Any) -> list[str]:
    """What was checked and found, in words."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(report.counts().items()))
    warnings = len(report.findings) - len(report.errors)
    looked = "decoded" if report.decoded else "looked up"
    lines = [
        f"{report.path}: {report.good} of {report.rows} rows can be used; "
        f"{report.images} images {looked}; {len(report.errors)} errors"
        + (f" ({kinds})" if kinds else "")
        + f", {warnings} warnings"
    ]
    if report.tokens:
        lengths = sorted(report.tokens.values())
        middle = lengths[len(lengths) // 2]
        lines.append(f"prompt tokens: least {lengths[0]}, median {middle}, most {lengths[-1]}")
    return lines


def _write(report: Any, out: Path) -> None:
    """findings in rejected.jsonl (from nothing) and counts in summary.json."""
    from evisrag_jax.runtime.run_folder import RunFolder

    with RunFolder(out) as folder:
        folder.rejected.unlink(missing_ok=True)
        report.write(folder.rejected)
        folder.write_summary(
            {
                "command": "validate",
                "data": report.path,
                "rows": report.rows,
                "good": report.good,
                "images": report.images,
                "decoded": report.decoded,
                "errors": len(report.errors),
                "warnings": len(report.findings) - len(report.errors),
                "tokens_most": max(report.tokens.values(), default=None),
            }
        )
