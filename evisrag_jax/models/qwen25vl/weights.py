"""Hugging Face folders ↔ parameters: by slices into their shards, and tensor by tensor back.

    headers ─check─► names, shapes ─┐                            nothing is read before all is checked
    tensor, slice of a device ──────┴─► buffer ─► device ─► jax.Array        a parameter at a time

Key layouts of three library generations are accepted (`visual.*` + `model.layers.*`,
`model.visual.*` + `model.language_model.*`, a `lm_head` under either prefix); files are written in
the published one. A missing, unknown or misshapen tensor is an error that names it. Of several
processes each reads only what its own devices hold; all take part in writing, and process 0 writes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from safetensors.numpy import save_file

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, load_config, to_hf
from evisrag_jax.models.qwen25vl.model import Params, param_shapes
from evisrag_jax.models.qwen25vl.shards import INDEX, SINGLE, Shards, WeightsError, aligned_empty
from evisrag_jax.models.qwen25vl.tensors import Entry, entries

__all__ = ["INDEX", "SINGLE", "WeightsError", "check_folder", "load_params", "save_params"]

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_folder(folder: str | Path) -> tuple[Qwen25VLConfig, Shards]:
    """Config and tensors of a folder, checked against each other from the files' headers: seconds, however
    large it is.

    Raises WeightsError (or config.ConfigError) naming file and tensors when anything is missing, cut,
    unknown, misshapen, or contradicts `tie_word_embeddings`. Rotary `inv_freq` extras are ignored.
    """
    config = load_config(folder)
    shards = Shards(Path(folder))
    table, shapes = list(entries(config)), param_shapes(config)
    extra = {n for n in shards.where.keys() - {e.name for e in table} if not n.endswith("inv_freq")}
    if config.text.tied and HEAD in extra and EMBEDDING in shards.where:
        if not shards.equal(EMBEDDING, HEAD):
            raise WeightsError(
                f"{shards.source}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
            )
        extra.discard(HEAD)
    missing = sorted({entry.name for entry in table} - shards.where.keys())
    if missing or extra:
        unknown = sorted(shards.where[name].name for name in extra)
        raise WeightsError(
            f"{shards.source}: missing tensors: {', '.join(missing) or 'none'}; "
            f"unknown tensors: {', '.join(unknown) or 'none'}"
        )
    for entry in table:
        shards.check(entry.name, entry.save(_no_data(tensor_shape(shapes, entry))).shape)
    return config, shards


def load_params(
    folder: str | Path, dtype: Any = jnp.float32, shardings: Any = None
) -> tuple[Params, Qwen25VLConfig]:
    """Parameters of a Hugging Face folder in `dtype`, and its config.

    shardings: a tree like the parameters that says where each lies; None for the default device. This
    process reads the slices that its devices hold, each once. At most one parameter's slice is in the
    host's memory beside what the devices have.

    Raises as `check_folder` does, before anything is read.
    """
    config, shards = check_folder(folder)
    whole = SingleDeviceSharding(jax.devices()[0])
    places = jax.tree.map(lambda _: whole, param_shapes(config)) if shardings is None else shardings
    return read_params(shards, config, dtype, places), config


def read_params(shards: Shards, config: Qwen25VLConfig, dtype: Any, shardings: Any) -> Params:
    """The parameters of a checked folder where `shardings` puts them."""
    parts: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries(config):
        parts.setdefault(entry.path, []).append(entry)
    shapes = param_shapes(config)
    arrays: dict[tuple[str, ...], jax.Array] = {}
    for path, own in parts.items():
        shape = _leaf(shapes, path).shape
        arrays[path] = _read(shards, own, shape, np.dtype(dtype), _leaf(shardings, path))
    return _nest(arrays)


def _read(
    shards: Shards, own: list[Entry], shape: tuple[int, ...], dtype: np.dtype, place: Sharding
) -> jax.Array:
    """One parameter, from the tensors of its layers."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in place.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    placed = {}
    for bounds, holders in devices.items():
        buffer = aligned_empty((stop - start for start, stop in bounds), dtype)
        for entry in own:
            start, stop = (0, 1) if entry.layer is None else bounds[0]
            if entry.layer is not None and not start <= entry.layer < stop:
                continue
            inner = bounds if entry.layer is None else bounds[1:]
            view = partial(_part, entry, shape[len(shape) - len(inner) :], inner)
            out = buffer if entry.layer is None else buffer[entry.layer - start]
            shards.copy(entry.name, out, view)
        placed |= {device: jax.device_put(buffer, device) for device in holders}
        jax.block_until_ready(list(placed.values()))  # the buffer of a GPU is free again
    return jax.make_array_from_single_device_arrays(shape, place, list(placed.values()))


def _part(entry: Entry, shape: tuple[int, ...], bounds: Any, raw: np.ndarray) -> np.ndarray:
    return entry.load(raw, shape)[tuple(slice(*pair) for pair in bounds)]


def tensor_shape(shapes: Params, entry: Entry) -> tuple[int, ...]:
    """Of one tensor as part of its parameter."""
    shape = _leaf(shapes, entry.path).shape
    return shape if entry.layer is None else shape[1:]


def _no_data(shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape that takes no memory."""
    return np.broadcast_to(np.zeros((), np.int8), shape)


# Writing.


def save_params(
    params: Params,
    config: Qwen25VLConfig,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype: Any = ml_dtypes.bfloat16,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a folder that transformers loads: config.json, and weights in the published layout.

    Tensors come from their devices one by one; one file's are in the host's memory at a time. With
    `source` its config, tokenizer, template and processor files are copied byte for byte; WeightsError if
    that config is another than the parameters'. Weight files already in `folder` are replaced. All of
    several processes call this, and process 0 writes.
    """
    if source is not None and load_config(source) != config:
        raise WeightsError(f"{source}: its config.json is of another model than the parameters")

    def tensor(entry: Entry) -> np.ndarray:
        return entry.save(fetch(_leaf(params, entry.path), entry.layer))

    write_folder(tensor, config, Path(folder), source, np.dtype(dtype), max_shard_bytes)


def write_folder(
    tensor: Callable[[Entry], np.ndarray],
    config: Qwen25VLConfig,
    folder: Path,
    source: str | Path | None,
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    """The files of `save_params` from a function that gives each tensor as the files hold it."""
    writes = jax.process_index() == 0
    if writes:
        _write_side_files(folder, config, source, dtype.name)
    plan = _plan(config, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for i, part in enumerate(plan):
        file = SINGLE if len(plan) == 1 else f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors"
        tensors = {}
        for entry in part:
            value = tensor(entry)  # in all processes
            if writes:
                tensors[entry.name] = np.ascontiguousarray(value.astype(dtype))
        if writes:
            write_tensors(folder / file, tensors)
        weight_map |= dict.fromkeys((entry.name for entry in part), file)
    if writes and len(plan) > 1:
        shapes = param_shapes(config)
        sizes = (np.prod(tensor_shape(shapes, e)) * dtype.itemsize for e in entries(config))
        index = {"metadata": {"total_size": int(sum(sizes))}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan(config: Qwen25VLConfig, dtype: np.dtype, limit: int) -> list[list[Entry]]:
    """Which tensors go into which file, in file order."""
    shapes = param_shapes(config)
    plan: list[list[Entry]] = [[]]
    size = 0
    for entry in entries(config):
        nbytes = int(np.prod(tensor_shape(shapes, entry))) * dtype.itemsize
        if plan[-1] and size + nbytes > limit:
            plan.append([])
            size = 0
        plan[-1].append(entry)
        size += nbytes
    return plan


def fetch(leaf: Any, layer: int | None = None) -> np.ndarray:
    """An array, or one layer of it, in the host's memory. All processes that share it call this."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf if layer is None else leaf[layer])
    if layer is None and leaf.is_fully_addressable:
        return np.asarray(jax.device_get(leaf))
    whole = None
    if isinstance(leaf.sharding, NamedSharding):
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    number = None if layer is None else np.int32(layer)
    return np.asarray(jax.device_get(_whole(leaf, number, place=whole)))


@partial(jax.jit, static_argnames=("place",))
def _whole(leaf: jax.Array, layer: Any, *, place: Sharding | None) -> jax.Array:
    part = leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    return part if place is None else jax.lax.with_sharding_constraint(part, place)


def _write_side_files(
    folder: Path, config: Qwen25VLConfig, source: str | Path | None, dtype: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        text = json.dumps(to_hf(config, dtype), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    elif Path(source).resolve() != folder.resolve():
        for name in SIDE_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
    for old in (folder / SINGLE, folder / INDEX, *folder.glob("model-?????-of-?????.safetensors")):
        old.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file beside a config.json, readable by whoever may read that."""
    save_file(tensors, path, metadata={"format": "pt"})  # creates the file with mode 600
    shutil.copymode(path.with_name("config.json"), path)


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _nest(flat: dict[tuple[str, ...], Any]) -> Params:
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
