"""Image features of a frozen vision tower: computed once an image and run.

    pages ─keys─► in memory? ─► on disk? ─► encode ─► [M, D] a page on the host, without padding
                                              one page a device and call

A page is encoded by itself, in the smallest configured page size that holds it, so its features depend
on the page, the tower and the format alone: never on what else was missing, on a restart or on a bound.
Calls are dispatched ahead of each other, so the device does not wait for the host in between.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

import evisrag_jax
from evisrag_jax.models.qwen25vl import model, vision
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, VisionConfig
from evisrag_jax.pages.patches import ImageArrays, PagePatches, stack_pages
from evisrag_jax.pages.plan import VisionLayout
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.feature_files import FeatureFiles
from evisrag_jax.training.settings import PromptSource
from evisrag_jax.training.state import flatten

DISPATCHED = 2  # calls in flight before the first is waited for


@dataclass(frozen=True, eq=False)
class _Wanted:
    """A page that is this call's to answer."""

    key: str
    page: PagePatches
    future: Future[np.ndarray]


class FeatureCache:
    """Features of prepared pages; safe to use from threads once `load` has given it a tower.

    Args:
        config: the model's.
        layout: how its pages are cut.
        sizes: (windows, merged tokens) of the page sizes: a program each.
        dtype: to compute in, and of the features.
        mesh: pages are spread over its batch axes, the tower lies as in training.
        max_bytes: of features held in memory; 0 holds none.
        folder: of features on disk; None for none.
    """

    def __init__(
        self,
        config: Qwen25VLConfig,
        layout: VisionLayout,
        sizes: Iterable[tuple[int, int]],
        *,
        dtype: str,
        mesh: Mesh,
        max_bytes: int,
        folder: str | Path | None = None,
    ):
        if config.vision is None:
            raise ValueError("a model without a vision tower has no features to cache")
        self.config, self.layout, self.sizes = config, layout, sorted(set(sizes))
        self.dtype, self.width = jnp.dtype(dtype), config.vision.out_width
        self.max_bytes, self.mesh = max_bytes, mesh
        self.hits = self.misses = self.disk_hits = self.bytes = 0
        self._files = None if folder is None else FeatureFiles(folder)
        self._entries: OrderedDict[str, Future[np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        self._devices = int(np.prod([mesh.shape[axis] for axis in meshes.BATCH_AXES]))
        self._batch = meshes.batch_sharding(mesh)
        self._encode, self._copy, self._shardings = programs(config, mesh, self.dtype)
        self._tower: Any = None
        self._context = ""

    @property
    def loaded(self) -> bool:
        """Whether there is a tower."""
        return self._tower is not None

    def take(self, params: Mapping[str, Any]) -> None:
        """`load` the tower of the model's parameters, unless there is one: a frozen tower stays."""
        if self._tower is None:
            self.load(params["vision"])

    def load(self, tower: Mapping[str, Any]) -> None:
        """Take a tower: copy it (updates give their buffers away), hash it, and run every page size on
        an empty page, the largest first. Features of another tower are forgotten.

        Args:
            tower: the model's "vision" parameters on their devices.
        """
        copies = self._copy(jax.device_put(dict(tower), self._shardings))
        facts = (tower_hash(copies), self.config.vision, self.layout, self.dtype.name)
        code = (evisrag_jax.__version__, jax.__version__, self.mesh.devices.flat[0].device_kind)
        with self._lock:
            self._entries.clear()
            self.bytes, self._context, self._tower = 0, repr((*facts, *code)), copies
        for size in reversed(self.sizes):
            jax.block_until_ready(self._run([], size))

    def get(self, pages: Sequence[PagePatches]) -> tuple[Float[np.ndarray, "_ D"], ...]:
        """The features of each page, read-only; those that are nowhere yet are computed now.

        Raises ValueError for a page over the largest size.
        """
        futures: list[Future[np.ndarray]] = []
        mine: list[_Wanted] = []
        keys = [self.key(page) for page in pages]
        with self._lock:
            for key, page in zip(keys, pages, strict=True):
                future = self._entries.get(key)
                if future is None:
                    future = self._entries[key] = Future()
                    mine.append(_Wanted(key, page, future))
                else:
                    self._entries.move_to_end(key)
                    self.hits += 1
                futures.append(future)
        try:
            self._fill(mine)
        except BaseException as error:
            for wanted in mine:
                if not wanted.future.done():
                    with self._lock:
                        self._entries.pop(wanted.key, None)
                    wanted.future.set_exception(error)
            raise
        return tuple(map(self._await, pages, futures))

    def _await(self, page: PagePatches, future: Future[np.ndarray]) -> np.ndarray:
        try:
            return future.result()
        except Exception:  # another thread's call failed, perhaps for another page of it
            return self.get([page])[0]

    def ahead(self, pages: Sequence[PagePatches]) -> tuple[Float[np.ndarray, "_ D"], ...] | None:
        """`get` for a thread that prepares a later batch while the device works on this one.

        None before there is a tower, and on a mesh of several devices: programs with collectives
        must be started in one order on all of them, so there the training thread encodes.
        """
        return self.get(pages) if self._tower is not None and self.mesh.size == 1 else None

    def __contains__(self, page: PagePatches) -> bool:
        """Whether the page's features are in memory or being computed."""
        return self.key(page) in self._entries

    def key(self, page: PagePatches) -> str:
        """What the features of a page depend on, as a hexadecimal SHA-256."""
        facts = (self._context, page.content_hash, page.grid, self._size(page)[0])
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def metrics(self) -> dict[str, float]:
        """Pages found in memory, found on disk and computed so far, and MiB in memory, as metrics."""
        return {
            "cache/feature_hits": float(self.hits),
            "cache/feature_disk_hits": float(self.disk_hits),
            "cache/feature_misses": float(self.misses),
            "cache/feature_mib": self.bytes / 2**20,
        }

    def _size(self, page: PagePatches) -> tuple[int, int]:
        """The smallest page size (windows, tokens) that holds the page."""
        need = (len(page.mask), len(page.merged_index))
        for size in self.sizes:
            if need[0] <= size[0] and need[1] <= size[1]:
                return size
        raise ValueError(
            f"a page of {need[0]} windows and {need[1]} tokens is over the page sizes {self.sizes}"
        )

    def _fill(self, wanted: Sequence[_Wanted]) -> None:
        """Answers from disk, or by encoding, the largest pages first."""
        lacking: dict[tuple[int, int], list[_Wanted]] = {}
        for one in wanted:
            found = None
            if self._files is not None:
                shape = (len(one.page.merged_index), self.width)
                found = self._files.read(one.key, shape, self.dtype)
            if found is None:
                lacking.setdefault(self._size(one.page), []).append(one)
            else:
                self._keep(one, found, "disk_hits")
        running: deque[tuple[list[_Wanted], Array]] = deque()
        for size, items in sorted(lacking.items(), reverse=True):
            for first in range(0, len(items), self._devices):
                chunk = items[first : first + self._devices]
                running.append((chunk, self._run([one.page for one in chunk], size)))
                if len(running) > DISPATCHED:
                    self._collect(*running.popleft())
        while running:
            self._collect(*running.popleft())

    def _run(self, pages: Sequence[PagePatches], size: tuple[int, int]) -> Array:
        """Features [devices, M, D] of at most a page a device, dispatched."""
        rows = [[page] for page in pages] + [[]] * (self._devices - len(pages))
        windows, tokens = size
        images = stack_pages(rows, images=1, windows=windows, tokens=tokens, layout=self.layout)
        return self._encode(self._tower, jax.device_put(images, self._batch))

    def _collect(self, chunk: Sequence[_Wanted], features: Array) -> None:
        for row, one in zip(jax.device_get(features), chunk, strict=False):
            found = row[: len(one.page.merged_index)].copy()
            found.setflags(write=False)
            if self._files is not None:
                self._files.write(one.key, found)
            self._keep(one, found, "misses")

    def _keep(self, one: _Wanted, features: np.ndarray, counter: str) -> None:
        with self._lock:
            setattr(self, counter, getattr(self, counter) + 1)
            one.future.set_result(features)
            if self._entries.get(one.key) is one.future:
                self.bytes += features.nbytes
            while self.bytes > self.max_bytes:
                oldest = next(k for k, future in self._entries.items() if future.done())
                self.bytes -= self._entries.pop(oldest).result().nbytes


def encode_pages(tower: Any, images: ImageArrays, *, config: VisionConfig) -> Float[Array, "P M D"]:
    """Features of P prompts of one image each, in the dtype of the tower."""
    patches, mask, rowcol, merged_index = (a[:, 0] for a in images)
    patches = patches.astype(jax.tree.leaves(tower)[0].dtype)
    return vision.encode(tower, config, patches, mask, rowcol, merged_index)


def copy_tower(tower: Any, *, dtype: Any) -> Any:
    """Parameters in a dtype, in buffers of their own."""
    return jax.tree.map(lambda a: jnp.copy(a.astype(dtype)), tower)


@functools.cache
def programs(config: Qwen25VLConfig, mesh: Mesh, dtype: Any) -> tuple[Any, Any, Any]:
    """`encode_pages` and `copy_tower` under jit, and the shardings of the tower."""
    tower = meshes.shardings(
        model.logical_axes(config)["vision"], model.param_shapes(config)["vision"], mesh
    )
    batch = meshes.batch_sharding(mesh)
    encode = partial(encode_pages, config=config.vision)
    return (
        jax.jit(encode, in_shardings=(tower, batch), out_shardings=batch),
        jax.jit(partial(copy_tower, dtype=dtype), in_shardings=(tower,), out_shardings=tower),
        tower,
    )


def tower_hash(tower: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over names, shapes, formats and bytes of nested parameters."""
    digest = hashlib.sha256()
    for path, leaf in flatten(tower).items():
        array = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{path} {array.dtype} {array.shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def for_run(
    config: Qwen25VLConfig,
    layout: VisionLayout,
    sizes: Iterable[tuple[int, int]],
    trainable: Iterable[str],
    data: PromptSource,
    *,
    dtype: str,
    mesh: Mesh,
) -> FeatureCache | None:
    """The cache of a training run; None where the tower trains (`trainable` are paths) or there are no
    page sizes."""
    sizes = list(sizes)
    if config.vision is None or not sizes or any(p.startswith("vision/") for p in trainable):
        return None
    return FeatureCache(
        config,
        layout,
        sizes,
        dtype=dtype,
        mesh=mesh,
        max_bytes=data.feature_cache_mb * 2**20,
        folder=data.feature_cache_dir or None,
    )
