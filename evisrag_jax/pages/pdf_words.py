"""Words of a PDF page's text layer, in pixels of the rendered page.

PDFium reads it (``pypdfium2``, the extra ``pdf``), so boxes lie where the same library draws the
letters: the page's rotation and crop box are taken in.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from evisrag_jax.pages.words import PageWords, Word, WordsError, checked_page

_FINE = 64  # PDFium gives whole pixels: it is asked for a page this many times as large
_MAX_SIDE = 30_000


def read_pdf_words(
    path: str | os.PathLike,
    page: int,
    size: tuple[int, int],
    *,
    password: str | None = None,
) -> PageWords:
    """The words of one page, in the order of its text layer; lines by that layer's line breaks.

    Letters without extent and those off the rendered page (outside its crop box) are left out. A
    scan without a text layer gives a page without words.

    Args:
        path: the PDF.
        page: number of the page, from 0.
        size: (width, height) in pixels of the page image that the boxes are for: the whole page,
            upright.
        password: of an encrypted file.

    Raises:
        WordsError: for a missing, broken or encrypted file or a page that is not there.
        ModuleNotFoundError: without ``pypdfium2``.
        ValueError: for a size that no page image has.
    """
    try:
        import pypdfium2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "words of PDFs need pypdfium2: pip install 'evisrag-jax[pdf]'", name="pypdfium2"
        ) from error
    if not all(1 <= side <= _MAX_SIDE for side in size):
        raise ValueError(f"a page image of {size[0]} x {size[1]} pixels; 1 to {_MAX_SIDE} a side")
    if not Path(path).is_file():
        raise WordsError(path, "", "is not there")
    try:
        document = pypdfium2.PdfDocument(path, password=password)
    except pypdfium2.PdfiumError as error:
        raise WordsError(path, "", f"is not a PDF that can be read ({error})") from None
    try:
        if not 0 <= page < len(document):
            raise WordsError(path, f"page {page}", f"has only pages 0 to {len(document) - 1}")
        try:
            words = _words(document[page], size)
        except pypdfium2.PdfiumError as error:
            raise WordsError(path, f"page {page}", f"cannot be read ({error})") from None
        return checked_page(words, *size, path, f"page {page}")
    finally:
        document.close()


def _words(page, size: tuple[int, int]) -> list[Word]:
    import pypdfium2.raw as pdfium

    text_page = page.get_textpage()
    width, height = size
    words: list[Word] = []
    line = 0
    letters: list[str] = []
    extent: list[float] = []  # left, top, right, bottom

    def finish() -> None:
        nonlocal letters, extent
        if letters:
            left, top, right, bottom = extent
            box = (left, top, right - left, bottom - top)
            words.append(Word("".join(letters), box, line))
        letters, extent = [], []

    for index in range(text_page.count_chars()):
        char = chr(pdfium.FPDFText_GetUnicode(text_page, index))
        # PDFium writes a word broken at a line's end as one, with a mark: two words, a line each.
        if char in "\r\n" or pdfium.FPDFText_IsHyphen(text_page, index) == 1:
            finish()
            line += char != "\r"
        elif char.isspace():
            finish()
        elif char.isprintable():  # a glyph without a letter is not
            box = _char_box(page, text_page, index, size)
            left, top = max(box[0], 0.0), max(box[1], 0.0)
            right, bottom = min(box[2], width), min(box[3], height)
            if left < right and top < bottom:
                letters.append(char)
                extent = (
                    [left, top, right, bottom]
                    if not extent
                    else [
                        *map(min, extent[:2], (left, top)),
                        *map(max, extent[2:], (right, bottom)),
                    ]
                )
    finish()
    return words


def _char_box(page, text_page, index: int, size: tuple[int, int]) -> tuple[float, ...]:
    """left, top, right, bottom of a letter in pixels, however the page is turned."""
    import pypdfium2.raw as pdfium

    left, bottom, right, top = text_page.get_charbox(index)
    x, y = ctypes.c_int(), ctypes.c_int()
    corners = []
    for corner in ((left, bottom), (right, top)):
        place = (0, 0, size[0] * _FINE, size[1] * _FINE, 0)
        pdfium.FPDF_PageToDevice(page, *place, *corner, x, y)
        corners.append((x.value / _FINE, y.value / _FINE))
    (x0, y0), (x1, y1) = corners
    return min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)
