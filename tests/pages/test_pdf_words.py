"""Words of a PDF against the pixels that the same page renders to."""

import sys

import numpy as np
import pytest

from evisrag_jax.pages.align import align_words
from evisrag_jax.pages.evidence_boxes import evidence_boxes
from evisrag_jax.pages.pdf_words import read_pdf_words
from evisrag_jax.pages.words import WordsError


def write_pdf(path, content, *, page="", size=(300, 200)):
    """A PDF of one page with text in Helvetica, written object by object."""
    stream = content.encode("latin-1")
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size[0]} {size[1]}] {page} /Contents 4 0 R "
        "/Resources << /Font << /F 5 0 R >> >> >>".encode(),
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n"
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % table
    path.write_bytes(out)
    return path


def line(text, x, y, turn="1 0 0 1"):
    return f"BT /F 14 Tf {turn} {x} {y} Tm ({text}) Tj ET\n"


TEXT = line("Revenue of 2019", 60, 150) + line("was 1,234 dollars", 60, 120)
# Written so that they stand upright on pages that are shown turned.
RIGHT = line("Revenue of 2019", 60, 20, "0 1 -1 0") + line("was 1,234 dollars", 90, 20, "0 1 -1 0")
LEFT = line("Revenue of 2019", 90, 180, "0 -1 1 0") + line("was 1,234 dollars", 60, 180, "0 -1 1 0")


def render(path, size):
    """Grey picture of the page, its height and width given."""
    pdfium = pytest.importorskip("pypdfium2")
    document = pdfium.PdfDocument(path)
    page = document[0]
    picture = page.render(scale=size[0] / page.get_width()).to_numpy()
    document.close()
    return picture[..., :3].mean(-1)


@pytest.mark.parametrize(
    ("content", "page", "size"),
    [
        (TEXT, "", (900, 600)),
        (RIGHT, "/Rotate 90", (600, 900)),
        (LEFT, "/Rotate 270", (600, 900)),
        (TEXT, "/CropBox [50 100 250 180]", (1000, 400)),
    ],
    ids=["plain", "turned right", "turned left", "cropped"],
)
def test_boxes_lie_on_the_ink(tmp_path, content, page, size):
    """All ink is inside the words' boxes, each box has ink, and it touches its sides.

    Tolerance: 2 pixels, of letters some 40 high; PDFium rounds letters' boxes outwards.
    """
    pytest.importorskip("pypdfium2")
    path = write_pdf(tmp_path / "a.pdf", content, page=page)
    words = read_pdf_words(path, 0, size)
    assert [w.text for w in words.words] == ["Revenue", "of", "2019", "was", "1,234", "dollars"]
    assert [w.line for w in words.words] == [0, 0, 0, 1, 1, 1]
    assert (words.width, words.height) == size
    gray = render(path, size)
    assert gray.shape == (size[1], size[0])
    left = gray < 128
    assert left.any()
    for word in words.words:
        x, y, w, h = word.box
        rows, cols = slice(max(int(y) - 2, 0), int(y + h) + 3), slice(int(x) - 2, int(x + w) + 3)
        inside = np.argwhere(gray[rows, cols] < 128)
        tight = inside.min(0), inside.max(0) + 1
        across, down = tight[1][1] - tight[0][1], tight[1][0] - tight[0][0]
        assert abs(across - w) <= 4 and abs(down - h) <= 4
        left[rows, cols] = False
    assert not left.any()


def test_what_lies_outside_the_crop_box_is_no_word(tmp_path):
    pytest.importorskip("pypdfium2")
    path = write_pdf(tmp_path / "a.pdf", TEXT, page="/CropBox [50 140 250 180]")
    words = read_pdf_words(path, 0, (1000, 200)).words
    assert [word.text for word in words] == ["Revenue", "of", "2019"]


def test_evidence_of_a_pdf(tmp_path):
    pytest.importorskip("pypdfium2")
    content = line("The inter-", 60, 150) + line("national sum is 1,234.", 60, 120)
    page = read_pdf_words(write_pdf(tmp_path / "a.pdf", content), 0, (300, 200))
    (match,) = align_words("international sum is 1234", page.words)
    assert match.score == 1.0
    assert len(evidence_boxes("international sum is 1234", ["1234"], page).boxes) == 2
    assert [(word.text, word.line) for word in page.words[:3]] == [
        ("The", 0),
        ("inter", 0),
        ("national", 1),
    ]


def test_refusals(tmp_path, monkeypatch):
    pytest.importorskip("pypdfium2")
    path = write_pdf(tmp_path / "a.pdf", TEXT)
    with pytest.raises(WordsError, match="a.pdf: page 1: has only pages 0 to 0"):
        read_pdf_words(path, 1, (300, 200))
    with pytest.raises(WordsError, match=r"none.pdf: is not there"):
        read_pdf_words(tmp_path / "none.pdf", 0, (300, 200))
    broken = tmp_path / "broken.pdf"
    broken.write_bytes(b"no PDF at all")
    with pytest.raises(WordsError, match=r"broken.pdf: is not a PDF"):
        read_pdf_words(broken, 0, (300, 200))
    with pytest.raises(ValueError, match="0 x 200"):
        read_pdf_words(path, 0, (0, 200))
    assert read_pdf_words(write_pdf(tmp_path / "b.pdf", ""), 0, (300, 200)).words == ()


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'evisrag-jax\[pdf\]'"):
        read_pdf_words(tmp_path / "a.pdf", 0, (300, 200))
