"""Whether pages are evaluated at the size the checkpoint was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evisrag_jax.pages.plan import PixelBudget, VisionLayout, plan_resize

#: Height and width of the page that warnings count tokens for (A4 at 200 dpi).
EXAMPLE_PAGE = (2339, 1654)


def compare_budgets(
    checkpoint_meta: Mapping[str, Any],
    current: PixelBudget | Mapping[str, Any],
    layout: VisionLayout | None = None,
) -> list[str]:
    """Warnings for every training stage whose pixel budget is not the current one.

    Args:
        checkpoint_meta: what the checkpoint says of its stages: either one budget,
            ``{"min_pixels", "max_pixels"}``, or stage names with a budget each. Empty means unknown.
        current: the budget of this evaluation.
        layout: patch and merge sizes for the token counts in the warning; None is Qwen2.5-VL's.

    Returns:
        One sentence a stage; no sentence when all budgets agree.
    """
    layout = layout or VisionLayout()
    now = _budget("this evaluation", current)
    if not checkpoint_meta:
        return ["the checkpoint does not say at which pixel budget it was trained"]
    if "max_pixels" in checkpoint_meta:
        stages = {"training": _budget("training", checkpoint_meta)}
    else:
        stages = {str(stage): _budget(str(stage), b) for stage, b in checkpoint_meta.items()}
    return [
        f"pages had another size in {stage}: {_shown(then, layout)} there, "
        f"{_shown(now, layout)} here"
        for stage, then in stages.items()
        if (then.min_pixels, then.max_pixels) != (now.min_pixels, now.max_pixels)
    ]


def _budget(stage: str, value: PixelBudget | Mapping[str, Any]) -> PixelBudget:
    if isinstance(value, PixelBudget):
        return value
    try:
        least, most = value["min_pixels"], value["max_pixels"]
    except (KeyError, TypeError):
        raise ValueError(
            f"{stage}: a pixel budget needs min_pixels and max_pixels, got {value!r}"
        ) from None
    return PixelBudget(stage, least, most)


def _shown(budget: PixelBudget, layout: VisionLayout) -> str:
    height, width = EXAMPLE_PAGE
    tokens = plan_resize(height, width, budget, layout).tokens
    return (
        f"{budget.min_pixels}..{budget.max_pixels} pixels ({tokens} tokens for a page of "
        f"{width} x {height})"
    )
