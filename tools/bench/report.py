"""One table on the terminal and one JSON file of a benchmark."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass
class Report:
    """What a benchmark found.

    name: of the script.  shapes: by name, as plain data.  versions: `machine.facts`.  columns, rows:
    the table.  ratios: ours against the peer's, in the sense that the key's note gives.  times: raw
    seconds by side.  checks: agreements that were tested before anything was timed.  notes: lines
    under the table.
    """

    name: str
    columns: Sequence[str]
    shapes: dict[str, Any]
    versions: dict[str, Any]
    rows: list[Sequence[Any]] = dataclasses.field(default_factory=list)
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    times: dict[str, Any] = dataclasses.field(default_factory=dict)
    checks: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def row(self, *cells: Any) -> None:
        """One line of the table; floats get three places."""
        self.rows.append([f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells])

    def content(self) -> dict[str, Any]:
        """The JSON file's content."""
        return {
            "benchmark": self.name,
            "ratios": self.ratios,
            "shapes": self.shapes,
            "versions": self.versions,
            "checks": self.checks,
            "times": self.times,
            "table": {"columns": list(self.columns), "rows": [list(row) for row in self.rows]},
            "notes": self.notes,
        }

    def show(self, console: Console | None = None) -> None:
        """Prints the table, the ratios, what was checked and on what machine."""
        console = console or Console()
        table = Table(title=self.name)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for key, value in self.ratios.items():
            console.print(f"[bold]{key}[/bold] {value:.3f}")
        for key, value in self.checks.items():
            console.print(f"{key}: {value}", highlight=False)
        for note in self.notes:
            console.print(note, style="dim", highlight=False)
        console.print(self._machine(), style="dim", highlight=False)

    def _machine(self) -> str:
        of = self.versions
        parts = [
            f"{len(of.get('affinity') or ()) or of.get('cpus')} CPUs",
            str(of.get("processor")),
        ]
        parts += [f"{of.get('threads')} threads a side", str(of.get("dtype"))]
        parts += [f"OMP_WAIT_POLICY={of.get('omp_wait_policy')}", f"load {of.get('load')}"]
        packages = {**(of.get("packages") or {}), **(of.get("peers") or {})}
        named = ("jax", "torch", "transformers", "trl")
        return ", ".join(parts + [f"{n} {packages[n]}" for n in named if packages.get(n)])

    def finish(self, json_file: Path | None) -> None:
        """Shows everything and writes the file, if one is asked for."""
        self.show()
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.content(), indent=2, default=str) + "\n"
            json_file.write_text(text, encoding="utf-8")
            print(f"written: {json_file}")
