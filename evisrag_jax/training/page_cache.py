"""Prepared pages, so that the host never prepares the same page twice.

    path ─► what is known of the page (grid, size, content hash): kept for the whole run, a few bytes each
         └► its patches: kept within a bound, prepared again only if wanted after they had to go

A page whose features are known (`training.feature_cache`) is never asked for its patches, so from the
second epoch on its file is not even opened.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from evisrag_jax.pages.decode import PageError, load_page
from evisrag_jax.pages.patches import PagePatches, make_patches
from evisrag_jax.pages.plan import PixelBudget, VisionLayout


class CachedPage(PagePatches):
    """A page of a cache. `patches` are loaded when first read and then held by this object."""

    def __init__(self, page: PagePatches, load: Callable[[], PagePatches]):
        for name in ("mask", "rowcol", "merged_index", "grid", "size", "content_hash"):
            object.__setattr__(self, name, getattr(page, name))
        object.__setattr__(self, "_load", load)

    @property
    def patches(self) -> np.ndarray:
        """[W, S, C], see `PagePatches`."""
        # No cached_property: in Python 3.11 its lock would be one for all pages.
        if "_patches" not in self.__dict__:
            object.__setattr__(self, "_patches", self._load().patches)
        return self.__dict__["_patches"]

    def light(self) -> CachedPage:
        """The same page, holding no patches."""
        return CachedPage(self, self._load)


class PageCache:
    """Prepared pages, the patches least recently used given up first; safe to use from threads.

    A page is known by its path, modification time, size and the settings it was prepared with, and
    is prepared once even if two threads ask for it together. A file that cannot be used is opened
    once and refused with the same words from then on, until it changes.

    Args:
        max_bytes: of patch arrays kept; a page in use costs nothing here once given up.
    """

    def __init__(self, max_bytes: int = 2**30):
        self.max_bytes = max_bytes
        self.hits = self.misses = self.bytes = 0
        self._known: dict[tuple, CachedPage | PageError] = {}
        self._pages: OrderedDict[tuple, Future[PagePatches]] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, path: str, layout: VisionLayout, budget: PixelBudget, exif_transpose: bool = True
    ) -> CachedPage:
        """A page file, prepared now if it was never seen. PageError names a file of no use."""
        try:
            stat = Path(path).stat()
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            reason = "no such file" if gone else f"cannot be read: {error.strerror or error}"
            raise PageError(path, reason, "missing") from None
        key = (path, stat.st_mtime_ns, stat.st_size, layout, budget, exif_transpose)
        with self._lock:
            known = self._known.get(key)
            self.hits += known is not None
        if known is None:
            self._prepared(key)
            known = self._known[key]
        if isinstance(known, PageError):
            raise copy.copy(known)
        return known.light()

    def metrics(self) -> dict[str, float]:
        """Pages found and prepared so far, and MiB of patches held, as metrics."""
        return {
            "cache/page_hits": float(self.hits),
            "cache/page_misses": float(self.misses),
            "cache/page_mib": self.bytes / 2**20,
        }

    def _prepared(self, key: tuple) -> PagePatches:
        """The page with its patches, from memory or from its file."""
        with self._lock:
            future = self._pages.get(key)
            if future is not None:
                self._pages.move_to_end(key)
            else:
                self.misses += 1
                mine = self._pages[key] = Future()
        if future is not None:
            return future.result()
        path, _, _, layout, budget, exif_transpose = key
        try:
            image = load_page(path, exif_transpose=exif_transpose)
            page = make_patches(image, layout, budget, name=path)
            known = self._known.get(key)
            if isinstance(known, CachedPage) and known.content_hash != page.content_hash:
                raise PageError(path, "was changed while a run used it", "changed")
        except BaseException as error:
            with self._lock:
                self._pages.pop(key, None)
                if isinstance(error, PageError):
                    self._known[key] = copy.copy(error)  # without the frames, which hold the image
            mine.set_exception(error)
            raise
        with self._lock:
            self._known[key] = CachedPage(page, functools.partial(self._prepared, key))
        mine.set_result(page)
        with self._lock:
            self.bytes += page.patches.nbytes
            self._evict()
        return page

    def _evict(self) -> None:
        for key in list(self._pages):
            if self.bytes <= self.max_bytes:
                return
            if self._pages[key].done():
                self.bytes -= self._pages.pop(key).result().patches.nbytes
