"""The resize plan: from a page's size and a pixel budget to a grid of patches.

Every consumer (the prompt's image tokens, the patches, the counts of visual tokens) takes the same
``ResizePlan``, so a token count can never come from one plan and the features from another. The
rule is the published one of Qwen2-VL's image processor: both sides become multiples of ``patch ·
merge`` (28), Python's round-half-to-even in the ordinary case, and the whole picture is scaled to
the nearer end of the budget where that would leave it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evisrag_jax.pages.decode import PageError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

#: Longest side over shortest side that is still accepted (exactly this ratio is).
MAX_ASPECT_RATIO = 200


def _whole(value: object, what: str) -> int:
    """``value`` if it is an int above 0; files and flags may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what}={value!r} is not a positive int")
    return value


@dataclass(frozen=True)
class PixelBudget:
    """Least and most pixels of a resized page.

    Attributes:
        name: what run records and warnings call it.
        min_pixels: smaller pages are scaled up to at least this many pixels.
        max_pixels: larger pages are scaled down to at most this many (a page so thin that one side
            is already a single merged patch keeps that side and may stay above; see
            ``plan_resize``).
    """

    name: str
    min_pixels: int
    max_pixels: int

    def __post_init__(self):
        for field in ("min_pixels", "max_pixels"):
            _whole(getattr(self, field), f"pixel budget {self.name!r}: {field}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"pixel budget {self.name!r}: min_pixels={self.min_pixels} is above "
                f"max_pixels={self.max_pixels}"
            )


#: Named budgets. ``default`` is the published processor's, ``sft`` and ``grpo`` those of the
#: reference training scripts (EVisRAG release), ``mini`` fits the mini model.
BUDGETS: dict[str, PixelBudget] = {
    budget.name: budget
    for budget in (
        PixelBudget("default", 3136, 12_845_056),
        PixelBudget("sft", 3136, 3_920_000),
        PixelBudget("grpo", 262_144, 1_568_000),
        PixelBudget("mini", 784, 50_176),
    )
}


@dataclass(frozen=True)
class VisionLayout:
    """How the vision tower cuts a page up, and how it normalises samples.

    Attributes:
        patch: side of a patch in pixels.
        merge: side of a merged unit (one language-model token) in patches.
        window: side of an attention window in pixels; a multiple of ``patch · merge``.
        mean, std: per-channel normalisation of samples in 0..1.
    """

    patch: int = 14
    merge: int = 2
    window: int = 112
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    def __post_init__(self):
        for field in ("patch", "merge", "window"):
            _whole(getattr(self, field), f"vision layout: {field}")
        if self.window % self.factor:
            raise ValueError(
                f"vision layout: window={self.window} is not a multiple of "
                f"patch*merge={self.factor}"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError("vision layout: mean and std are three numbers each, std above 0")

    @property
    def factor(self) -> int:
        """Side of a merged unit in pixels."""
        return self.patch * self.merge

    @property
    def window_units(self) -> int:
        """Side of a window in merged units."""
        return self.window // self.factor

    @property
    def slots(self) -> int:
        """Patches a window holds (S)."""
        return (self.window // self.patch) ** 2

    @property
    def channels(self) -> int:
        """Numbers a patch holds (3 colours x patch x patch)."""
        return 3 * self.patch * self.patch


@dataclass(frozen=True)
class ResizePlan:
    """Size of the resized page in pixels, its grid in patches, and the tokens it costs in a
    prompt."""

    height: int
    width: int
    rows: int
    cols: int
    tokens: int


def resolve_budget(budget: str | Mapping[str, object] | PixelBudget) -> PixelBudget:
    """A budget from a name, a mapping or a budget: the one door for config files, flags and
    arguments.

    Args:
        budget: a name in ``BUDGETS``; or a mapping with ``min_pixels`` and/or ``max_pixels`` and
            optionally ``name`` (a missing limit is the default budget's); or a ``PixelBudget``,
            returned as it is.

    Raises:
        ValueError: for an unknown name or key, a mapping with no limit, or limits that are no
            positive ints in order.
    """
    if isinstance(budget, PixelBudget):
        return budget
    if isinstance(budget, str):
        if budget not in BUDGETS:
            raise ValueError(f"unknown pixel budget {budget!r}; named budgets: {sorted(BUDGETS)}")
        return BUDGETS[budget]
    unknown = sorted(set(budget) - {"name", "min_pixels", "max_pixels"})
    if unknown:
        raise ValueError(
            f"pixel budget: unknown keys {unknown}; known: name, min_pixels, max_pixels"
        )
    if "min_pixels" not in budget and "max_pixels" not in budget:
        raise ValueError("pixel budget: neither min_pixels nor max_pixels is given")
    default = BUDGETS["default"]
    low, high = (
        _whole(budget.get(limit, getattr(default, limit)), f"pixel budget: {limit}")
        for limit in ("min_pixels", "max_pixels")
    )
    return PixelBudget(str(budget.get("name") or budget_name(low, high)), low, high)


def budget_name(min_pixels: int, max_pixels: int) -> str:
    """The name of the named budget with these limits, else the limits themselves as ``min-max``."""
    for known in BUDGETS.values():
        if (known.min_pixels, known.max_pixels) == (min_pixels, max_pixels):
            return known.name
    return f"{min_pixels}-{max_pixels}"


def plan_resize(
    height: int, width: int, budget: PixelBudget, layout: VisionLayout, *, name: str = "image"
) -> ResizePlan:
    """Plan the one resize of a page.

    Sides are rounded to multiples of ``layout.factor``. If that leaves the budget, both sides are
    scaled by one number to the end of the budget and rounded towards its inside: down at the upper
    end (but never below one factor), up at the lower end. A side below half a factor rounds to
    nothing, which counts as too few pixels, so thin strips are scaled up and always get at least
    one merged patch a side.

    Two corners follow from the rule. A page thinner than one factor after scaling down keeps one
    factor, so its area can stay above ``max_pixels``. And such a page's plan, planned again, may
    differ or be refused for its ratio; that is why planning happens once a page and never on a
    planned size.

    Args:
        height, width: the decoded page's size in pixels.
        budget: limits of the resized area in pixels.
        layout: patch and merge sizes.
        name: what an error calls the page.

    Raises:
        PageError: (kind ``aspect``) if the longer side is more than ``MAX_ASPECT_RATIO`` times the
            shorter; (kind ``broken``) if a side is below one pixel.
    """
    if height < 1 or width < 1:
        raise PageError(name, f"has no pixels ({width} wide x {height} high)")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        ratio = max(height, width) / min(height, width)
        reason = (
            f"{width} wide x {height} high: aspect ratio {ratio:.1f} is above {MAX_ASPECT_RATIO}; "
            "crop or split the page"
        )
        raise PageError(name, reason, "aspect")

    factor = layout.factor
    planned_height = round(height / factor) * factor
    planned_width = round(width / factor) * factor
    if planned_height * planned_width > budget.max_pixels:
        shrink = math.sqrt((height * width) / budget.max_pixels)
        planned_height = max(factor, math.floor(height / shrink / factor) * factor)
        planned_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif planned_height * planned_width < budget.min_pixels:
        grow = math.sqrt(budget.min_pixels / (height * width))
        planned_height = math.ceil(height * grow / factor) * factor
        planned_width = math.ceil(width * grow / factor) * factor

    rows, cols = planned_height // layout.patch, planned_width // layout.patch
    tokens = (rows // layout.merge) * (cols // layout.merge)
    return ResizePlan(planned_height, planned_width, rows, cols, tokens)


_OWN_KEYS = {"budget", "window_size"}
_SIZE_ALIASES = {
    "shortest_edge": "min_pixels",
    "min_pixels": "min_pixels",
    "longest_edge": "max_pixels",
    "max_pixels": "max_pixels",
}
#: Settings with one value here: the pixels would differ from the published processor's under any
#: other.
_FIXED = {
    "do_convert_rgb": (True,),
    "do_normalize": (True,),
    "do_rescale": (True,),
    "do_resize": (True,),
    "default_to_square": (False,),
    "do_center_crop": (False,),
    "do_pad": (False,),
    "resample": (3, "bicubic", "BICUBIC"),
    "rescale_factor": (1 / 255,),
    "temporal_patch_size": (2,),
}
#: Keys of published files that say nothing about a still image's pixels.
_IRRELEVANT = {
    "_processor_class",
    "_valid_processor_keys",
    "auto_map",
    "backend",
    "crop_size",
    "data_format",
    "device",
    "disable_grouping",
    "feature_extractor_type",
    "fps",
    "image_processor_type",
    "image_seq_length",
    "input_data_format",
    "max_frames",
    "min_frames",
    "model_input_names",
    "pad_size",
    "processor_class",
    "return_tensors",
    "transformers_version",
}


def processor_settings(
    source: str | os.PathLike | Mapping[str, object],
) -> tuple[PixelBudget, VisionLayout]:
    """Pixel budget and vision layout of a checkpoint folder or of a mapping with the same keys.

    Limits may stand as ``min_pixels``/``max_pixels``, inside ``size``
    (``shortest_edge``/``longest_edge`` or ``min_pixels``/``max_pixels``), or both, as long as they
    agree. Every key must be known, so a misspelt limit is an error and never the default; an
    unknown key whose value is null passes.

    Args:
        source: a folder with ``preprocessor_config.json`` (or a ``processor_config.json`` that
            nests it under ``image_processor``) and, for the window size, ``config.json``; or a
            mapping with the keys of the former plus, of this package, ``budget`` (a name in
            ``BUDGETS``) and ``window_size`` in pixels.

    Returns:
        The budget (named after the named budget it equals, else ``min-max``) and the layout. A
        mapping without limits gets the ``default`` budget; a folder without an upper limit is
        refused.

    Raises:
        FileNotFoundError: a folder without processor settings.
        ValueError: unknown keys, limits that disagree, or settings this package does not have;
            names the source.
    """
    if isinstance(source, Mapping):
        return _read_settings(dict(source), "processor settings", own=True)
    return _read_folder(Path(source))


def _read_folder(folder: Path) -> tuple[PixelBudget, VisionLayout]:
    found = []
    plain = folder / "preprocessor_config.json"
    if plain.is_file():
        found.append((plain, _read_json(plain)))
    nested = folder / "processor_config.json"
    if nested.is_file():
        inner = _read_json(nested).get("image_processor")
        if isinstance(inner, dict):
            found.append((nested, inner))
    if not found:
        raise FileNotFoundError(
            f"{folder}: holds neither preprocessor_config.json nor processor_config.json with an "
            "image_processor"
        )

    vision: dict = {}
    model = folder / "config.json"
    if model.is_file():
        vision = _read_json(model).get("vision_config") or {}

    results = []
    for path, settings in found:
        settings = {key: value for key, value in settings.items() if value is not None}
        misplaced = sorted(_OWN_KEYS & set(settings))
        if misplaced:
            raise ValueError(f"{path}: {misplaced} are no keys of a published processor file")
        if "window_size" in vision:
            settings["window_size"] = vision["window_size"]
        budget, layout = _read_settings(settings, str(path), own=False)
        for key, ours in (("patch_size", layout.patch), ("spatial_merge_size", layout.merge)):
            if vision.get(key, ours) != ours:
                raise ValueError(f"{path}: {key} is {ours}, but {model} says {vision[key]}")
        results.append((budget, layout))
    if results[0] != results[-1]:
        raise ValueError(
            f"{found[0][0]} and {found[-1][0]} disagree: {results[0]} against {results[-1]}"
        )
    return results[0]


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_settings(settings: dict, name: str, *, own: bool) -> tuple[PixelBudget, VisionLayout]:
    """One mapping to (budget, layout); ``own`` allows a named budget and defaults for missing
    limits."""
    settings = {key: value for key, value in settings.items() if value is not None}
    shaping = {"size", "min_pixels", "max_pixels", "patch_size", "merge_size"}
    shaping |= {"image_mean", "image_std", *_OWN_KEYS, *_FIXED}
    unknown = sorted(key for key in settings if key not in shaping | _IRRELEVANT)
    if unknown:
        raise ValueError(f"{name}: unknown keys {unknown}; known: {sorted(shaping)}")
    for key, allowed in _FIXED.items():
        if key in settings and settings[key] not in allowed:
            raise ValueError(f"{name}: {key}={settings[key]!r}, but only {allowed[0]!r} is read")

    budget = _read_limits(settings, name, own)
    default = VisionLayout()
    sides = {"patch": "patch_size", "merge": "merge_size", "window": "window_size"}
    values = {
        field: _whole(settings.get(key, getattr(default, field)), f"{name}: {key}")
        for field, key in sides.items()
    }
    for field, key in {"mean": "image_mean", "std": "image_std"}.items():
        numbers = settings.get(key, getattr(default, field))
        try:
            first, second, third = (float(number) for number in numbers)
        except (TypeError, ValueError):
            raise ValueError(f"{name}: {key}={numbers!r} is not three numbers") from None
        values[field] = (first, second, third)
    return budget, VisionLayout(**values)


def _read_limits(settings: dict, name: str, own: bool) -> PixelBudget:
    stated: dict[str, list[tuple[str, object]]] = {"min_pixels": [], "max_pixels": []}
    if "budget" in settings:
        named = resolve_budget(settings["budget"])
        stated["min_pixels"].append(("budget", named.min_pixels))
        stated["max_pixels"].append(("budget", named.max_pixels))
    for limit in stated:
        if limit in settings:
            stated[limit].append((limit, _whole(settings[limit], f"{name}: {limit}")))
    size = settings.get("size", {})
    if not isinstance(size, Mapping) or set(size) - set(_SIZE_ALIASES):
        raise ValueError(
            f"{name}: size={size!r} is not one of {sorted(_SIZE_ALIASES)} with pixel counts"
        )
    for key, value in size.items():
        if value is not None:
            pixels = _whole(value, f"{name}: size.{key}")
            stated[_SIZE_ALIASES[key]].append((f"size.{key}", pixels))

    chosen = {}
    for limit, entries in stated.items():
        if len({value for _, value in entries}) > 1:
            listed = ", ".join(f"{key}={value}" for key, value in entries)
            raise ValueError(f"{name}: {limit} is given twice and disagrees: {listed}")
        if entries:
            chosen[limit] = entries[0][1]
    if not own and "max_pixels" not in chosen:
        raise ValueError(f"{name}: gives no max_pixels (nor size.longest_edge); add it")
    default = BUDGETS["default"]
    low = chosen.get("min_pixels", default.min_pixels)
    high = chosen.get("max_pixels", default.max_pixels)
    return PixelBudget(budget_name(low, high), low, high)
