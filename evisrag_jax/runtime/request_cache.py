"""Replies of paid or slow requests on disk, by what was asked: a killed run never asks twice.

requests.sqlite   key = SHA-256 of the request's canonical JSON, reply = JSON
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def request_key(request: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a request's JSON with sorted keys."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class RequestCache:
    """A file of replies; safe to use from threads, and to open again after a kill.

    Args:
        path: the file, made with its folder where it is not there.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(self.path, check_same_thread=False)
        with self._lock, self._db:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)"
            )

    def get(self, key: str) -> dict[str, Any] | None:
        """The reply to a request, or None."""
        with self._lock:
            row = self._db.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, reply: Mapping[str, Any]) -> None:
        """Keeps a reply; it is on disk when this returns."""
        text = json.dumps(dict(reply), ensure_ascii=False)
        with self._lock, self._db:
            self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, text))

    def drop(self, key: str) -> None:
        """Forgets a reply, so that the request is sent again."""
        with self._lock, self._db:
            self._db.execute("DELETE FROM replies WHERE key = ?", (key,))

    def __len__(self) -> int:
        with self._lock:
            return self._db.execute("SELECT COUNT(*) FROM replies").fetchone()[0]

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> RequestCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
