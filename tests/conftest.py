"""Settings that must hold before jax or the package is imported, for every test.

* Eight virtual CPU devices (unless XLA_FLAGS is already set), so that sharding is tested in this
  process; plain jitted functions still run on device 0 alone.
* Machine code without costly optimisation: compiling takes two thirds of the time, and at the sizes
  of tests it runs as fast. XLA's own passes, which decide what is computed, are all on.
* jaxtyping's import hook with beartype: annotated shapes of the package are checked at run time.
* A persistent compile cache beside pytest's own, so that a second run compiles little.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_THREEFRY_PARTITIONABLE", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_CACHE = Path(__file__).resolve().parent.parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

if any(name == "evisrag_jax" or name.startswith("evisrag_jax.") for name in sys.modules):
    raise RuntimeError("evisrag_jax was imported before tests/conftest.py could install its hook")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("evisrag_jax", "beartype.beartype")

# Files that cannot even be imported without torch; the header says that they are left out.
_TORCH = importlib.util.find_spec("torch") is not None
_NEEDS_TORCH = re.compile(r"^(import torch|from tests\.rl import torch_reference)", re.MULTILINE)


def pytest_ignore_collect(collection_path):
    """Leaves out files of torch references where there is no torch."""
    if _TORCH or not collection_path.match("test_*.py"):
        return None
    return bool(_NEEDS_TORCH.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_report_header():
    """Says what is not run for want of torch."""
    return None if _TORCH else "torch is not installed: files with torch references are left out"
