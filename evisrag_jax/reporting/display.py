"""How values are written on the page: numbers, seconds, names; and how loose JSON is read as numbers."""

from __future__ import annotations

import math
from typing import Any

NOT_AVAILABLE = "n/a"


def number(value: Any) -> float | None:
    """The value as a float (booleans count as 0 and 1), or None where it is not a number."""
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def finite(value: Any) -> float | None:
    """As `number`, but None for NaN and the infinities too."""
    x = number(value)
    return x if x is not None and math.isfinite(x) else None


def text(value: Any) -> str:
    """The value as text: strings as they are, None as nothing, anything else by `str`."""
    if value is None:
        return ""
    return value if isinstance(value, str) else str(value)


def texts(value: Any) -> list[str]:
    """A list of texts from a list, or from one bare value; nothing from None."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [text(item) for item in value]
    return [text(value)]


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def format_number(value: Any, decimals: int = 3) -> str:
    """A number as shown: integers in full, otherwise these decimals (one from 100 on), or three digits with an exponent
    where decimals would say too little."""
    x = number(value)
    if x is None:
        return NOT_AVAILABLE
    if not math.isfinite(x):
        return "nan" if math.isnan(x) else ("∞" if x > 0 else "−∞")
    if x == int(x) and abs(x) < 1e7 and isinstance(value, (bool, int)):
        return f"{int(x):,}".replace(",", " ").replace("-", "−")
    if x != 0 and not 10.0**-decimals <= abs(x) < 1e5:
        return f"{x:.3g}".replace("-", "−")
    if abs(x) >= 100:
        decimals = 1
    return f"{x or 0.0:.{decimals}f}".replace("-", "−")


def format_signed(value: Any, decimals: int = 2) -> str:
    """A difference or an advantage, always with its sign; exactly zero stands without one."""
    x = number(value)
    if x is None or not math.isfinite(x):
        return format_number(value)
    if round(x, decimals) == 0:
        return f"{0:.{decimals}f}"
    return f"{'+' if x > 0 else '−'}{abs(x):.{decimals}f}"


def format_share(value: Any) -> str:
    """A share between 0 and 1 in percent."""
    x = finite(value)
    return NOT_AVAILABLE if x is None else f"{100 * x:.1f} %"


def format_seconds(value: Any) -> str:
    """A duration in the two units that matter: 0.42 s, 38 s, 4 min 30 s, 1 h 12 min, 2 d 3 h."""
    x = finite(value)
    if x is None:
        return NOT_AVAILABLE
    if x < 10:
        return f"{x:.2f} s"
    whole = round(x)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(x / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(x / 3600)
    return f"{hours // 24} d {hours % 24} h"


def format_bytes(count: int) -> str:
    """A file size in kB or MB (powers of ten)."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{max(1, round(count / 1e3))} kB"


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 question`, `3 questions`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}".replace(",", " ")
