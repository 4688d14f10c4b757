"""``evisrag doctor``: the facts in words and as JSON, and an exit status that says whether attention
is right."""

import json
import platform
import shutil

import jax
import pytest

import evisrag_jax
from evisrag_jax.cli import doctor
from evisrag_jax.cli.main import main
from evisrag_jax.models import attention_check
from evisrag_jax.models.attention_check import AttentionCheck


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, a compile cache in it, and jax's own cache put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVISRAG_COMPILE_CACHE", str(tmp_path / "cache"))
    names = ("enable_compilation_cache", "compilation_cache_dir")
    names += ("persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def checked(monkeypatch):
    """The check's result without running it (tests/models/test_attention_check.py runs it)."""

    def use(**changes):
        facts = {"backend": "cpu", "fast": "blocked", "used": "blocked", "dtype": "float32"}
        result = AttentionCheck(**(facts | {"error": 3e-7, "problem": ""} | changes))
        monkeypatch.setattr(attention_check, "check_attention", lambda: result)

    use()
    return use


def test_what_is_printed(here, checked, capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    rows = {line[:15].strip(): line[15:] for line in shown.splitlines()}
    assert rows["evisrag"].startswith(
        f"{evisrag_jax.__version__}, Python {platform.python_version()}"
    )
    assert f"jax {jax.__version__}" in rows["versions"]
    assert shown.count(": cpu\n") == jax.local_device_count()
    assert rows["attention"] == (
        "blocked attention on cpu agrees with xla: relative error 3.0e-07 in float32"
    )
    assert int(rows["threads"]) == doctor.thread_count() >= 1
    assert " free, " in rows["this folder"] and rows["this folder"].endswith(str(here))
    assert rows["compile cache"].endswith(str(here / "cache"))


def test_the_same_facts_as_files(here, checked, capsys):
    assert main(["doctor", "--json=facts.json", "--out=run"]) == 0
    facts = json.loads((here / "facts.json").read_text())
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["versions"]["evisrag_jax"] == evisrag_jax.__version__
    assert len(facts["devices"]) == jax.local_device_count()
    assert facts["attention"]["ok"] and facts["attention"]["used"] == "blocked"
    assert 0 < facts["folder"]["free"] <= shutil.disk_usage(here).total
    memory = facts["host_memory"]
    assert memory["total"] is None or 0 < memory["free"] < memory["total"]
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["command"] == "doctor" and summary["versions"] == facts["versions"]
    assert doctor.lines(facts) == [
        (line[:15].strip(), line[15:]) for line in capsys.readouterr().out.splitlines()
    ]


def test_a_failed_check_is_an_exit_status(here, checked, capsys):
    checked(backend="gpu", fast="cudnn", used="xla", dtype="bfloat16", error=None, problem="no lib")
    assert main(["doctor"]) == 1
    line = "cudnn attention is not used on gpu: no lib"
    assert line in capsys.readouterr().out


def test_device_memory_where_it_is_known(here, checked, monkeypatch):
    class Card:
        id, platform, device_kind = 3, "gpu", "Some Card"

        def memory_stats(self):
            return {"bytes_limit": 80 * 2**30, "bytes_in_use": 20 * 2**30}

    monkeypatch.setattr(jax, "local_devices", lambda: [Card()])
    rows = dict(doctor.lines(doctor.collect()))
    assert rows["devices"] == "3: gpu Some Card, 60.0 GiB of 80.0 GiB free"


def test_a_cache_that_is_off_and_memory_that_is_unknown(here, checked, monkeypatch):
    monkeypatch.setenv("EVISRAG_COMPILE_CACHE", "off")
    monkeypatch.setattr(doctor, "host_memory", lambda: {"total": None, "free": None})
    rows = dict(doctor.lines(doctor.collect()))
    assert rows["compile cache"] == "off"
    assert rows["host memory"] == "unknown of unknown free"


def test_arguments_are_refused(refused):
    refused(["doctor", "x"], "doctor takes no arguments, got 'x'")
