"""Hugging Face folders ↔ parameters: one line a tensor, nothing read twice, nothing left unread.

Key layouts of three library generations are accepted (`visual.*` + `model.layers.*`,
`model.visual.*` + `model.language_model.*`, a `lm_head` under either prefix); files are written in
the published one. A missing, unknown or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, load_config, to_hf
from evisrag_jax.models.qwen25vl.model import Params, param_shapes

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


@dataclass(frozen=True)
class Entry:
    """One Hugging Face tensor: its name, the parameter path (layer None = not stacked), both maps."""

    name: str
    path: tuple[str, ...]
    layer: int | None
    load: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]


def _as_is(a, shape):
    return a.reshape(shape)


def _matrix_in(a, shape):
    """[out, in] → in_shape + out_shape."""
    return a.T.reshape(shape)


def _matrix_out(inputs: int):
    def save(a):
        n_in = int(np.prod(a.shape[:inputs]))
        return a.reshape(n_in, -1).T

    return save


def _conv_in(a, shape):
    """[D, channels, time, patch, patch] → [channels, time, patch², D]."""
    return a.transpose(1, 2, 3, 4, 0).reshape(shape)


def _conv_out(a):
    side = int(round(a.shape[2] ** 0.5))
    return a.reshape(*a.shape[:2], side, side, -1).transpose(4, 0, 1, 2, 3)


def entries(config: Qwen25VLConfig) -> Iterator[Entry]:
    """Every tensor of the published layout, in file order."""

    def linear(name, path, layer=None, *, bias=True, inputs=1):
        yield Entry(
            f"{name}.weight", (*path, "kernel"), layer, _matrix_in, _matrix_out(inputs)
        )
        if bias:
            yield Entry(f"{name}.bias", (*path, "bias"), layer, _as_is, np.ravel)

    def scale(name, path, layer=None):
        return Entry(f"{name}.weight", (*path, "scale"), layer, _as_is, np.asarray)

    if config.vision is not None:
        yield Entry(
            "visual.patch_embed.proj.weight",
            ("vision", "patch_embed", "kernel"),
            None,
            _conv_in,
            _conv_out,
        )
        for i in range(config.vision.depth):
            hf, ours = f"visual.blocks.{i}", ("vision", "blocks")
            yield scale(f"{hf}.norm1", (*ours, "norm1"), i)
            yield scale(f"{hf}.norm2", (*ours, "norm2"), i)
            yield from linear(f"{hf}.attn.qkv", (*ours, "qkv"), i)
            yield from linear(f"{hf}.attn.proj", (*ours, "proj"), i, inputs=2)
            for part in ("gate", "up", "down"):
                yield from linear(f"{hf}.mlp.{part}_proj", (*ours, "mlp", part), i)
        yield scale("visual.merger.ln_q", ("vision", "merger", "norm"))
        yield from linear("visual.merger.mlp.0", ("vision", "merger", "fc1"))
        yield from linear("visual.merger.mlp.2", ("vision", "merger", "fc2"))

    yield Entry(
        "model.embed_tokens.weight", ("text", "embed", "embedding"), None, _as_is, np.asarray
    )
    for i in range(config.text.layers):
        hf, ours = f"model.layers.{i}", ("text", "layers")
        yield scale(f"{hf}.input_layernorm", (*ours, "norm1"), i)
        yield scale(f"{hf}.post_attention_layernorm", (*ours, "norm2"), i)
        for part in ("q", "k", "v"):
            yield from linear(
                f"{hf}.self_attn.{part}_proj", (*ours, part), i, bias=config.text.qkv_bias
            )
        yield from linear(f"{hf}.self_attn.o_proj", (*ours, "o"), i, bias=False, inputs=2)
        for part in ("gate", "up", "down"):
            yield from linear(f"{hf}.mlp.{part}_proj", (*ours, "mlp", part), i, bias=False)
    yield scale("model.norm", ("text", "norm"))
    if not config.text.tied:
        yield from linear("lm_head", ("text", "head"), bias=False)


_RENAMES = (
    (re.compile(r"^model\.visual\."), "visual."),
    (re.compile(r"^(model\.language_model\.|language_model\.model\.)"), "model."),
    (re.compile(r"^(model\.|language_model\.)+lm_head\."), "lm_head."),
)


def canonical_name(name: str) -> str:
    """A tensor's name in the published layout, from any of the accepted ones."""
    name = re.sub(r"^(model\.language_model|language_model)\.lm_head\.", "lm_head.", name)
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name in the file → file. Fails before any tensor is read if a shard is missing."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({f for f in weight_map.values() if not (folder / f).is_file()})
        if missing:
            raise WeightsError(f"{index}: shards missing: {', '.join(missing)}")
        return {name: folder / file for name, file in weight_map.items()}
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}")


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a readable safetensors file ({error})") from error


class _Reader:
    """Tensors by canonical name, each shard opened once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.where: dict[str, tuple[str, Path]] = {}
        for name, path in _files(folder).items():
            canonical = canonical_name(name)
            if canonical in self.where:
                raise WeightsError(f"{folder}: {name} and {self.where[canonical][0]} are the same")
            self.where[canonical] = (name, path)
        self.handles: dict[Path, object] = {}

    def read(self, canonical: str) -> np.ndarray:
        name, path = self.where[canonical]
        if path not in self.handles:
            self.handles[path] = _open(path)
        try:
            return self.handles[path].get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{path}: {name}: {error}") from error


def load_params(
    folder: str | Path, dtype=jnp.float32
) -> tuple[Params, Qwen25VLConfig]:
    """Parameters of a Hugging Face folder in `dtype`, and its config.

    Raises WeightsError (or config.ConfigError) naming file and tensors when anything is missing,
    unknown, misshapen, or contradicts `tie_word_embeddings`. `rotary … inv_freq` extras are ignored.
    """
    folder = Path(folder)
    config = load_config(folder)
    reader = _Reader(folder)
    table = list(entries(config))
    wanted = {entry.name for entry in table}
    extra = {n for n in reader.where if n not in wanted and not n.endswith("inv_freq")}
    if config.text.tied and "lm_head.weight" in extra:
        embedding, head = reader.read("model.embed_tokens.weight"), reader.read("lm_head.weight")
        if not np.array_equal(embedding, head):
            raise WeightsError(
                f"{folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding"
            )
        extra.discard("lm_head.weight")
    missing = sorted(wanted - reader.where.keys())
    if missing or extra:
        raise WeightsError(
            f"{folder}: missing tensors: {missing or 'none'}; unknown tensors: {sorted(extra) or 'none'}"
        )
    shapes = param_shapes(config)
    arrays: dict[tuple[str, ...], np.ndarray] = {}
    for entry in table:
        shape = _leaf(shapes, entry.path).shape
        raw = reader.read(entry.name)
        target = shape if entry.layer is None else shape[1:]
        try:
            value = entry.load(raw, target).astype(dtype)
        except (ValueError, TypeError) as error:
            raise WeightsError(
                f"{folder}: {entry.name} has shape {raw.shape}, which does not fit {target}"
            ) from error
        if entry.layer is None:
            arrays[entry.path] = value
        else:
            stack = arrays.setdefault(entry.path, np.empty(shape, value.dtype))
            stack[entry.layer] = value
    return _nest({path: jnp.asarray(value) for path, value in arrays.items()}), config


def save_params(
    params: Params,
    config: Qwen25VLConfig,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype=ml_dtypes.bfloat16,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a folder that transformers loads: weights in the published layout, `dtype`, and config.json.

    With `source` its config, tokenizer, template and processor files are copied byte for byte.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in SIDE_FILES if source else ():
        if (Path(source) / name).is_file() and Path(source).resolve() != folder.resolve():
            shutil.copyfile(Path(source) / name, folder / name)
    if not source:
        text = json.dumps(to_hf(config), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
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
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata=metadata)
        return
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


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
