"""The plan as text: parts of one job, and the table of docs/memory.md."""

from __future__ import annotations

from evisrag_jax.models.qwen25vl.sizes import published
from plan.devices import CONTEXT, DEVICES, FRAGMENTS, GIB, available
from plan.job import Job
from plan.parts import Plan, plan

NAMES = ("resident", "rollout", "update")


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def lines(job: Job, memory_gib: float) -> list[str]:
    """Every part, the peaks, whether it fits, and what would."""
    found = plan(job)
    out = [
        f"{job.devices} devices: data={job.data} fsdp={job.fsdp} tensor={job.tensor}, {job.method}, "
        f"{job.prompts} prompts x {job.group}, {job.prompt} + {job.response} tokens, {job.rows} prompt(s) "
        f"a device and slice, remat {job.remat}",
        f"{'GiB a device':30}{'':>8}",
    ]
    for name in NAMES:
        parts = getattr(found, name)
        if parts:
            out.append(f"{name}")
            out += [f"  {part:28}{gib(size):>8}" for part, size in parts.items() if size]
    if found.rollout:
        out.append(f"{'peak of the rollout':30}{gib(found.rollout_peak):>8}")
    out.append(f"{'peak of the update':30}{gib(found.update_peak):>8}")
    room = available(memory_gib)
    verdict = "fits" if found.peak <= room else "DOES NOT FIT"
    out.append(
        f"{verdict}: {gib(found.peak)} of {gib(room)} GiB ({memory_gib:g} less {CONTEXT:g} for the context "
        f"and {FRAGMENTS:.0%} for holes)"
    )
    micro, slots = largest(job, room)
    out.append(
        f"largest that fits: micro={micro or 'none'} prompts a device and slice"
        + (f", {slots or 'no'} slots for each sampling copy" if found.rollout else "")
    )
    return out


def largest(job: Job, room: float) -> tuple[int, int]:
    """(prompts a device and slice, responses decoded at once by a sampling copy) that still fit; 0 where
    not even one does. Neither changes a result."""
    own = job.prompts // job.shards
    fitting = [n for n in range(1, own + 1) if own % n == 0]
    micro = max((n for n in fitting if plan(job.change(micro=n)).update_peak <= room), default=0)
    if job.method != "rl":
        return micro, 0
    copies = job.devices // job.processes // job.copy_devices
    most = job.change(slots=0).local_slots
    slots = range(job.group, most + 1, job.group)
    return micro, max(
        (n for n in slots if plan(job.change(slots=n * copies)).rollout_peak <= room), default=0
    )


# The table: size, device, mesh and what makes it fit.


def official(size: str, **fields) -> Job:
    """RS-GRPO as released: 32 prompts x 8, 15,000 + 1,536 tokens, five pages."""
    return Job(published(size), prompt=15_000, response=1536, pages=5, **fields)


def clusters() -> dict[str, tuple[str, int, int]]:
    """Name → (device, devices, processes)."""
    return {
        "8 x A100-80": ("a100-80", 8, 1),
        "8 x H200": ("h200-141", 8, 1),
        "64 x H100": ("h100-80", 64, 8),
    }


def choices(size: str, devices: int, processes: int) -> list[tuple[str, Job]]:
    """Settings to try for a size on a cluster, the plainest first."""
    prompts = 32 if devices == 8 else 128
    base = {"prompts": prompts, "processes": processes, "micro": 1}
    tensor = 2 if size in ("3b", "7b") else 8
    plain = official(size, fsdp=devices, **base)
    split = plain.change(rollout_tensor=tensor)
    lora = split.change(lora_rank=16, param="bfloat16")
    divided = split.change(fsdp=devices // 8, tensor=8, slots=64)
    return [
        ("as configured", plain),
        (f"rollout_tensor={tensor}", split),
        (f"rollout_tensor={tensor}, slots=64", split.change(slots=64)),
        (
            f"rollout_tensor={tensor}, slots=64, moments=bfloat16",
            split.change(slots=64, moments="bfloat16"),
        ),
        (f"mesh.fsdp={devices // 8}, mesh.tensor=8, slots=64", divided),
        (f"LoRA 16 on bfloat16, rollout_tensor={tensor}", lora),
        (f"LoRA 16 on bfloat16, rollout_tensor={tensor}, slots=64", lora.change(slots=64)),
    ]


def table() -> str:
    """Rows of docs/memory.md: for every size and cluster, the configured job and the first setting that
    fits."""
    rows = [
        "| model | devices | setting | state | rollout | update | room | fits | largest micro / slots |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in ("3b", "7b", "32b", "72b"):
        for name, (device, devices, processes) in clusters().items():
            room = available(DEVICES[device])
            for i, (setting, job) in enumerate(choices(size, devices, processes)):
                found = plan(job)
                fits = found.peak <= room
                if i == 0 or fits:
                    rows.append(_row(size, name, setting, job, found, room, fits))
                if fits:
                    break
            else:
                rows.append(_row(size, name, setting, job, found, room, False))
    return "\n".join(rows)


def _row(size: str, name: str, setting: str, job: Job, found: Plan, room: float, fits: bool) -> str:
    micro, slots = largest(job, room)
    cells = (
        size.upper(),
        name,
        setting,
        gib(sum(found.resident.values())),
        gib(found.rollout_peak),
        gib(found.update_peak),
        gib(room),
        "yes" if fits else "no",
        f"{micro or '-'} / {slots or '-'}",
    )
    return f"| {' | '.join(cells)} |"
