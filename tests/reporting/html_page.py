"""A reader of reports, and what must hold for every one of them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from evisrag_jax.reporting.page import Limits, write_report

BLOCKS = {"td", "th", "dt", "dd", "p", "div", "li", "h1", "h2", "h3", "small", "summary"}
VOID = {
    "meta",
    "link",
    "input",
    "br",
    "img",
    "hr",
    "area",
    "base",
    "col",
    "embed",
    "source",
    "track",
    "wbr",
}


class Page(HTMLParser):
    """A parsed report: every element with its attributes and text, and every fault of its structure."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.faults: list[str] = []
        self.of: list[int] = []
        self._open: list[int] = []
        self.feed(html)
        self.close()
        self.faults += [f"<{self.elements[i][0]}> never closed" for i in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(set(names)) < len(names):
            self.faults.append(f"<{tag}> repeats an attribute: {names}")
        if tag in BLOCKS:
            self.handle_data(" ")
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        self.of.append(self._open[-1] if self._open else -1)
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.faults.append(f"<{tag}/> is self-closing")

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self.elements[self._open[-1]][0] != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} closes nothing")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for i in self._open:
            self.texts[i] += data

    def find(self, tag: str, **wanted: str) -> list[int]:
        """Indices of elements with this tag whose attributes contain these words (class_ stands for class)."""
        return [
            i
            for i, (name, attrs) in enumerate(self.elements)
            if name == tag
            and all(w in (attrs.get(k.rstrip("_")) or "").split() for k, w in wanted.items())
        ]

    def text(self, index: int) -> str:
        """The text of an element with white space collapsed."""
        return " ".join(self.texts[index].split())

    def inside(self, index: int, ancestor: int) -> bool:
        while index >= 0 and index != ancestor:
            index = self.of[index]
        return index == ancestor

    def rows(self, table: int) -> list[list[str]]:
        """The cells of a table's rows as text."""
        cells = [
            i
            for i, (tag, _) in enumerate(self.elements)
            if tag in ("td", "th") and self.inside(i, table)
        ]
        return [
            [self.text(c) for c in cells if self.inside(c, r)]
            for r in self.find("tr")
            if self.inside(r, table)
        ]


ADDRESS_ATTRIBUTES = (
    "src",
    "href",
    "srcset",
    "xlink:href",
    "action",
    "formaction",
    "poster",
    "data",
    "background",
    "ping",
)


def check_self_contained(page: Page) -> None:
    for tag, attrs in page.elements:
        for name in ADDRESS_ATTRIBUTES:
            if name in attrs:
                assert attrs[name].startswith(("#", "data:")), f"<{tag} {name}={attrs[name][:60]}>"
        assert "url(" not in (attrs.get("style") or "")
    for i in page.find("style"):
        assert not re.search(r"url\(|@import|//", page.texts[i])
    for i in page.find("script"):
        assert not re.search(r"https?:|fetch\(|import\(|XMLHttpRequest", page.texts[i])


def check_well_formed(page: Page) -> None:
    assert page.faults == []
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.elements:
        for name in ("href", "for", "aria-labelledby"):
            target = attrs.get(name)
            if target and (name != "href" or target.startswith("#")):
                assert target.removeprefix("#") in ids, f"<{tag} {name}={target}> leads nowhere"
        assert not any(name.startswith("on") for name in attrs)
        if tag == "svg":
            assert "aria-label" in attrs or attrs.get("aria-hidden") == "true"
    assert (
        len(page.find("h1"))
        == len(page.find("main"))
        == len(page.find("title")) - len(titles_in_svg(page))
        == 1
    )


def titles_in_svg(page: Page) -> list[int]:
    svgs = page.find("svg")
    return [t for t in page.find("title") if any(page.inside(t, s) for s in svgs)]


def report(run: Path, **limits: int) -> Page:
    """Write a run's report, read it, and check what holds for every report."""
    page = Page(write_report(run, limits=Limits(**limits)).read_text(encoding="utf-8"))
    check_well_formed(page)
    check_self_contained(page)
    return page


def section(page: Page, name: str) -> str:
    """The text of a section, "" where there is none."""
    found = page.find("section", id=name)
    return page.text(found[0]) if found else ""
