"""What a run leaves behind: its weights as a Hugging Face folder that any server loads, and adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evisrag_jax.models.lora import LoraConfig, merge
from evisrag_jax.models.qwen25vl.adapter_files import save_adapter
from evisrag_jax.models.qwen25vl.weights import save_params
from evisrag_jax.pages.plan import PixelBudget
from evisrag_jax.runtime.processes import barrier, is_primary
from evisrag_jax.training.pretrained import Pretrained


def export(
    params: Any,
    pretrained: Pretrained,
    folder: Path,
    *,
    dtype: Any,
    lora: LoraConfig | None = None,
) -> None:
    """Write `folder`, beside its place first and then renamed. All of several processes call this.

    Config, tokenizer and template are those of the folder that the run started from. The processor's
    pixel limits are those of the run's pages, so that whoever loads the folder sees pages at the size
    that it was trained with.

    Args:
        params: nested parameters, on devices or the host.
        dtype: of the weights in the files.
        lora: of adapters among the parameters; they are merged.
    """
    if lora is not None and lora.rank:
        params = merge(params, lora)
    with _replaced(folder) as partial_folder:
        save_params(
            params, pretrained.config, partial_folder, source=pretrained.folder, dtype=dtype
        )
        if is_primary():
            set_pixel_limits(partial_folder, pretrained.budget)


def export_adapter(params: Any, pretrained: Pretrained, folder: Path, lora: LoraConfig) -> None:
    """Write the adapters among the parameters in PEFT's format; `folder` is replaced as a whole.

    Nothing is written where there are none, nor where base parameters trained beside them (`lora.also`):
    adapters alone would then be another model than the one that was trained.
    """
    if not lora.rank or lora.also:
        return
    base = str(pretrained.folder)
    with _replaced(folder) as partial_folder:
        save_adapter(params, pretrained.config, lora, partial_folder, base=base)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block is through; process 0 handles files."""
    partial_folder = folder.with_name(f".{folder.name}.partial")
    if is_primary():
        shutil.rmtree(partial_folder, ignore_errors=True)
    yield partial_folder
    if is_primary():
        shutil.rmtree(folder, ignore_errors=True)
        partial_folder.rename(folder)
    barrier(f"export of {folder.name}")


def set_pixel_limits(folder: Path, budget: PixelBudget) -> None:
    """Put a budget into the processor files of a folder, in every place that they name limits."""
    limits = {"min_pixels": budget.min_pixels, "max_pixels": budget.max_pixels}
    limits |= {"shortest_edge": budget.min_pixels, "longest_edge": budget.max_pixels}
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        settings = content if name.startswith("pre") else content.get("image_processor") or {}
        places = [settings, settings.get("size") or {}]
        before = json.dumps(places)
        for place in places:
            place.update({key: limits[key] for key in place.keys() & limits.keys()})
        if json.dumps(places) != before:
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
