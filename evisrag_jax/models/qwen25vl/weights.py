"""Hugging Face folders ↔ parameters: one line a tensor, nothing read twice, nothing left unread.

Key layouts of three library generations are accepted (`visual.*` + `model.layers.*`,
`model.visual.*` + `model.language_model.*`, a `lm_head` under either prefix); files are written in
the published one. A missing, unknown or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, load_config, to_hf
from evisrag_jax.models.qwen25vl.model import Params, param_shapes
from evisrag_jax.models.qwen25vl.tensors import Entry, canonical_name, entries

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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


class WeightsError(ValueError):
    """A weight file that does not fit its config; the message names the file and the tensors."""


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a readable safetensors file ({error})") from error


def _held(path: Path) -> dict[str, Path]:
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _files(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The file that lists the tensors, and tensor → file; all shards must be whole and listed."""
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():
        return single, _held(single)
    if not index.is_file():
        raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}")
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index}: not a list of shards ({error!r})") from error
    shards = sorted(set(listed.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"{index}: shards missing: {', '.join(missing)}")
    found: dict[str, Path] = {}
    for name in shards:
        found |= _held(folder / name)
    listed = {name: folder / shard for name, shard in listed.items()}
    wrong = sorted(dict(found.items() ^ listed.items()))
    if wrong:
        raise WeightsError(f"{index}: the list and the shards disagree about {', '.join(wrong)}")
    return index, found


class _Reader:
    """Tensors by canonical name, each file opened once."""

    def __init__(self, folder: Path):
        self.source, files = _files(folder)
        self.where: dict[str, tuple[str, Path]] = {}
        for name, path in files.items():
            canonical = canonical_name(name)
            if canonical in self.where:
                other = self.where[canonical][0]
                raise WeightsError(f"{self.source}: {name} and {other} are the same tensor")
            self.where[canonical] = (name, path)
        self.handles: dict[Path, Any] = {}

    def read(self, canonical: str) -> np.ndarray:
        name, path = self.where[canonical]
        if path not in self.handles:
            self.handles[path] = _open(path)
        try:
            value = self.handles[path].get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{path}: {name}: {error}") from error
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise WeightsError(f"{path}: {name} is {value.dtype}, expected floating point")
        return value

    def read_entry(self, entry: Entry, shape: tuple[int, ...], dtype) -> np.ndarray:
        """The tensor as the parameter of this shape."""
        raw = self.read(entry.name)
        expected = entry.save(np.empty(shape)).shape
        if raw.shape != expected:
            name, path = self.where[entry.name]
            raise WeightsError(f"{path}: {name} has shape {raw.shape}, expected {expected}")
        return entry.load(raw, shape).astype(dtype)


def _check_names(reader: _Reader, wanted: set[str], tied: bool) -> None:
    extra = {n for n in reader.where.keys() - wanted if not n.endswith("inv_freq")}
    if tied and "lm_head.weight" in extra:
        embedding, head = reader.read("model.embed_tokens.weight"), reader.read("lm_head.weight")
        if not np.array_equal(embedding, head):
            raise WeightsError(
                f"{reader.source}: tie_word_embeddings is true, but lm_head.weight differs from "
                "model.embed_tokens.weight"
            )
        extra.discard("lm_head.weight")
    missing = sorted(wanted - reader.where.keys())
    if missing or extra:
        unknown = sorted(reader.where[name][0] for name in extra)
        raise WeightsError(
            f"{reader.source}: missing tensors: {', '.join(missing) or 'none'}; "
            f"unknown tensors: {', '.join(unknown) or 'none'}"
        )


def load_params(folder: str | Path, dtype=jnp.float32) -> tuple[Params, Qwen25VLConfig]:
    """Parameters of a Hugging Face folder in `dtype`, and its config.

    Raises WeightsError (or config.ConfigError) naming file and tensors when anything is missing,
    unknown, misshapen, or contradicts `tie_word_embeddings`. Rotary `inv_freq` extras are ignored.
    """
    folder = Path(folder)
    config = load_config(folder)
    reader = _Reader(folder)
    table = list(entries(config))
    _check_names(reader, {entry.name for entry in table}, config.text.tied)
    shapes = param_shapes(config)
    arrays: dict[tuple[str, ...], np.ndarray] = {}
    for entry in table:
        shape = _leaf(shapes, entry.path).shape
        if entry.layer is None:
            arrays[entry.path] = reader.read_entry(entry, shape, dtype)
        else:
            stack = arrays.setdefault(entry.path, np.empty(shape, dtype))
            stack[entry.layer] = reader.read_entry(entry, shape[1:], dtype)
    return jax.device_put(_nest(arrays)), config


def save_params(
    params: Params,
    config: Qwen25VLConfig,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype=ml_dtypes.bfloat16,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a folder that transformers loads: config.json, and weights in the published layout.

    With `source` its config, tokenizer, template and processor files are copied byte for byte;
    WeightsError if that config is another than the parameters'. Weight files already in `folder`
    are replaced.
    """
    folder = Path(folder)
    if source is not None and load_config(source) != config:
        raise WeightsError(f"{source}: its config.json is of another model than the parameters")
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        text = json.dumps(to_hf(config, np.dtype(dtype).name), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    elif Path(source).resolve() != folder.resolve():
        for name in SIDE_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
    host = jax.device_get(params)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for entry in entries(config):
        value = _leaf(host, entry.path)
        value = np.asarray(value if entry.layer is None else value[entry.layer])
        tensor = np.ascontiguousarray(entry.save(value).astype(dtype))
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][entry.name] = tensor
        size += tensor.nbytes
    _write_shards(folder, shards)


def _write_shards(folder: Path, shards: list[dict[str, np.ndarray]]) -> None:
    for old in (folder / SINGLE, folder / INDEX, *folder.glob("model-?????-of-?????.safetensors")):
        old.unlink(missing_ok=True)
    if len(shards) == 1:
        write_tensors(folder / SINGLE, shards[0])
        return
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file beside a config.json, readable by whoever may read that."""
    save_file(tensors, path, metadata={"format": "pt"})  # creates the file with mode 600
    shutil.copymode(path.with_name("config.json"), path)


def _leaf(tree, path: tuple[str, ...]):
    for key in path:
        tree = tree[key]
    return tree


def _nest(flat: dict[tuple[str, ...], object]) -> Params:
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
