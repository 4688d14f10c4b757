"""What a CED probe found, as a table for the terminal and as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evisrag_jax.pages.regions import Grid


def format_table(summary: Mapping[str, Any]) -> str:
    """A line a proposal: relevant > random rate, mean margin ± standard error over questions, mean z, gap
    and drop (nats a token); then the group statistics."""
    lines = [
        f"{summary['questions']} questions, {summary['audited']} of {summary['responses']} responses "
        f"audited, accuracy {_number(summary['accuracy'])}",
        f"{'region':12} {'n':>6} {'rate':>7} {'m':>7} {'± se':>7} {'z':>9} {'gap':>8} {'drop':>8}",
    ]
    for name, row in summary["proposals"].items():
        values = (row[key] for key in ("rate", "m", "m_se", "z", "gap", "drop"))
        widths = (7, 7, 7, 9, 8, 8)
        shown = " ".join(_number(v).rjust(w) for v, w in zip(values, widths, strict=True))
        lines.append(f"{name:12} {row['n']:>6} {shown}")
    parts = {"all": summary["groups"]}
    parts |= {name: family["groups"] for name, family in summary["families"].items()}
    for name, groups in parts.items():
        if groups["groups"]:
            lines.append(
                f"groups {name}: zero variance {_number(groups['zero_variance'])} (correctness only "
                f"{_number(groups['correctness_zero_variance'])}), same answer paid differently "
                f"{_number(groups['same_answer_different_reward'])}, std {_number(groups['std'])}"
            )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def draw_figure(summary: Mapping[str, Any], path: Path) -> None:
    """Mean margin ± standard error, and relevant > random rate, of each proposal (PNG)."""
    from matplotlib.figure import Figure

    found = summary["proposals"]
    names = list(found)
    figure = Figure(figsize=(7.5, 0.36 * max(len(names), 2) + 1.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(names))
    errors = [found[name]["m_se"] or 0.0 for name in names]
    left.barh(places, [found[name]["m"] for name in names], xerr=errors, color="#4477aa")
    left.set(xlabel="mean margin ± SE", xlim=(-1, 1), yticks=list(places), yticklabels=names)
    left.axvline(0, color="0.3", linewidth=0.8)
    left.invert_yaxis()
    right.barh(places, [found[name]["rate"] for name in names], color="#66aa88")
    right.axvline(0.5, color="0.3", linewidth=0.8, linestyle="--")
    right.set(xlabel="relevant > random rate", xlim=(0, 1))
    figure.suptitle(f"{summary['audited']} responses, scored on: {summary['scope']}", fontsize=10)
    figure.savefig(path, dpi=130)


def draw_regions(
    images: Sequence[Image.Image],
    boxes: Sequence[Sequence[Sequence[float | int]]],
    evidence: Sequence[Grid],
    controls: Sequence[Sequence[Grid]],
    path: Path,
) -> None:
    """Each page with its evidence boxes, and the tokens that are masked: those of the evidence red, those of
    the controls blue (PNG). Pages are drawn at their original size; a grid covers its whole page."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(4.2 * len(images), 3.8), layout="constrained")
    for axis, image, own, region, others in zip(
        figure.subplots(1, len(images), squeeze=False)[0],
        images,
        boxes,
        evidence,
        zip(*controls, strict=True) if controls else [()] * len(images),
        strict=True,
    ):
        axis.imshow(image)
        layers = [(region, (0.85, 0.1, 0.1)), *((one, (0.1, 0.3, 0.85)) for one in others)]
        for tokens, colour in layers:
            shade = np.zeros((*tokens.shape, 4))
            shade[tokens] = (*colour, 0.45)
            extent = (0, image.width, image.height, 0)
            axis.imshow(shade, extent=extent, interpolation="nearest")
        for x, y, w, h in own:
            axis.add_patch(Rectangle((x, y), w, h, fill=False, edgecolor="yellow", linewidth=1.2))
        axis.set(xlim=(0, image.width), ylim=(image.height, 0))
        axis.set_axis_off()
    figure.savefig(path, dpi=110)
