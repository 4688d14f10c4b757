"""Decoding: transparency (B08), EXIF rotation (B11), broken files (B12), depths, limits."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.pages.decode import PageError, decode_page, load_page


def encoded(picture, form="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def pixels(picture):
    assert picture.mode == "RGB"
    return np.asarray(picture)


def photo(width=64, height=48, seed=0):
    """A smooth coloured picture, so that JPEG keeps it closely."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)]
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def test_b08_rgba_is_laid_on_white():
    rgba = np.array([[(255, 0, 0, 0), (10, 20, 30, 255), (0, 0, 0, 128)]], np.uint8)
    page = pixels(decode_page(encoded(Image.fromarray(rgba)), "chart.png"))
    assert page[0, 0].tolist() == [255, 255, 255]
    assert page[0, 1].tolist() == [10, 20, 30]
    # Half transparent black: 255·(1 - 128/255) = 127, to one step of rounding.
    assert np.abs(page[0, 2].astype(int) - 127).max() <= 1


def test_b08_palette_with_transparent_index():
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 10, 20, 30])
    palette.putpixel((1, 0), 1)
    for form in ("PNG", "GIF"):
        page = pixels(decode_page(encoded(palette, form, transparency=0), "p"))
        assert page[0].tolist() == [[255, 255, 255], [10, 20, 30]], form
    palette.putpalette([255, 0, 0, 0, 10, 20, 30, 255], "RGBA")  # alpha inside the palette
    page = pixels(decode_page(encoded(palette), "p"))
    assert page[0].tolist() == [[255, 255, 255], [10, 20, 30]]
    # Without transparency the palette's colours stay.
    palette.putpalette([255, 0, 0, 10, 20, 30])
    assert pixels(decode_page(encoded(palette), "p"))[0, 0].tolist() == [255, 0, 0]


def test_b08_grey_with_alpha():
    la = Image.fromarray(np.array([[(0, 0), (77, 255)]], np.uint8), "LA")
    page = pixels(decode_page(encoded(la), "la.png"))
    assert page[0].tolist() == [[255, 255, 255], [77, 77, 77]]


@pytest.mark.parametrize(("mode", "clear"), [("L", 7), ("RGB", (7, 8, 9))])
def test_b08_one_transparent_colour(mode, clear):
    picture = Image.new(mode, (2, 1), clear)
    picture.putpixel((1, 0), 50 if mode == "L" else (50, 50, 50))
    page = pixels(decode_page(encoded(picture, transparency=clear), "key.png"))
    assert page[0].tolist() == [[255] * 3, [50] * 3]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_b11_all_orientations_come_out_upright(orientation):
    """The camera stores the scene turned; ``stored`` is written from the EXIF definition: where the
    scene's row 0 and column 0 lie in the stored picture. 40 x 20 blocks of three colours, JPEG."""
    colours = np.array([[(250, 0, 0), (0, 250, 0)], [(0, 0, 250), (250, 250, 250)]], np.uint8)
    scene = colours.repeat(40, 0).repeat(24, 1)  # 80 high, 48 wide
    stored = {
        1: scene,
        2: scene[:, ::-1],
        3: scene[::-1, ::-1],
        4: scene[::-1],
        5: scene.transpose(1, 0, 2),
        6: scene.transpose(1, 0, 2)[::-1],
        7: scene.transpose(1, 0, 2)[::-1, ::-1],
        8: scene.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(stored)), "JPEG", exif=exif, quality=95)
    page = pixels(decode_page(data, "phone.jpg"))
    assert page.shape == (80, 48, 3)
    for row, col in ((20, 12), (20, 36), (60, 12), (60, 36)):
        assert np.abs(page[row, col].astype(int) - scene[row, col]).max() <= 12
    # Parity with the reference: the switch leaves the stored picture as it lies.
    raw = decode_page(data, "phone.jpg", exif_transpose=False)
    assert raw.size == (stored.shape[1], stored.shape[0])
    assert not decode_page(data, "phone.jpg").info


def test_b11_stored_4_by_2_is_reported_2_by_4():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (4, 2)), "JPEG", exif=exif)
    assert decode_page(data, "a").size == (2, 4)
    assert decode_page(data, "a", exif_transpose=False).size == (4, 2)


def test_b11_unreadable_exif_leaves_the_picture_as_stored():
    data = encoded(photo(), "JPEG", exif=b"Exif\x00\x00garbage that is no TIFF header")
    assert decode_page(data, "a").size == (64, 48)


@pytest.mark.parametrize(
    ("name", "content", "kind", "reason"),
    [
        ("empty.png", b"", "empty", "0 bytes"),
        ("page.png", b"<!DOCTYPE html><html><body>404</body></html>", "not_image", "DOCTYPE"),
        ("cut.jpg", encoded(photo(400, 300), "JPEG")[:4000], "broken", "truncated"),
        ("cut.png", encoded(photo(400, 300))[:-200], "broken", "decoding failed"),
        ("cut.webp", encoded(photo(400, 300), "WEBP")[:-300], "broken", ""),
        ("head.png", encoded(photo())[:20], "broken", ""),
    ],
)
def test_b12_bad_files_are_refused_by_name(tmp_path, name, content, kind, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PageError) as caught:
        load_page(path)
    assert caught.value.path == str(path)
    assert caught.value.kind == kind
    assert reason in caught.value.reason
    assert str(caught.value) == f"{path}: {caught.value.reason}"


def test_b12_jpeg_cut_at_half_opens_but_is_refused(tmp_path):
    data = encoded(photo(400, 300), "JPEG")
    path = tmp_path / "half.jpg"
    path.write_bytes(data[: len(data) // 2])
    with Image.open(path) as opened:  # the header alone looks fine
        assert opened.size == (400, 300)
    with pytest.raises(PageError, match="truncated"):
        load_page(path)


def test_b12_a_set_of_eight_delivers_five_and_names_three(tmp_path):
    good = encoded(photo(), "JPEG")
    contents = [good, good[: len(good) // 2], good, b"", good, b"<html></html>", good, good]
    delivered, skipped = [], []
    for index, content in enumerate(contents):
        path = tmp_path / f"{index}.png"
        path.write_bytes(content)
        try:
            delivered.append(load_page(path))
        except PageError as error:
            skipped.append((error.path, error.kind))
    assert [page.size for page in delivered] == [(64, 48)] * 5
    kinds = ["broken", "empty", "not_image"]
    assert skipped == [
        (str(tmp_path / f"{i}.png"), k) for i, k in zip((1, 3, 5), kinds, strict=True)
    ]


def test_b12_missing_and_folder(tmp_path):
    for path, reason in ((tmp_path / "no.png", "no such file"), (tmp_path, "not a regular file")):
        with pytest.raises(PageError, match=reason) as caught:
            load_page(path)
        assert caught.value.kind == "missing"


def test_b12_a_path_the_system_refuses(tmp_path):
    with pytest.raises(PageError, match="cannot be read|no such file"):
        load_page(tmp_path / ("x" * 5000))


def test_b12_error_survives_a_process_border():
    error = PageError("a.png", "is bad", "broken")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is PageError
    assert (again.path, again.reason, again.kind) == ("a.png", "is bad", "broken")


def test_vector_formats_are_not_handed_to_other_programs():
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(PageError, match="not an image"):
        decode_page(eps, "drawing.eps")


def test_size_limit_comes_before_decoding(tmp_path):
    data = encoded(Image.new("L", (300, 200)))
    with pytest.raises(
        PageError, match="300 wide x 200 high = 60000 pixels, limit 59999"
    ) as caught:
        decode_page(data, "big", max_pixels=59_999)
    assert caught.value.kind == "too_large"
    assert decode_page(data, "big", max_pixels=60_000).size == (300, 200)
    for limit in (0, 10**9):
        with pytest.raises(ValueError, match="max_pixels"):
            decode_page(data, "big", max_pixels=limit)


def test_decompression_bomb_is_refused_from_its_header():
    """A PNG header of 100,000 x 100,000 pixels with no data to speak of."""
    import struct
    import zlib

    def chunk(name, body):
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))
    with pytest.raises(PageError) as caught:
        decode_page(data + chunk(b"IEND", b""), "bomb.png")
    assert caught.value.kind == "too_large"


def test_16_bit_grey_is_scaled_not_clipped():
    samples = np.array([[0, 128, 129, 257, 25700, 32896, 65535]], np.uint16)
    expected = [0, 0, 1, 1, 100, 128, 255]  # /257 to the nearest
    for form in ("PNG", "TIFF"):
        page = pixels(decode_page(encoded(Image.fromarray(samples), form), "scan"))
        assert page[0, :, 0].tolist() == expected, form
        assert (page == page[..., :1]).all()
    big_endian = decode_page(encoded(Image.fromarray(samples.astype(">u2")), "TIFF"), "scan")
    assert pixels(big_endian)[0, :, 0].tolist() == expected
    pgm = b"P5 7 1 65535\n" + samples.astype(">u2").tobytes()
    assert pixels(decode_page(pgm, "scan.pgm"))[0, :, 0].tolist() == expected


def test_samples_without_a_range_are_refused():
    floats = Image.fromarray(np.zeros((2, 2), np.float32))
    wide = Image.fromarray(np.array([[0, 70_000]], np.int32))
    for picture, reason in ((floats, "floating-point"), (wide, "0 to 70000")):
        with pytest.raises(PageError, match=reason) as caught:
            decode_page(encoded(picture, "TIFF"), "data.tif")
        assert caught.value.kind == "mode"


def test_cmyk_jpeg_keeps_its_colours():
    """Pillow writes Adobe's inverted CMYK; paper must come out white and ink black."""
    cmyk = Image.new("CMYK", (32, 16), (0, 0, 0, 0))
    cmyk.paste((0, 0, 0, 255), (16, 0, 32, 16))
    page = pixels(decode_page(encoded(cmyk, "JPEG", quality=95), "print.jpg"))
    assert page[8, 4].min() >= 250
    assert page[8, 28].max() <= 5


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime")]
    for form in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if form == "WEBP" else {}
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
        assert pixels(decode_page(data, form))[4, 4].tolist() == [255, 0, 0], form


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_other_modes_and_sources_become_rgb(tmp_path, mode):
    path = tmp_path / "page.tif"
    photo().convert(mode).save(path)
    page = load_page(path)
    assert page.size == (64, 48)
    assert page.mode == "RGB"
    with path.open("rb") as file:
        assert np.array_equal(pixels(decode_page(file, "open file")), pixels(page))
    path.unlink()
    page.resize((8, 8))  # nothing is read from the file any more
