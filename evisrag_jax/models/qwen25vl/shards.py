"""The tensors of a Hugging Face folder: checked by their headers, read by slices.

    model-00001-of-00002.safetensors   | length | header: name, dtype, shape, offsets | data … |
                                                        └ read and checked first        └ only what is asked for

Only the range of one tensor is mapped at a time, and only while it is copied: mapped pages count as
memory of the process, so mapping whole files would cost a second copy of the weights.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from evisrag_jax.models.qwen25vl.tensors import canonical_name

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_ROWS = 128  # of a matrix, copied at a time: a transposed copy then stays in the processor's cache
_COMPARED = 2**24  # bytes of two tensors compared at a time


class WeightsError(ValueError):
    """A weight file that does not fit its config; the message names the file and the tensors."""


@dataclass(frozen=True)
class Stored:
    """One tensor on disk: its name there, format as the file says it, and place in the file (bytes)."""

    name: str
    path: Path
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.format])


class Shards:
    """The tensors of a folder by canonical name; opening reads headers alone.

    source: the file that lists them.  bytes_read: of data copied so far.

    Raises WeightsError for a file that is missing, cut or not what the index says, and for a tensor that
    is there twice.
    """

    def __init__(self, folder: Path):
        self.source, stored = _listed(folder)
        self.where: dict[str, Stored] = {}
        self.bytes_read = 0
        for one in stored:
            canonical = canonical_name(one.name)
            if canonical in self.where:
                other = self.where[canonical].name
                raise WeightsError(f"{self.source}: {one.name} and {other} are the same tensor")
            self.where[canonical] = one

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.where.values())

    def check(self, canonical: str, shape: tuple[int, ...]) -> None:
        """WeightsError unless the tensor is of floating point and has this shape."""
        one = self.where[canonical]
        if one.format not in DTYPES:
            raise WeightsError(
                f"{one.path}: {one.name} is {_word(one.format)}, expected floating point"
            )
        if one.shape != shape:
            raise WeightsError(f"{one.path}: {one.name} has shape {one.shape}, expected {shape}")

    def copy(
        self,
        canonical: str,
        out: np.ndarray,
        view: Callable[[np.ndarray], np.ndarray] = lambda a: a,
    ) -> None:
        """Copies `view` of a tensor (a slice, a transposed form: no copy of its own) into `out`, cast to
        its dtype. Pages of the file outside the view are not read."""
        part = view(self._mapped(canonical))
        self.bytes_read += part.size * part.itemsize
        _copy(out, part)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors are bitwise the same."""
        a, b = self.where[first], self.where[second]
        if (a.format, a.shape) != (b.format, b.shape):
            return False
        left, right = (self._mapped(n).reshape(-1).view(np.uint8) for n in (first, second))
        return all(
            np.array_equal(left[i : i + _COMPARED], right[i : i + _COMPARED])
            for i in range(0, left.size, _COMPARED)
        )

    def _mapped(self, canonical: str) -> np.ndarray:
        """A tensor's range of its file, mapped for as long as the array lives."""
        one = self.where[canonical]
        begin = one.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        skipped, count = one.offset - begin, int(np.prod(one.shape))
        with one.path.open("rb") as file:
            length = skipped + one.nbytes
            mapped = mmap.mmap(file.fileno(), length, offset=begin, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, one.dtype, count, skipped).reshape(one.shape)


def _copy(out: np.ndarray, part: np.ndarray) -> None:
    if out.dtype == part.dtype:  # as plain integers: numpy's quick way
        out, part = (a.view(f"u{a.itemsize}") for a in (out, part))
    if part.ndim < 2 or part.strides[0] != part.itemsize or part.shape[0] == 1:
        out[...] = part
        return
    # A row of the file is a column here.
    step = max(1, _ROWS // int(np.prod(part.shape[2:])))
    for i in range(0, part.shape[1], step):
        out[:, i : i + step] = part[:, i : i + step]


def _listed(folder: Path) -> tuple[Path, list[Stored]]:
    """The file that lists the tensors, and all of them; shards must be whole and as listed."""
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():
        return single, _header(single)
    if not index.is_file():
        raise WeightsError(f"{folder}: neither {SINGLE} nor {INDEX}")
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index}: not a list of shards ({error!r})") from error
    names = sorted(set(listed.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"{index}: shards missing: {', '.join(missing)}")
    stored = [one for name in names for one in _header(folder / name)]
    found = {(one.name, one.path) for one in stored}
    wrong = sorted(dict(found ^ {(name, folder / shard) for name, shard in listed.items()}))
    if wrong:
        raise WeightsError(f"{index}: the list and the shards disagree about {', '.join(wrong)}")
    return index, stored


def _header(path: Path) -> list[Stored]:
    try:
        with safe_open(path, framework="numpy"):  # checks the header, and the file's length by it
            pass
    except SafetensorError as error:
        raise WeightsError(f"{path}: not a readable safetensors file ({error})") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return [
        Stored(
            name=name,
            path=path,
            format=facts["dtype"],
            shape=tuple(facts["shape"]),
            offset=8 + length + facts["data_offsets"][0],
            nbytes=facts["data_offsets"][1] - facts["data_offsets"][0],
        )
        for name, facts in header.items()
        if name != "__metadata__"
    ]


def _word(format: str) -> str:
    """ "I8" → "int8"."""
    kinds = {"I": "int", "U": "uint", "F": "float", "BOOL": "bool"}
    kind = format.rstrip("0123456789")
    return kinds.get(kind, kind) + format[len(kind) :]


def aligned_empty(shape: Iterable[int], dtype: Any) -> np.ndarray:
    """An uninitialised array that a CPU device can hold without copying it (64-byte aligned)."""
    shape, dtype = tuple(shape), np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)
