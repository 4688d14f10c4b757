"""Patches: parity with the published processor (B07), one resize (B05), window order, stacking."""

import hashlib
import io
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw

from evisrag_jax.pages.decode import PageError, decode_page
from evisrag_jax.pages.patches import (
    make_patches,
    reading_order_patches,
    stack_pages,
    window_layout,
)
from evisrag_jax.pages.plan import BUDGETS, PixelBudget, VisionLayout, plan_resize

LAYOUT = VisionLayout()
SMALL = VisionLayout(window=56)
DEFAULT = BUDGETS["default"]
GRIDS = [(2, 2), (2, 58), (6, 10), (8, 8), (16, 24), (10, 8), (8, 10), (74, 106), (36, 2), (18, 34)]


def noise(width, height, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def checkerboard(width=301, height=211):
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(((x + y) % 2 * 255).astype(np.uint8)).convert("RGB")


def text_page():
    page = Image.new("RGB", (413, 585), "white")
    draw = ImageDraw.Draw(page)
    for line in range(40):
        draw.text((20, 10 + 14 * line), f"{line:02d} The harbour moved {line * 37} tons.", "black")
    return page


def photo():
    """A smooth scene that went through JPEG."""
    y, x = np.mgrid[0:333, 0:500]
    planes = [127 + 120 * np.sin(x / 40 + k) * np.cos(y / 33 - k) for k in range(3)]
    buffer = io.BytesIO()
    Image.fromarray(np.stack(planes, -1).astype(np.uint8)).save(buffer, "JPEG", quality=80)
    return decode_page(buffer.getvalue(), "photo.jpg")


SIX = {
    "noise": lambda: noise(2048, 1365),
    "checkerboard": checkerboard,
    "text": text_page,
    "28x28": lambda: noise(28, 28, 1),
    "1x200": lambda: noise(200, 1, 2),
    "photo": photo,
}


@pytest.mark.parametrize("kind", sorted(SIX))
def test_b07_pixels_equal_the_published_processor(kind):
    """Qwen2VLImageProcessorPil on six kinds of image: at most 1e-5 in normalised units."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    budget = BUDGETS["sft"] if kind == "noise" else DEFAULT
    processor = Qwen2VLImageProcessorPil(min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
    image = SIX[kind]()
    expected = processor(image)
    page = make_patches(image, LAYOUT, budget)
    assert [1, *page.grid] == np.asarray(expected["image_grid_thw"])[0].tolist()
    ours = reading_order_patches(page).reshape(-1, 3, 196)
    theirs = np.asarray(expected["pixel_values"]).reshape(-1, 3, 2, 196)
    assert np.abs(theirs - ours[:, :, None]).max() <= 1e-5


def test_patches_against_a_plain_loop():
    """Every slot recomputed from the resized picture by its (row, column)."""
    image = noise(150, 95, 3)
    page = make_patches(image, SMALL, DEFAULT)
    rows, cols = page.grid
    resized = image.resize((cols * 14, rows * 14), Image.Resampling.BICUBIC)
    samples = (np.asarray(resized) / 255.0 - LAYOUT.mean) / LAYOUT.std
    for w, s in np.ndindex(*page.mask.shape):
        if page.mask[w, s]:
            r, c = page.rowcol[w, s]
            block = samples[r * 14 : r * 14 + 14, c * 14 : c * 14 + 14].transpose(2, 0, 1)
            assert np.abs(page.patches[w, s] - block.reshape(-1)).max() <= 1e-5
        else:
            assert not page.patches[w, s].any()
            assert not page.rowcol[w, s].any()
    assert page.mask.sum() == rows * cols


def brute_force(rows, cols, layout):
    """Slots by definition: each patch of the grid finds its window and its slot by division."""
    side, merge = layout.window // layout.patch, layout.merge
    per_row = -(-cols // side)
    count = -(-rows // side) * per_row
    source = np.full((count, side * side), -1)
    rowcol = np.zeros((count, side * side, 2), int)
    merged = {}
    for r in range(rows):
        for c in range(cols):
            window = (r // side) * per_row + c // side
            unit = (r % side // merge) * (side // merge) + c % side // merge
            slot = unit * merge**2 + (r % merge) * merge + c % merge
            order = (r // merge) * (cols // merge) + c // merge
            source[window, slot] = order * merge**2 + (r % merge) * merge + c % merge
            rowcol[window, slot] = r, c
            merged[order] = window * (side // merge) ** 2 + unit
    return source, rowcol, [merged[m] for m in range(len(merged))]


@pytest.mark.parametrize(
    "layout", [LAYOUT, SMALL, VisionLayout(window=28)], ids=["112", "56", "28"]
)
@pytest.mark.parametrize("grid", GRIDS)
def test_window_layout_against_brute_force(grid, layout):
    source, rowcol, merged = brute_force(*grid, layout)
    ours = window_layout(*grid, layout)
    np.testing.assert_array_equal(ours.slot_source, source)
    np.testing.assert_array_equal(ours.rowcol, rowcol)
    np.testing.assert_array_equal(ours.mask, source >= 0)
    np.testing.assert_array_equal(ours.merged_index, merged)


@pytest.mark.parametrize("layout", [LAYOUT, SMALL], ids=["112", "56"])
@pytest.mark.parametrize("grid", GRIDS)
def test_window_layout_against_transformers(grid, layout):
    """The published window index (torch): same units in the same order in the same windows, exact.
    Its own padded count has empty windows where the grid divides exactly; ours never has."""
    torch = pytest.importorskip("torch")
    vision_utils = pytest.importorskip("transformers.vision_utils")
    index, bounds = vision_utils.get_vision_window_index(
        torch.tensor([[1, *grid]]), layout.merge, layout.window, layout.patch
    )
    ours = window_layout(*grid, layout)
    units = ours.slot_source[ours.mask].reshape(-1, 4)
    assert (units == units[:, :1] + np.arange(4)).all()
    np.testing.assert_array_equal(units[:, 0] // 4, index.numpy())
    lengths = np.diff(np.unique(bounds.numpy()))
    np.testing.assert_array_equal(ours.mask.sum(1), lengths)


def test_window_layout_is_cached_and_read_only():
    first = window_layout(6, 10, LAYOUT)
    assert window_layout(6, 10, VisionLayout()) is first
    with pytest.raises(ValueError, match="read-only"):
        first.mask[0, 0] = False
    for grid in ((3, 4), (0, 2), (4, 5)):
        with pytest.raises(ValueError, match="positive multiples of 2"):
            window_layout(*grid, LAYOUT)


def test_docstring_example():
    layout = window_layout(6, 10, SMALL)
    assert layout.merged_index.tolist() == [0, 1, 4, 5, 8, 2, 3, 6, 7, 10, 12, 13, 16, 17, 20]


def test_b05_one_resize_an_image(monkeypatch):
    calls = []
    original = Image.Image.resize

    def counting(self, size, *args, **kwargs):
        calls.append(size)
        return original(self, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", counting)
    make_patches(noise(300, 200), LAYOUT, DEFAULT)
    assert calls == [(308, 196)]
    # A strip whose plan would be refused if it were planned again (see test_plan).
    calls.clear()
    page = make_patches(noise(39, 5820), LAYOUT, DEFAULT)
    assert calls == [(28, 5824)]
    assert page.grid == (416, 2)


def test_b05_predicted_tokens_are_the_merged_features():
    """200 random sizes: the plan's tokens, the merged units and the patches agree."""
    rng = np.random.default_rng(7)
    budget = PixelBudget("small", 784, 60_000)
    for _ in range(200):
        height, width = (int(x) for x in rng.integers(5, 900, 2))
        plan = plan_resize(height, width, budget, SMALL)
        page = make_patches(Image.new("RGB", (width, height)), SMALL, budget)
        assert len(page.merged_index) == len(set(page.merged_index.tolist())) == plan.tokens
        assert page.mask.sum() == 4 * plan.tokens == plan.rows * plan.cols
        assert page.grid == (plan.rows, plan.cols)
        assert page.mask.reshape(-1, 4)[page.merged_index].all()


def test_content_hash_is_of_the_decoded_pixels():
    image = noise(60, 40)
    digest = hashlib.sha256(b"60x40:" + np.asarray(image).tobytes()).hexdigest()
    assert make_patches(image, LAYOUT, DEFAULT).content_hash == digest
    assert make_patches(image, LAYOUT, BUDGETS["mini"]).content_hash == digest
    again = io.BytesIO()
    image.save(again, "PNG")
    decoded = decode_page(again.getvalue(), "copy.png")
    assert make_patches(decoded, LAYOUT, DEFAULT).content_hash == digest
    turned = Image.fromarray(np.asarray(image).reshape(60, 40, 3))  # same bytes, other size
    assert make_patches(turned, LAYOUT, DEFAULT).content_hash != digest


def test_b02_refusal_names_the_page():
    with pytest.raises(PageError, match=r"^strip\.png: 2001 wide x 10 high"):
        make_patches(Image.new("RGB", (2001, 10)), LAYOUT, DEFAULT, name="strip.png")
    with pytest.raises(ValueError, match="mode is L"):
        make_patches(Image.new("L", (40, 40)), LAYOUT, DEFAULT)


def test_stacking_pads_pages_windows_tokens_and_rows():
    one = make_patches(noise(140, 112, 1), SMALL, BUDGETS["mini"])  # 5 x 4 units: 6 windows
    two = make_patches(noise(56, 56, 2), SMALL, BUDGETS["mini"])  # 2 x 2 units: 1 window
    arrays = stack_pages([[one, two], [], [two]], images=3, windows=7, tokens=25)
    assert arrays.patches.shape == (3, 3, 7, 16, 588)
    assert arrays.mask.shape == (3, 3, 7, 16)
    assert arrays.rowcol.shape == (3, 3, 7, 16, 2)
    assert arrays.merged_index.shape == (3, 3, 25)
    assert [a.dtype for a in arrays] == [np.float32, bool, np.int32, np.int32]
    for p, i, page in ((0, 0, one), (0, 1, two), (2, 0, two)):
        count, tokens = len(page.patches), len(page.merged_index)
        np.testing.assert_array_equal(arrays.patches[p, i, :count], page.patches)
        np.testing.assert_array_equal(arrays.mask[p, i, :count], page.mask)
        np.testing.assert_array_equal(arrays.rowcol[p, i, :count], page.rowcol)
        np.testing.assert_array_equal(arrays.merged_index[p, i, :tokens], page.merged_index)
        assert not arrays.patches[p, i, count:].any()
        assert not arrays.mask[p, i, count:].any()
        assert not arrays.merged_index[p, i, tokens:].any()
    assert not arrays.mask[1].any()
    assert arrays.mask.sum() == sum(p.mask.sum() for p in (one, two, two))


def test_stacking_without_any_page_takes_the_layout():
    assert stack_pages([[], []], images=1, windows=2, tokens=3).patches.shape == (2, 1, 2, 64, 588)
    arrays = stack_pages([[]], images=1, windows=2, tokens=3, layout=SMALL)
    assert arrays.patches.shape == (1, 1, 2, 16, 588)


def test_stacking_names_what_does_not_fit():
    page = make_patches(noise(140, 112), SMALL, BUDGETS["mini"])
    fits = SimpleNamespace(images=1, windows=6, tokens=20)
    stack_pages([[page]], **vars(fits))
    for change, message in (
        ({"images": 0}, "prompt 0 has 1 pages, limit 0"),
        ({"windows": 5}, "prompt 0, page 0: grid 8 x 10 takes 6 windows and 20 tokens, limits 5"),
        ({"tokens": 19}, "limits 6 and 19"),
    ):
        with pytest.raises(ValueError, match=message):
            stack_pages([[page]], **{**vars(fits), **change})
    other = make_patches(noise(112, 112), LAYOUT, BUDGETS["mini"])
    with pytest.raises(ValueError, match="prompt 0, page 1: slots and channels"):
        stack_pages([[page, other]], images=2, windows=9, tokens=30)


def test_pages_do_not_import_jax():
    """Data workers import this folder; jax must not come along."""
    modules = ["decode", "plan", "patches", "fonts", "canvas", "synthetic"]
    imports = "; ".join(f"import evisrag_jax.pages.{name}" for name in modules)
    code = f"{imports}; import sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
