"""What an attention probe found, as a table for the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def format_table(summary: Mapping[str, Any]) -> str:
    """A line a scope: share of the visual attention on the evidence and its area-corrected lift, with 95 %
    intervals over questions, and the correlation of the lift with the margin and with correctness."""
    lines = [
        f"{summary['questions']} questions, {summary['responses']} responses, accuracy "
        f"{summary['accuracy']:.3f}, evidence is {summary['box_share']:.3f} of the visual tokens",
        f"{'scope':10} {'n':>5} {'rho':>21} {'lift':>21} {'lift~margin':>12} {'lift~right':>11}",
    ]
    for name, scope in summary["scopes"].items():
        n = scope["responses"] - sum(scope["undefined"].values())
        found = summary["correlations"]
        links = [
            found[f"{name}/lift/{outcome}/spearman"]["value"] for outcome in ("margin", "right")
        ]
        lines.append(
            f"{name:10} {n:>5} {_interval(scope['rho']):>21} {_interval(scope['lift']):>21} "
            f"{_number(links[0]):>12} {_number(links[1]):>11}"
        )
    return "\n".join(lines)


def _interval(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "n/a"
    return f"{value['mean']:.3f} ({value['low']:.3f}–{value['high']:.3f})"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.3f}"


def draw_figure(summary: Mapping[str, Any], path: Path) -> None:
    """rho of every layer, a line a scope, beside the share that the evidence has of the visual tokens
    (PNG)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axis = figure.subplots()
    for name, scope in summary["scopes"].items():
        values = [float("nan") if v is None else v for v in scope["rho_by_layer"]]
        axis.plot(range(len(values)), values, marker="o", label=name)
    depth = max((len(scope["rho_by_layer"]) for scope in summary["scopes"].values()), default=1)
    axis.set_xticks(range(0, depth, max(1, depth // 8)))
    axis.axhline(summary["box_share"], color="0.4", linestyle="--", label="share of the tokens")
    axis.set(xlabel="layer", ylabel="share of visual attention on the evidence", ylim=(0, None))
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)
