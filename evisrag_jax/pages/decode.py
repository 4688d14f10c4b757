"""Safe decoding of page images: one RGB picture or one error that names the file and says why.

What a file may do to a run is decided here: transparency is laid on white (a chart exported with a
transparent background has black hidden under its alpha), 16-bit scans are scaled instead of
clipped, camera rotation is undone, and anything that cannot be decoded in full raises ``PageError``
where it is read, not batches later.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

#: Largest picture decoded by default, in pixels (Pillow's own warning limit: a quarter of a GiB as
#: RGB).
MAX_PAGE_PIXELS = 89_478_485

#: Largest value ``max_pixels`` may have: above it Pillow itself refuses to open the file.
PILLOW_PIXEL_LIMIT = 2 * 89_478_485

#: Formats tried. Vector formats are left out: Pillow hands EPS to an external program.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF")

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PageError(ValueError):
    """A page image that cannot be used.

    Attributes:
        path: the file or the name its caller gave it.
        reason: one sentence saying what is wrong with it.
        kind: a short word for counters: ``missing``, ``empty``, ``not_image``, ``broken`` (decoding
            failed, for instance a cut file), ``too_large``, ``mode`` (samples without a defined
            range), ``aspect`` or ``changed`` (during a run).
    """

    def __init__(self, path: str | os.PathLike, reason: str, kind: str = "broken"):
        self.path = str(path)
        self.reason = reason
        self.kind = kind
        super().__init__(f"{self.path}: {reason}")

    def __reduce__(self):
        # The error crosses process borders in data workers, so it must survive pickling.
        return type(self), (self.path, self.reason, self.kind)


def load_page(
    path: str | os.PathLike, *, exif_transpose: bool = True, max_pixels: int = MAX_PAGE_PIXELS
) -> Image.Image:
    """Read one page image from disk, decoded in full.

    Args:
        path: an image file.
        exif_transpose: turn the picture upright by its EXIF orientation. The reference release does
            not, so runs that must match it switch this off.
        max_pixels: refuse pictures of more pixels, before decoding them.

    Returns:
        An RGB picture (8 bits a sample) that no longer needs the file.

    Raises:
        PageError: for a missing, empty, cut, oversized or non-image file, naming path and reason.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise PageError(path, "no such file", "missing")
        if not path.is_file():
            raise PageError(path, "not a regular file", "missing")
        with path.open("rb") as file:
            return decode_page(
                file, str(path), exif_transpose=exif_transpose, max_pixels=max_pixels
            )
    except OSError as error:
        raise PageError(path, f"cannot be read: {error.strerror or error}", "missing") from error


def decode_page(
    source: bytes | BinaryIO,
    name: str,
    *,
    exif_transpose: bool = True,
    max_pixels: int = MAX_PAGE_PIXELS,
) -> Image.Image:
    """Decode one page image from bytes or an open binary file; see ``load_page``.

    Args:
        source: the encoded image, as bytes or a seekable binary file.
        name: what errors call this image.
        exif_transpose: turn the picture upright by its EXIF orientation. (Pillow applies the
            orientation of a TIFF file while decoding, whatever this says.)
        max_pixels: refuse pictures of more pixels, before decoding them; at most
            ``PILLOW_PIXEL_LIMIT``.

    Returns:
        An RGB picture. Of an animation or a multi-page file it is the first frame.

    Raises:
        PageError: naming ``name`` and the reason.
        ValueError: for a ``max_pixels`` outside 1..PILLOW_PIXEL_LIMIT.
    """
    if not 1 <= max_pixels <= PILLOW_PIXEL_LIMIT:
        raise ValueError(f"max_pixels={max_pixels} is outside 1..{PILLOW_PIXEL_LIMIT}")
    file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    start = file.tell()
    head = file.read(16)
    file.seek(start)
    if not head:
        raise PageError(name, "the file is empty (0 bytes)", "empty")

    try:
        picture = Image.open(file, formats=_available_formats())
    except UnidentifiedImageError as error:
        reason = f"not an image of a known format ({', '.join(FORMATS)}); it starts with {head!r}"
        raise PageError(name, reason, "not_image") from error
    except Image.DecompressionBombError as error:
        raise PageError(name, f"{error} (limit {max_pixels} pixels)", "too_large") from error
    except MemoryError:
        raise
    except Exception as error:  # header parsers raise whatever a hostile file makes them raise
        raise PageError(name, _cause("its header cannot be read", error)) from error

    width, height = picture.size
    if width < 1 or height < 1:
        raise PageError(name, f"has no pixels ({width} wide x {height} high)")
    if width * height > max_pixels:
        reason = f"{width} wide x {height} high = {width * height} pixels, limit {max_pixels}"
        raise PageError(name, reason, "too_large")

    try:
        picture.load()
    except MemoryError:
        raise
    except Exception as error:  # as above: this is where a cut file shows
        raise PageError(name, _cause("decoding failed", error)) from error

    orientation = _orientation(picture) if exif_transpose else 1
    upright = _to_rgb(picture, name)
    if orientation in _UPRIGHT:
        upright = upright.transpose(_UPRIGHT[orientation])
    return upright


def _available_formats() -> list[str]:
    """Those of ``FORMATS`` that this build of Pillow can open."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _cause(what: str, error: Exception) -> str:
    text = str(error).strip() or "no message"
    return f"{what}: {type(error).__name__}: {text}"


def _orientation(picture: Image.Image) -> int:
    """EXIF orientation 1..8; 1 where the metadata is absent or unreadable (the pixels are fine all
    the same)."""
    try:
        return int(picture.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        return 1


def _to_rgb(picture: Image.Image, name: str) -> Image.Image:
    """Any Pillow mode to plain RGB: deep grey scaled, transparency on white, the rest by Pillow's
    conversion."""
    mode = picture.mode
    if mode.startswith("I"):
        return _deep_grey(picture, name)
    if mode == "F":
        raise PageError(name, "floating-point samples have no defined range", "mode")
    try:
        if picture.has_transparency_data:
            if mode in ("RGBa", "La"):  # premultiplied alpha first goes back to straight alpha
                picture = picture.convert(mode.upper())
            picture = picture.convert("RGBA")
            paper = Image.new("RGBA", picture.size, (255, 255, 255, 255))
            return _plain(Image.alpha_composite(paper, picture).convert("RGB"))
        return _plain(picture.convert("RGB"))
    except ValueError as error:
        raise PageError(name, _cause(f"mode {mode} has no way to RGB", error), "mode") from error


def _deep_grey(picture: Image.Image, name: str) -> Image.Image:
    """16-bit grey (0..65535) to 8 bits by /257, rounded: 257·k is exactly k, 65535 is 255."""
    samples = np.asarray(picture).astype(np.int64)
    low, high = int(samples.min()), int(samples.max())
    if low < 0 or high > 65535:
        reason = f"grey samples from {low} to {high} do not fit 16 bits"
        raise PageError(name, reason, "mode")
    grey = ((samples + 128) // 257).astype(np.uint8)
    clear = picture.info.get("transparency")
    if isinstance(clear, int):
        grey[samples == clear] = 255
    return Image.fromarray(grey).convert("RGB")


def _plain(picture: Image.Image) -> Image.Image:
    """The pixels alone: metadata such as EXIF must not act a second time downstream."""
    picture = picture.copy()
    picture.info = {}
    return picture
