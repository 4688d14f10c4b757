"""Fonts that exist wherever the package is installed: the DejaVu family in matplotlib's data, and
Pillow's own.

No system font is looked up, so a drawn page is the same on every machine with the same library
versions.
"""

from __future__ import annotations

import functools
from pathlib import Path

from PIL import ImageFont

_FILES = {
    "sans": "DejaVuSans.ttf",
    "sans-bold": "DejaVuSans-Bold.ttf",
    "sans-oblique": "DejaVuSans-Oblique.ttf",
    "serif": "DejaVuSerif.ttf",
    "serif-bold": "DejaVuSerif-Bold.ttf",
    "mono": "DejaVuSansMono.ttf",
    "mono-bold": "DejaVuSansMono-Bold.ttf",
}

#: Every name ``load_font`` takes; "pillow" is the font built into Pillow.
FONT_NAMES: tuple[str, ...] = (*_FILES, "pillow")

#: The bold companion of a font, itself where there is none.
BOLD = {
    "sans": "sans-bold",
    "sans-oblique": "sans-bold",
    "serif": "serif-bold",
    "mono": "mono-bold",
}


@functools.lru_cache(maxsize=1)
def _folder() -> Path:
    import matplotlib  # only its data path; slow enough to import late

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@functools.lru_cache(maxsize=256)
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font by name.

    Args:
        name: one of ``FONT_NAMES``.
        size: height of the em square in pixels, at least 1.

    Raises:
        ValueError: for an unknown name or a size below 1.
    """
    if name not in FONT_NAMES:
        raise ValueError(f"unknown font {name!r}; known: {', '.join(FONT_NAMES)}")
    if size < 1:
        raise ValueError(f"font {name!r}: size {size} is below 1 pixel")
    if name == "pillow":
        return ImageFont.load_default(size)
    # The basic layout engine does not depend on which shaping libraries Pillow was built with.
    path = str(_folder() / _FILES[name])
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def fit_font(
    name: str, texts: list[str], width: float | int, size: int, smallest: int = 8
) -> ImageFont.FreeTypeFont:
    """The largest size from ``size`` down to ``smallest`` at which every text is at most ``width``
    pixels wide.

    Raises:
        ValueError: naming the widest text if it does not fit at ``smallest``.
    """
    for candidate in range(size, smallest - 1, -1):
        font = load_font(name, candidate)
        if max((font.getlength(text) for text in texts), default=0.0) <= width:
            return font
    widest = max(texts, key=load_font(name, smallest).getlength)
    raise ValueError(f"{widest!r} does not fit into {width:.0f} pixels at font size {smallest}")
