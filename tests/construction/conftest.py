"""Files without waiting for the disk: what a process leaves that dies is the same."""

import os
import sqlite3

import pytest

CONNECT = sqlite3.connect


class Unsynced(sqlite3.Connection):
    """A connection that leaves it to the system when its file reaches the disk."""

    def execute(self, sql, *args):
        return super().execute("PRAGMA synchronous=OFF" if "synchronous" in sql else sql, *args)


@pytest.fixture(scope="module", autouse=True)
def quick_files():
    def quick(*args, **kwargs):
        connection = CONNECT(*args, factory=Unsynced, **kwargs)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", quick)
        patch.setattr(os, "fsync", lambda file: None)
        yield
