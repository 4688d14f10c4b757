"""Prepared pages in memory, so that the host never prepares the same page twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

from evisrag_jax.pages.decode import PageError, load_page
from evisrag_jax.pages.patches import PagePatches, make_patches
from evisrag_jax.pages.plan import PixelBudget, VisionLayout


class PageCache:
    """Prepared pages in memory, the least recently used given up first; safe to use from threads.

    A page is known by its path, modification time, size and the settings it was prepared with, and
    is prepared once even if two threads ask for it together. `hits` and `misses` count.

    Args:
        max_bytes: of patch arrays kept; a page in use costs nothing here once given up.
    """

    def __init__(self, max_bytes: int = 2**30):
        self.max_bytes = max_bytes
        self.hits = self.misses = self.bytes = 0
        self._pages: OrderedDict[tuple, Future[PagePatches]] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, path: str, layout: VisionLayout, budget: PixelBudget, exif_transpose: bool = True
    ) -> PagePatches:
        """The patches of a page file. PageError names the file when it cannot be used."""
        try:
            stat = Path(path).stat()
        except OSError as error:
            raise PageError(path, f"cannot be read: {error.strerror or error}", "missing") from None
        key = (path, stat.st_mtime_ns, stat.st_size, layout, budget, exif_transpose)
        with self._lock:
            future = self._pages.get(key)
            if future is not None:
                self._pages.move_to_end(key)
                self.hits += 1
            else:
                self.misses += 1
                mine = self._pages[key] = Future()
        if future is not None:
            return future.result()
        try:
            image = load_page(path, exif_transpose=exif_transpose)
            page = make_patches(image, layout, budget, name=path)
        except BaseException as error:
            with self._lock:
                self._pages.pop(key, None)
            mine.set_exception(error)
            raise
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
