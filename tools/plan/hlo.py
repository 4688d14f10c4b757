"""Collectives of a compiled program, read from its optimised HLO text: kind, bytes, devices of a group, how often.

    while(…), body=%b, backend_config={…"known_trip_count":{"n":"8"}…}     what %b does counts 8 times
    %x = bf16[256,1024] all-gather(…), replica_groups=…                    524,288 bytes, once a turn

Bytes are those of the whole result (all-gather) or operand (the others), as a device sees them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_WIDTH |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OP = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NAMED_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_PAIRS = re.compile(r"source_target_pairs=")


@dataclass(frozen=True)
class Collective:
    """kind, bytes of one execution, group: devices that take part together."""

    kind: str
    nbytes: int
    group: int


def collectives(text: str) -> Counter[Collective]:
    """How often the entry computation runs each collective. ValueError for a loop that holds one and does
    not say how often it turns."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header[2]
            bodies[current] = []
            entry = current if header[1] else entry
        elif current:
            bodies[current].append(line)
    known: dict[str, Counter[Collective]] = {}

    def count(name: str) -> Counter[Collective]:
        if name not in known:
            known[name] = Counter()
            for line in bodies.get(name, ()):
                known[name].update(_of_line(line, count))
        return known[name]

    return count(entry)


def _of_line(line: str, count) -> Counter[Collective]:
    found: Counter[Collective] = Counter()
    op = _OP.search(line)
    if op:
        found[Collective(op[2], _bytes(op[1], op[3] is not None, op[2]), _group(line))] += 1
        return found
    inner: Counter[Collective] = Counter()
    for name in _CALLED.findall(line):
        inner.update(count(name))
    for names in _BRANCHES.findall(line):
        for name in names.split(","):
            inner.update(count(name.strip().lstrip("%")))
    if not inner:
        return found
    times = 1
    if " while(" in line:
        trips = _TRIPS.search(line)
        if trips is None:
            raise ValueError(
                f"a loop with collectives does not say how often it turns: {line[:120]}"
            )
        times = int(trips[1])
    return Counter({one: n * times for one, n in inner.items()})


def _bytes(shapes: str, started: bool, kind: str) -> int:
    sizes = [
        _WIDTH[word] * math.prod(int(n) for n in dims.split(",") if n)
        for word, dims in _SHAPE.findall(shapes)
        if word in _WIDTH
    ]
    # An asynchronous start has its operands beside its results.
    return max(sizes) if started and kind == "all-gather" else sum(sizes)


def _group(line: str) -> int:
    named = _NAMED_GROUPS.search(line)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
    counted = _COUNTED_GROUPS.search(line)
    if counted:
        return int(counted[2])
    listed = _LISTED_GROUPS.search(line)
    if listed:
        return len(listed[1].split(","))
    if _PAIRS.search(line):
        return 2
    raise ValueError(f"no replica groups in {line[:160]}")


def moved(one: Collective) -> float:
    """Bytes that a device sends in one execution, by the ring algorithms."""
    share = (one.group - 1) / one.group
    factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(one.kind, share)
    return factor * one.nbytes
