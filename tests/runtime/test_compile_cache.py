"""The persistent compile cache and the count of compiles."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from evisrag_jax.runtime.compile_cache import CompileCounter, _drop_oldest, cache_folder

CODE = """
import jax, numpy as np
from evisrag_jax.runtime.compile_cache import CompileCounter, enable_compile_cache
folder = enable_compile_cache()
counter = CompileCounter()
def square(x): return x @ x
y = jax.jit(square)(np.full((8, 8), 2, np.float32))
assert float(y[0, 0]) == 32
print(folder, counter.names()["jit(square)"], counter.cached)
"""


def run(environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {"JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, count, cached = done.stdout.split()
    return folder, int(count), int(cached), done.stderr


def test_folder_by_environment(tmp_path):
    assert cache_folder({"EVISRAG_COMPILE_CACHE": "off", "XDG_CACHE_HOME": "/x"}) is None
    assert cache_folder({"EVISRAG_COMPILE_CACHE": "/a"}) == Path("/a")
    assert cache_folder({"JAX_COMPILATION_CACHE_DIR": "/b", "XDG_CACHE_HOME": "/x"}) == Path("/b")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/evisrag_jax/xla")
    assert cache_folder({}) == Path.home() / ".cache" / "evisrag_jax" / "xla"


def test_second_process_loads_and_a_broken_entry_is_compiled_anew(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    folder, count, cached, _ = run(environment)
    assert folder == str(tmp_path / "evisrag_jax" / "xla") and (count, cached) == (1, 0)
    _, count, cached, _ = run(environment)
    assert count == 1 and cached >= 1
    for entry in Path(folder).glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:50])
    _, count, cached, stderr = run(environment)
    assert (count, cached) == (1, 0) and "Error reading persistent compilation cache" in stderr


def test_a_folder_that_cannot_be_made_switches_it_off(tmp_path):
    (tmp_path / "file").write_text("")
    folder, count, cached, stderr = run({"EVISRAG_COMPILE_CACHE": str(tmp_path / "file" / "x")})
    assert (folder, count, cached) == ("None", 1, 0) and "compile cache is off" in stderr


def test_oldest_entries_go_first(tmp_path):
    for age, name in enumerate(["new", "mid", "old"]):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(b"x" * 10)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "other").write_bytes(b"x" * 100)
    _drop_oldest(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mid-cache", "new-cache", "other"]


def test_counter_counts_programs_once_a_shape():
    def only_here(x):
        return x * 3 + 1

    function = jax.jit(only_here)
    arrays = [jnp.zeros(n) for n in (3, 4)]
    counter = CompileCounter()
    for _ in range(3):
        for array in arrays:
            function(array)
    assert counter.names() == {"jit(only_here)": 2} and counter.count == 2
    later = CompileCounter()
    function(arrays[0])
    assert later.count == 0 and later.metrics()["compile/count"] == 0.0
    metrics = counter.metrics()
    assert metrics["compile/count"] == 2.0 and metrics["compile/seconds"] >= 0
