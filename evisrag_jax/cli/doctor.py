"""``evisrag doctor``: what this machine has, and whether its fast attention is right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from evisrag_jax.cli.config import ConfigError, parse

SUMMARY = "print devices, versions, memory and disk, and check attention on this machine"
SHOWN = ("jax", "jaxlib", "flax", "transformers")


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_string("json", None, "file that gets the same facts", flag_values=values)


def run(argv: Sequence[str]) -> int:
    """Prints the facts; with --json FILE or --out RUN (its summary.json) also writes them. Exit
    status 1 if the backend's own attention failed its check: runs then use the plain one."""
    parsed = parse(argv, command="doctor", summary=SUMMARY, define=_define)
    if parsed.args:
        raise ConfigError(f"doctor takes no arguments, got {parsed.args[0]!r}")
    from evisrag_jax.runtime.json_files import write_json
    from evisrag_jax.runtime.run_folder import RunFolder

    facts = collect()
    for name, value in lines(facts):
        print(f"{name:<15}{value}".rstrip())
    if parsed.flags.json is not None:
        write_json(parsed.flags.json, facts)
    if parsed.out is not None:
        with RunFolder(parsed.out) as folder:
            folder.write_summary({"command": "doctor", **facts})
    return 0 if facts["attention"]["ok"] else 1


def collect() -> dict[str, Any]:
    """All facts, as plain values. Sizes are bytes; None where a system does not tell."""
    import jax

    from evisrag_jax.models.attention_check import check_attention
    from evisrag_jax.runtime.compile_cache import enable_compile_cache
    from evisrag_jax.runtime.json_files import plain
    from evisrag_jax.runtime.run_folder import versions

    cache = enable_compile_cache()
    check = check_attention()
    found = versions()
    return {
        "versions": {
            "evisrag_jax": found["evisrag_jax"],
            "python": found["python"],
            **found["packages"],
        },
        "platform": found["platform"],
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": [_device(device) for device in jax.local_devices()],
        "attention": {**plain(check), "ok": check.ok, "line": check.line()},
        "threads": thread_count(),
        "host_memory": host_memory(),
        "folder": {"path": str(Path.cwd()), "free": shutil.disk_usage(Path.cwd()).free},
        "compile_cache": {
            "path": None if cache is None else str(cache),
            "free": None if cache is None else shutil.disk_usage(cache).free,
        },
    }


def _device(device: Any) -> dict[str, Any]:
    """Name and memory; the free part is of what XLA may take, None where it does not say (CPU)."""
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    free = None if limit is None or used is None else limit - used
    kind = f"{device.platform} {device.device_kind}" if device.platform != "cpu" else "cpu"
    return {"id": device.id, "name": kind, "memory": limit, "free": free}


def thread_count() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> dict[str, int | None]:
    """Total and available bytes, as the kernel tells (None elsewhere than on Linux)."""
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {"total": None, "free": None}
    kib = {name: int(rest.split()[0]) for name, rest in (row.split(":", 1) for row in rows)}
    return {
        "total": kib["MemTotal"] * 1024,
        "free": kib.get("MemAvailable", kib["MemFree"]) * 1024,
    }


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts in words, a (name, value) a line; the name is empty where it repeats."""
    found = facts["versions"]
    shown = ", ".join(f"{name} {found[name] or 'not installed'}" for name in SHOWN)
    rows = [
        ("evisrag", f"{found['evisrag_jax']}, Python {found['python']}, {facts['platform']}"),
        ("versions", shown),
    ]
    for i, device in enumerate(facts["devices"]):
        memory = ""
        if device["free"] is not None:
            memory = f", {_size(device['free'])} of {_size(device['memory'])} free"
        rows.append(("" if i else "devices", f"{device['id']}: {device['name']}{memory}"))
    host, cache = facts["host_memory"], facts["compile_cache"]
    rows += [
        ("attention", facts["attention"]["line"]),
        ("threads", str(facts["threads"])),
        ("host memory", f"{_size(host['free'])} of {_size(host['total'])} free"),
        ("this folder", f"{_size(facts['folder']['free'])} free, {facts['folder']['path']}"),
        (
            "compile cache",
            f"{_size(cache['free'])} free, {cache['path']}" if cache["path"] else "off",
        ),
    ]
    return rows


def _size(count: int | None) -> str:
    from evisrag_jax.runtime.mesh import format_bytes

    return "unknown" if count is None else format_bytes(count)
