"""Files without waiting for the disk: what a process leaves that dies is the same."""

import os

import pytest

from evisrag_jax.runtime.request_cache import RequestCache


@pytest.fixture(scope="package", autouse=True)
def quick_files():
    start = RequestCache.__init__

    def quick(self, path):
        start(self, path)
        self._db.execute("PRAGMA synchronous=OFF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestCache, "__init__", quick)
        patch.setattr(os, "fsync", lambda file: None)
        yield
