"""Features of a frozen tower: once an image, the same bits from wherever they come, within a bound."""

import logging
import threading

import jax
import numpy as np
import pytest
from PIL import Image

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.pages.patches import make_patches, stack_pages
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.runtime.compile_cache import CompileCounter
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.feature_cache import FeatureCache, for_run
from evisrag_jax.training.settings import PromptSource
from tests.rl.tiny import draw_params, tiny_config

LAYOUT = VisionLayout(window=56)
BUDGET = PixelBudget("test", 784, 112 * 140)
SIZES = [(2, 6), (6, 20)]  # windows and tokens a page
CONFIG = tiny_config()
D, FLOAT32 = CONFIG.vision.out_width, 4


def page(height, width, seed, budget=BUDGET):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return make_patches(Image.fromarray(pixels), LAYOUT, budget)


@pytest.fixture(scope="module")
def pages():
    """4, 6, 20 and 20 merged tokens: two of each page size."""
    sizes = [(56, 56), (56, 84), (112, 140), (140, 112)]
    return [page(*size, seed) for seed, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jax.numpy.asarray, draw_params(CONFIG))


def make(params, *, devices=1, max_bytes=2**20, folder=None, dtype="float32", sizes=SIZES):
    mesh = make_mesh(devices=jax.devices()[:devices])
    settings = {"dtype": dtype, "mesh": mesh, "max_bytes": max_bytes, "folder": folder}
    cache = FeatureCache(CONFIG, LAYOUT, sizes, **settings)
    cache.take(params)
    return cache


@pytest.fixture(scope="module")
def whole(params, pages):
    """A cache that has all pages."""
    cache = make(params)
    cache.get(pages)
    return cache


def same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_features_are_those_of_the_models_batch(params, pages, whole):
    """Against the model's own function over one padded batch: 1e-5 relative, without the padding."""
    images = stack_pages([pages[:2], pages[2:]], images=2, windows=6, tokens=20)
    batch = np.asarray(model.encode_images(params, CONFIG, images)).reshape(4, 20, D)
    for got, want, one in zip(whole.get(pages), batch, pages, strict=True):
        assert got.shape == (len(one.merged_index), D) and not got.flags.writeable
        want = want[: len(got)]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    assert whole.bytes == (4 + 6 + 20 + 20) * D * FLOAT32


@pytest.mark.parametrize("devices", [1, 4])
def test_a_hit_equals_recomputation_bitwise(params, pages, whole, devices):
    """Whatever else was missing, in another order and place, and on one or four devices."""
    want = whole.get(pages)
    misses = whole.misses
    same(whole.get(pages), want)
    assert whole.misses == misses == 4
    other = make(params, devices=devices)
    same(other.get([pages[3], pages[1]]), [want[3], want[1]])
    same(other.get([pages[2], pages[2], pages[0], pages[3]]), [want[i] for i in (2, 2, 0, 3)])
    assert (other.hits, other.misses) == (2, 4)


def test_equal_pictures_are_one_page_and_sizes_are_told_apart(params, pages, whole):
    assert whole.key(page(56, 84, 1)) == whole.key(pages[1])
    assert whole.key(page(56, 84, 9)) != whole.key(pages[1])
    small = make_patches(
        Image.fromarray(np.zeros((112, 112, 3), np.uint8)), LAYOUT, PixelBudget("b", 784, 56 * 56)
    )
    large = make_patches(Image.fromarray(np.zeros((112, 112, 3), np.uint8)), LAYOUT, BUDGET)
    assert small.content_hash == large.content_hash and whole.key(small) != whole.key(large)


def test_another_tower_is_never_answered_from_this_one(params, pages, whole, tmp_path):
    """One weight changed, in memory and on disk; the old tower finds its own files again."""
    changed = jax.tree.map(lambda a: a, params)
    changed["vision"]["merger"]["fc2"]["bias"] = params["vision"]["merger"]["fc2"]["bias"] + 1
    cache = make(params, folder=tmp_path)
    before = cache.get(pages[:2])
    cache.load(changed["vision"])
    after = cache.get(pages[:2])
    assert (cache.hits, cache.disk_hits, cache.misses) == (0, 0, 4)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_allclose(a, b + 1, rtol=1e-5, atol=1e-5)
    cache.take(params)  # there is a tower: kept
    same(cache.get(pages[:2]), after)
    cache.load(params["vision"])
    same(cache.get(pages[:2]), before)
    assert cache.disk_hits == 2 and len(list(tmp_path.iterdir())) == 4


def test_the_tower_is_a_copy(params, pages, whole):
    """An update may give its buffers away."""
    own = jax.tree.map(jax.numpy.copy, params)
    cache = make(own)
    jax.tree.map(lambda a: a.delete(), own)
    same(cache.get(pages), whole.get(pages))


def test_the_bound_holds_and_the_least_recently_used_goes(params, pages):
    """Room for 26 tokens: 4 + 20 or 6 + 20; a page over the bound is answered and not kept."""
    cache = make(params, max_bytes=26 * D * FLOAT32)
    small, medium, large, _ = pages
    for one, kept in ((small, 4), (large, 24), (small, 24), (medium, 10), (large, 26)):
        cache.get([one])
        assert cache.bytes == kept * D * FLOAT32
    assert (cache.hits, cache.misses) == (1, 4)
    assert large in cache and medium in cache and small not in cache
    none = make(params, max_bytes=0)
    same(none.get(pages), none.get(pages))
    assert none.bytes == 0 and (none.hits, none.misses) == (0, 8)


def test_disk_features_are_found_by_another_cache(params, pages, whole, tmp_path):
    make(params, folder=tmp_path).get(pages)
    again = make(params, folder=tmp_path)
    same(again.get(pages), whole.get(pages))
    assert (again.disk_hits, again.misses) == (4, 0)
    same(again.get(pages), whole.get(pages))
    assert (again.hits, again.disk_hits) == (4, 4)
    assert again.metrics() == {
        "cache/feature_hits": 4.0,
        "cache/feature_disk_hits": 4.0,
        "cache/feature_misses": 0.0,
        "cache/feature_mib": 50 * D * FLOAT32 / 2**20,
    }


def cut(data, other):
    return data[:-7]


def damaged(data, other):
    return data[:-1] + bytes([data[-1] ^ 1])


def foreign(data, other):
    return other


def no_header(data, other):
    return b"<html>\n" + data


@pytest.mark.parametrize("spoil", [cut, damaged, foreign, no_header, lambda *_: b""])
def test_a_spoilt_file_is_reported_and_computed_again(
    params, pages, whole, tmp_path, caplog, spoil
):
    first = make(params, folder=tmp_path)
    first.get(pages[2:])
    path, other = (tmp_path / f"{first.key(one)}.features" for one in pages[2:])
    path.write_bytes(spoil(path.read_bytes(), other.read_bytes()))
    again = make(params, folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        same(again.get(pages[2:]), whole.get(pages[2:]))
    assert (again.disk_hits, again.misses) == (1, 1)
    (line,) = caplog.messages
    assert str(path) in line and "computed again" in line and "\n" not in line
    last = make(params, folder=tmp_path)
    same(last.get(pages[2:]), whole.get(pages[2:]))
    assert last.disk_hits == 2 and not list(tmp_path.glob("*.part"))


def test_a_folder_that_cannot_be_written_ends_writing_not_the_run(
    params, pages, whole, tmp_path, caplog, monkeypatch
):
    cache = make(params, folder=tmp_path / "features")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    same(cache.get(pages), whole.get(pages))
    assert len(caplog.messages) == 1 and "No space left" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make(params, folder=tmp_path / "file" / "x")


def test_threads_share_one_computation(params, pages, whole):
    cache, got, errors = make(params), {}, []

    def ask(i):
        try:
            order = np.random.default_rng(i).permutation(4)
            got[i] = (order, cache.ahead([pages[j] for j in order]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and cache.misses == 4 and cache.hits == 28
    for order, found in got.values():
        same(found, [whole.get(pages)[j] for j in order])


def test_only_one_device_encodes_from_threads(params, pages):
    """Programs with collectives start in one order everywhere; and nothing runs without a tower."""
    mesh = make_mesh(devices=jax.devices()[:1])
    settings = {"dtype": "float32", "mesh": mesh, "max_bytes": 2**20}
    assert FeatureCache(CONFIG, LAYOUT, SIZES, **settings).ahead(pages) is None
    assert make(params, devices=2).ahead(pages) is None


def test_a_failure_is_not_remembered(params, pages, whole, monkeypatch):
    cache = make(params)
    run = cache._run
    monkeypatch.setattr(cache, "_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.get(pages)
    monkeypatch.setattr(cache, "_run", run)
    same(cache.get(pages), whole.get(pages))
    with pytest.raises(ValueError, match="8 windows and 32 tokens is over the page sizes"):
        cache.get([page(224, 112, 0, PixelBudget("large", 784, 10**6))])


def test_a_failure_of_another_call_is_not_this_ones(params, pages, whole, monkeypatch):
    """A call that waits for a page of a call that fails, over whatever page, computes its own."""
    cache, caught = make(params), []
    run, begun, go = cache._run, threading.Event(), threading.Event()

    def fail(*_):
        begun.set()
        go.wait()
        raise ZeroDivisionError

    def first():
        with pytest.raises(ZeroDivisionError) as error:
            cache.get(pages)
        caught.append(error)

    monkeypatch.setattr(cache, "_run", fail)
    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    monkeypatch.setattr(cache, "_run", run)
    threading.Timer(0.2, go.set).start()
    same(cache.get(pages[:1]), whole.get(pages[:1]))
    thread.join()
    assert len(caught) == 1


def test_b80_a_program_a_page_size_and_explicit_transfers(params):
    """B80: 40 pages of random sizes and batches need the two programs of start-up and no more."""
    counter = CompileCounter()
    cache = make(params, sizes=[(3, 6), (7, 20)])
    assert counter.names()["jit(encode_pages)"] == 2
    rng, later = np.random.default_rng(0), CompileCounter()
    some = [page(*(28 * rng.integers(1, 5, 2)), seed) for seed in range(40)]
    with jax.transfer_guard("disallow"):
        while some:
            count = rng.integers(1, 6)
            cache.get(some[:count])
            some = some[count:]
    assert later.count == 0 and cache.misses == 40


def test_bfloat16_features_survive_the_disk(params, pages, tmp_path):
    first = make(params, folder=tmp_path, dtype="bfloat16")
    want = first.get(pages)
    again = make(params, folder=tmp_path, dtype="bfloat16")
    same([a.view(np.uint16) for a in again.get(pages)], [a.view(np.uint16) for a in want])
    assert again.disk_hits == 4 and want[0].dtype.name == "bfloat16"
    assert first.key(pages[0]) != make(params).key(pages[0])


def test_a_run_whose_tower_trains_has_no_cache():
    mesh = make_mesh(devices=jax.devices()[:1])

    def cache(trainable, sizes=SIZES):
        source = PromptSource()
        return for_run(CONFIG, LAYOUT, sizes, trainable, source, dtype="float32", mesh=mesh)

    assert cache(["text/embed/embedding"]).max_bytes == 4096 * 2**20
    assert cache(["text/embed/embedding", "vision/merger/fc1/bias"]) is None
    assert cache(["text/embed/embedding"], []) is None
