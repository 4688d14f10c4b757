"""Page images inside the report: scaled down, encoded once each, within a size that one can still mail."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from PIL import Image, ImageOps


@dataclass(frozen=True)
class PageImage:
    """A page as the report shows it.

    Attributes:
        name: the file's name without its folders.
        id: the element that holds the picture, or "" where there is none.
        width, height: pixels of the embedded picture (0 where there is none).
        reason: why there is none, or "".
    """

    name: str
    id: str = ""
    width: int = 0
    height: int = 0
    reason: str = ""


class ImageStore:
    """Collects the pictures of a report. Equal pictures are embedded once and shown by reference.

    Args:
        folder: relative image paths are looked for here.
        side: longest side of an embedded picture, in pixels; larger ones are scaled down.
        image_bytes: most bytes of one encoded picture; it shrinks until it fits.
        total_bytes: most bytes of all encoded pictures; what comes later is left out by name.
    """

    def __init__(self, folder: Path, *, side: int, image_bytes: int, total_bytes: int) -> None:
        self.folder = folder
        self.side = side
        self.image_bytes = image_bytes
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.embedded: list[tuple[PageImage, str]] = []
        self.left_out = 0
        self.missing = 0
        self._by_path: dict[str, PageImage] = {}
        self._by_content: dict[str, PageImage] = {}

    def add(self, path: str) -> PageImage:
        """Embed the picture at `path` if it can be read and there is room, and return how to show it."""
        key = os.path.normpath(self.folder / path)  # a run may name one file in two ways
        if key not in self._by_path:
            self._by_path[key] = self._load(path)
        return self._by_path[key]

    def _load(self, path: str) -> PageImage:
        # Windows' rules split at both kinds of slash, so a run that was written anywhere reads well.
        name = PureWindowsPath(path).name or path
        if self.used_bytes >= self.total_bytes:
            self.left_out += 1
            return PageImage(name, reason="left out: the report's limit on images is reached")
        try:
            data, width, height = self._encode(self.folder / path)
        except FileNotFoundError:
            self.missing += 1
            return PageImage(name, reason="file not found")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            self.missing += 1
            return PageImage(name, reason=f"unreadable: {type(error).__name__}")
        digest = hashlib.sha256(data).hexdigest()
        if digest in self._by_content:
            twin = self._by_content[digest]
            return PageImage(name, twin.id, twin.width, twin.height)
        if self.used_bytes + len(data) > self.total_bytes:
            self.left_out += 1
            return PageImage(name, reason="left out: the report's limit on images is reached")
        self.used_bytes += len(data)
        page = PageImage(name, f"image-{len(self.embedded)}", width, height)
        uri = "data:image/webp;base64," + base64.b64encode(data).decode("ascii")
        self.embedded.append((page, uri))
        self._by_content[digest] = page
        return page

    def _encode(self, file: Path) -> tuple[bytes, int, int]:
        with Image.open(file) as opened:
            opened.draft(
                "RGB", (2 * self.side, 2 * self.side)
            )  # a JPEG decodes at half size or less
            image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = image.convert("RGB")
        side = self.side
        while True:
            scaled = image.copy()
            scaled.thumbnail((side, side), Image.Resampling.LANCZOS)
            data = _webp(scaled)
            if len(data) <= self.image_bytes or side <= 64:
                return data, scaled.width, scaled.height
            side = int(max(scaled.size) * 0.8)


def _webp(image: Image.Image) -> bytes:
    """Lossless for drawings of few colours where that is the smaller file, else quality 80."""
    options: list[dict[str, Any]] = [{"quality": 80, "method": 2}]
    if image.getcolors(maxcolors=2048) is not None:
        options.append({"lossless": True, "quality": 20, "method": 2})
    return min((_save(image, option) for option in options), key=len)


def _save(image: Image.Image, option: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", **option)
    return buffer.getvalue()
