"""Prepared pages: one preparation a page and run, in threads too, within a bound of patches."""

import threading
import time

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.training import page_cache
from evisrag_jax.training.page_cache import PageCache

LAYOUT = VisionLayout(window=56)
BUDGET = PixelBudget("test", 784, 56 * 84)


@pytest.fixture
def reads(monkeypatch):
    """The files that were opened, in order; each takes a little while."""
    calls, real = [], page_cache.load_page

    def slow(path, **settings):
        calls.append(path)
        time.sleep(0.02)
        return real(path, **settings)

    monkeypatch.setattr(page_cache, "load_page", slow)
    return calls


@pytest.fixture
def paths(tmp_path):
    names = [str(tmp_path / f"{i}.png") for i in range(4)]
    for i, name in enumerate(names):
        Image.new("RGB", (56, 56), (i, 0, 0)).save(name)
    return names


def test_a_page_is_prepared_once_and_again_when_its_file_changes(paths, reads):
    cache, path = PageCache(), paths[0]
    first = cache.get(path, LAYOUT, BUDGET)
    again = cache.get(path, LAYOUT, BUDGET)
    assert again.patches is first.patches and len(reads) == 1
    cache.get(path, LAYOUT, PixelBudget("other", 784, 28 * 28))
    Image.new("RGB", (56, 84), "blue").save(path)
    assert cache.get(path, LAYOUT, BUDGET).content_hash != first.content_hash
    assert len(reads) == 3 and (cache.hits, cache.misses) == (1, 3)
    assert cache.metrics()["cache/page_misses"] == 3


def test_threads_that_ask_together_share_one_preparation(paths, reads):
    cache, got = PageCache(), []
    threads = [
        threading.Thread(target=lambda: got.append(cache.get(paths[0], LAYOUT, BUDGET)))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(reads) == 1 and len(got) == 4 and len({id(page.patches) for page in got}) == 1


def test_what_had_to_go_is_prepared_again_only_when_its_patches_are_read(paths, reads):
    """Room for the patches of two pages; grid and hash of all four are known for good."""
    whole = [PageCache().get(path, LAYOUT, BUDGET) for path in paths]
    size = whole[0].patches.nbytes
    reads.clear()
    cache = PageCache(max_bytes=2 * size)
    for _ in range(3):
        pages = [cache.get(path, LAYOUT, BUDGET) for path in paths]
    assert reads == paths and cache.bytes == 2 * size
    for page, want in zip(pages, whole, strict=True):
        assert (page.grid, page.content_hash) == (want.grid, want.content_hash)
        for name in ("mask", "rowcol", "merged_index"):
            np.testing.assert_array_equal(getattr(page, name), getattr(want, name))
    np.testing.assert_array_equal(pages[3].patches, whole[3].patches)
    assert reads == paths
    np.testing.assert_array_equal(pages[0].patches, whole[0].patches)
    assert reads == [*paths, paths[0]] and cache.bytes == 2 * size
    assert pages[0].patches is pages[0].patches, "held by the page from then on"
    for path in paths[1:]:
        _ = cache.get(path, LAYOUT, BUDGET).patches
    count = len(reads)
    _ = pages[0].patches
    assert len(reads) == count
    _ = pages[0].light().patches
    assert len(reads) == count + 1, "a light page holds none"


def test_another_picture_under_a_known_page_is_refused_by_name(paths):
    """Evicted, overwritten, read again: its pixels must not meet the old grid and features."""
    cache = PageCache(max_bytes=0)
    page = cache.get(paths[0], LAYOUT, BUDGET)
    Image.new("RGB", (56, 56), "green").save(paths[0])
    with pytest.raises(PageError, match=r"0\.png: was changed while a run used it"):
        _ = page.patches
    assert cache.get(paths[0], LAYOUT, BUDGET).content_hash != page.content_hash


def test_a_page_of_no_use_is_opened_once_until_it_changes(tmp_path, reads):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"<html>")
    cache, said = PageCache(), set()
    for _ in range(3):
        with pytest.raises(PageError, match=r"bad\.png") as caught:
            cache.get(str(bad), LAYOUT, BUDGET)
        said.add((str(caught.value), caught.value.kind))
    assert len(reads) == 1 and len(said) == 1 and cache.bytes == 0
    Image.new("RGB", (56, 56), "red").save(bad)
    assert cache.get(str(bad), LAYOUT, BUDGET).grid == (4, 4)
    with pytest.raises(PageError, match="none.png"):
        cache.get(str(tmp_path / "none.png"), LAYOUT, BUDGET)
