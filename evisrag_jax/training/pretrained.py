"""A model folder, opened: parameters on the mesh, tokenizer, page settings, end tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from evisrag_jax.models.qwen25vl import model, weights
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, load_config
from evisrag_jax.pages.plan import PixelBudget, VisionLayout, processor_settings, resolve_budget
from evisrag_jax.prompts.tokenizer import load_tokenizer, stop_ids
from evisrag_jax.runtime.mesh import shardings
from evisrag_jax.runtime.precision import parse_dtype

ASSETS = Path(__file__).parent.parent / "assets"


class ModelError(ValueError):
    """A model folder that cannot be used; the message names it."""


@dataclass(frozen=True, eq=False)
class Pretrained:
    """What a model folder holds.

    budget is the folder's own pixel budget unless another was asked for.
    """

    folder: Path
    params: Any
    config: Qwen25VLConfig
    tokenizer: PreTrainedTokenizerFast
    layout: VisionLayout
    budget: PixelBudget
    stop_ids: tuple[int, ...]


def bundled() -> list[str]:
    """Names of the models that the package ships."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def find_model(path: str | Path) -> Path:
    """A folder, or the name of a bundled model. ModelError lists the names if it is neither."""
    folder = Path(path)
    if folder.is_dir():
        _refuse_runs(folder)
        return folder
    if str(path) in bundled():
        return ASSETS / str(path)
    raise ModelError(f"{path}: no such model folder; bundled models: {', '.join(bundled())}")


def _refuse_runs(folder: Path) -> None:
    """A run and its checkpoints are gone on with, not started from."""
    run = next(
        (p for p in (folder, *folder.absolute().parents) if (p / "versions.json").exists()), None
    )
    if run is None or (folder / "tokenizer.json").exists():
        return
    raise ModelError(
        f"{folder}: holds a run's checkpoints, not a model. To go on with that run, give the command "
        f"that started it, with --out {run}; to start another from its weights, give {run / 'model'}, "
        "which it exports at its end"
    )


def open_folder(path: str | Path, *, budget: str | PixelBudget | None = None) -> Pretrained:
    """A Hugging Face folder (or a bundled model by name) without its parameters: `params` is None.

    Raises as `load_pretrained`.
    """
    folder = find_model(path)
    tokenizer = load_tokenizer(folder)
    own, layout = processor_settings(folder)
    return Pretrained(
        folder=folder,
        params=None,
        config=load_config(folder),
        tokenizer=tokenizer,
        layout=layout,
        budget=own if budget is None else resolve_budget(budget),
        stop_ids=stop_ids(folder, tokenizer),
    )


def load_pretrained(
    path: str | Path,
    *,
    dtype: str = "float32",
    budget: str | PixelBudget | None = None,
    mesh: Mesh | None = None,
) -> Pretrained:
    """Opens a Hugging Face folder (or a bundled model by name).

    Args:
        dtype: of the parameters in memory.
        budget: a named pixel budget in place of the folder's.
        mesh: where parameters are sharded; each process reads its shards. None for the default device.
    Raises:
        ModelError, WeightsError, ConfigError, TokenizerError: naming folder and reason.
    """
    opened = open_folder(path, budget=budget)
    places = None
    if mesh is not None:
        shapes = model.param_shapes(opened.config)
        places = shardings(model.logical_axes(opened.config), shapes, mesh)
    params, _ = weights.load_params(opened.folder, parse_dtype(dtype), places)
    return replace(opened, params=params)
