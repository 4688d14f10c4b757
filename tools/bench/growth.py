"""Shapes along one axis at a time, and the exponent of what was measured on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .shapes import Shape

AXES = {
    "group": (1, 2, 4, 8, 16),
    "prompt": (512, 1024, 2048, 4096, 8192),
    "response": (64, 128, 256, 512),
    "pages": (1, 2, 3, 4, 5),
}
QUICK = {"group": (1, 8), "prompt": (512, 1024), "response": (64, 128), "pages": (1, 3)}
TINY = {"group": (1, 4), "prompt": (40, 60), "response": (4, 8), "pages": (1, 2)}


def along(axis: str, value: int, base: Shape) -> Shape:
    """The base shape with one size changed.

    Along "prompt" the text grows and there is one page; along "pages" the prompt grows by each page
    and its text stays as long as it is in the base.
    """
    change: dict[str, int] = {axis: value}
    if axis == "prompt":
        change["pages"] = 1
    if axis == "pages":
        change["prompt"] = base.prompt + (value - base.pages) * (base.page_tokens + 2)
    return dataclasses.replace(base, name=f"{base.name}, {axis} {value}", **change)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """b of the least-squares fit value = a · size^b."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
