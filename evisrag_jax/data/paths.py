"""What is refused in a data file, how it is said, and which image paths are let in."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath


class RecordError(ValueError):
    """A row that is not a valid record.

    Attributes:
        source: the file (or the name its caller gave it).
        row: line or row number, from 1; None where there is no row.
        id: the row's id where it could be read.
        field: the offending field, or "" for the row as a whole.
        reason: what is wrong and what to write instead.
        kind: short word for counters: ``json``, ``field``, ``type``, ``value``, ``path``,
            ``duplicate``.
    """

    def __init__(
        self,
        reason: str,
        *,
        field: str = "",
        kind: str = "value",
        source: str = "",
        row: int | None = None,
        id: str | None = None,
    ):
        self.reason, self.field, self.kind = reason, field, kind
        self.source, self.row, self.id = source, row, id
        super().__init__(reason)

    def at(self, source: str, row: int | None, id: str | None) -> RecordError:
        """The same error with its place filled in."""
        return RecordError(
            self.reason, field=self.field, kind=self.kind, source=source, row=row, id=id
        )

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.source, self.row) if part not in ("", None))
        name = f"record {self.id!r}" if self.id is not None else ""
        field = f"field {self.field!r}" if self.field else ""
        return ": ".join(part for part in (place, name, field, self.reason) if part)


def shown(value: object) -> str:
    """A value and its type for an error message, cut to a readable length."""
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{text} ({type(value).__name__})"


def resolve_image(text: object, root: str | os.PathLike, field: str = "images") -> str:
    """Absolute path of an image named in a data file; nothing is opened.

    Relative paths start at ``root`` and no path may leave it: a file made elsewhere would otherwise
    read whatever lies at that place here. ``..`` is judged by the text of the path, so links that
    the user placed inside the root keep working.

    Args:
        text: the path as written in the file.
        root: folder that holds the data.
        field: named in errors.

    Raises:
        RecordError: kind ``path`` for an empty path, a URI, a path outside the root or a Mac
            archive's companion file (``._x``); kind ``type`` for anything but a string.
    """

    def refuse(reason: str) -> RecordError:
        return RecordError(reason, field=field, kind="path")

    if not isinstance(text, str):
        raise RecordError(f"an image is {shown(text)}, not a path", field=field, kind="type")
    if not text.strip() or "\0" in text:
        raise refuse(f"{text!r} is not a path")
    base = Path(root).absolute()
    if "://" in text or text.lower().startswith(("file:", "data:")):
        raise refuse(f"{text[:80]!r} is a URI; write a path relative to {base}")
    if PurePosixPath(text).name.startswith("._"):
        raise refuse(f"{text!r} is a Mac archive's companion file, not a picture; leave it out")
    if PureWindowsPath(text).drive or (os.sep == "/" and "\\" in text):
        raise refuse(f"{text!r} is a Windows path; write it with '/', relative to {base}")
    base = Path(os.path.normpath(base))
    path = Path(os.path.normpath(base / text))
    if base not in path.parents:
        what = "is absolute and lies" if Path(text).is_absolute() else "leads"
        raise refuse(f"{text!r} {what} outside the data root {base}")
    return str(path)
