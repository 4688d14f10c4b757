"""The page files of a construction: named by content in request keys, and placed beside the sets."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from evisrag_jax.pages.decode import PageError

PREFIX = 20  # hex digits of a placed page's name: 80 bits


class PageFiles:
    """Digests of page files, each read once a run, and their places under `folder`/pages.

    A page that lies in `folder` stays where it is; any other becomes a hard link there, or a copy where
    links do not reach, so that the sets can be moved as one folder.
    """

    def __init__(self, folder: Path):
        self.folder = Path(os.path.normpath(folder.absolute()))
        self._digests: dict[str, str | PageError] = {}

    def digest(self, path: str) -> str:
        """SHA-256 of the file's bytes, in hex. PageError names a file that cannot be read."""
        if path not in self._digests:
            self._digests[path] = self._read(path)
        found = self._digests[path]
        if isinstance(found, PageError):
            raise found
        return found

    def _read(self, path: str) -> str | PageError:
        try:
            with Path(path).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return PageError(path, error.strerror or str(error), "missing")

    def place(self, path: str) -> str:
        """The path of the page inside the folder."""
        source = Path(os.path.normpath(Path(path).absolute()))
        if self.folder in source.parents:
            return str(source)
        target = self.folder / "pages" / f"{self.digest(path)[:PREFIX]}{source.suffix.lower()}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
            partial.unlink(missing_ok=True)
            try:
                os.link(source.resolve(), partial)
            except OSError:  # another file system, or one without links
                partial.write_bytes(source.read_bytes())
            partial.replace(target)
        return str(target)
