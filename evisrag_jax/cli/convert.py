"""``evisrag convert``: a run's checkpoint as a Hugging Face folder, and what such a folder holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, parse

SUMMARY = "export a checkpoint for any server, or check a model folder by its headers"
USAGE = """export RUN --out FOLDER [--step N | --best] [--dtype bfloat16] [--model START]
       evisrag convert check FOLDER

export  writes weights, config, tokenizer, chat template and processor files as transformers loads them,
        adapters merged, from the latest checkpoint of a run. It needs no accelerator. --step takes another
        step, --best the best one by its validation; --model says where the model that the run started from
        lies now, if it was moved.
check   compares names, shapes and sizes of all tensors with the config, reading headers alone: seconds for
        a folder of any size."""


def run(argv: Sequence[str]) -> int:
    """Runs `export` or `check`."""
    parsed = parse(argv, command="convert", summary=SUMMARY, usage=USAGE, define=_define)
    what, *paths = parsed.args or ("",)
    if what not in ("export", "check") or len(paths) != 1:
        raise ConfigError(
            "convert takes: export RUN --out FOLDER, or check FOLDER (evisrag convert --help)"
        )
    if what == "check":
        return check(Path(paths[0]))
    flags = parsed.flags
    if parsed.out is None:
        raise ConfigError("convert export needs --out FOLDER, where the model goes")
    if flags.best and flags.step is not None:
        raise ConfigError("convert export takes --step or --best, not both")
    written = export_run(
        Path(paths[0]),
        parsed.out,
        step=flags.step,
        best=flags.best,
        dtype=flags.dtype,
        start=flags.model,
    )
    print(f"step {written} of {paths[0]} -> {parsed.out}")
    return 0


def _define(values: Any) -> None:
    from absl import flags

    flags.DEFINE_integer(
        "step", None, "the step to export (default: the latest)", flag_values=values
    )
    flags.DEFINE_bool("best", False, "the step with the best validation", flag_values=values)
    flags.DEFINE_string("dtype", None, "of the weights (default: the run's)", flag_values=values)
    flags.DEFINE_string("model", None, "the run's starting model, if moved", flag_values=values)


def export_run(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
    start: str | None = None,
) -> int:
    """Writes a checkpoint of a run into the folder `out`; returns its step.

    Raises RunFolderError, CheckpointError, ModelError and ConfigError, naming folder and reason.
    """
    from evisrag_jax.cli.fields import to_dataclass
    from evisrag_jax.models.lora import LoraConfig
    from evisrag_jax.runtime.checkpoints import CheckpointError, Checkpoints
    from evisrag_jax.runtime.precision import parse_dtype
    from evisrag_jax.runtime.run_folder import RunFolder, RunFolderError
    from evisrag_jax.training.export import export, export_adapter
    from evisrag_jax.training.pretrained import open_folder

    if not run.is_dir():
        raise RunFolderError(f"{run}: no such run folder")
    if out.exists() and not (out / "config.json").is_file() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty and holds no model; choose another folder")
    folder = RunFolder(run, writes=False)
    config = folder.read_config()
    for name in ("model", "data", "export_dtype"):
        if name not in config:
            raise RunFolderError(f"{run}: its config.json has no {name!r}; not a run that trains")
    opened = open_folder(start or config["model"]["path"], budget=config["data"]["budget"] or None)
    lora = to_dataclass(config.get("lora") or {}, LoraConfig)
    checkpoints = Checkpoints(folder.checkpoints, identity={"model": opened.config})
    if best:
        checkpoints.best = "min" if "rl" not in config else "max"
        step = checkpoints.best_step()
        if step is None:
            raise CheckpointError(f"{folder.checkpoints}: no checkpoint has a validation")
    template = _template(opened.config, lora, parse_dtype(config["model"]["param_dtype"]))
    found = checkpoints.restore_params(template, step)
    word = dtype or config["export_dtype"]
    export(found.state, opened, out, dtype=parse_dtype(word, field="--dtype"), lora=lora)
    export_adapter(found.state, opened, out.with_name(f"{out.name}-adapter"), lora)
    return found.step


def _template(config: Any, lora: Any, dtype: Any) -> dict[str, Any]:
    """Shapes of the parameters as a checkpoint holds them."""
    from functools import partial

    import jax

    from evisrag_jax.models.lora import init_adapters
    from evisrag_jax.models.qwen25vl.model import param_shapes
    from evisrag_jax.training.state import flatten, nest

    flat = flatten(param_shapes(config))
    flat = {path: jax.ShapeDtypeStruct(leaf.shape, dtype) for path, leaf in flat.items()}
    if lora.rank:
        flat |= jax.eval_shape(partial(init_adapters, config, lora, 0))
    return nest(flat)


def check(folder: Path) -> int:
    """Checks a model folder and prints what it is."""
    from evisrag_jax.models.qwen25vl.weights import check_folder
    from evisrag_jax.training.pretrained import find_model

    config, shards = check_folder(find_model(folder))
    formats = Counter(one.format for one in shards.where.values())
    newer = any(
        ".language_model." in one.name or one.name.startswith("model.visual")
        for one in shards.where.values()
    )
    parameters = sum(one.nbytes // one.dtype.itemsize for one in shards.where.values())
    text = config.text
    facts = {
        "folder": folder,
        "tensors": len(shards.where),
        "parameters": f"{parameters / 1e9:.3f} billion",
        "bytes": f"{shards.nbytes / 1e9:.3f} GB in {len({s.path for s in shards.where.values()})} file(s)",
        "formats": ", ".join(f"{name} ({n})" for name, n in formats.most_common()),
        "key style": "model.language_model.*, model.visual.*" if newer else "model.*, visual.*",
        "decoder": f"{text.layers} layers, width {text.width}, heads {text.heads}/{text.kv_heads}, "
        f"vocabulary {text.vocab}",
        "embeddings": "tied" if text.tied else "untied",
        "tower": "none" if config.vision is None else f"{config.vision.depth} blocks",
    }
    for name, value in facts.items():
        print(f"{name:12} {value}")
    print("whole: every tensor of the config is there, in shape")
    return 0
