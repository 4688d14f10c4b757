"""Collectives of the compiled update and of the copy for sampling, and their cost at the published sizes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.models.qwen25vl.model import param_shapes
from evisrag_jax.models.qwen25vl.sizes import published
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.passes import UpdateConfig, compile_params
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.layout import SamplingLayout
from evisrag_jax.training.optimiser import make_optimiser
from evisrag_jax.training.state import flatten, init_state, state_shardings
from plan.check import compiled_update, small
from plan.hlo import Collective, collectives
from plan.job import Job

MESHES = ((1, 8, 1), (8, 1, 1), (2, 4, 1), (1, 4, 2))
SHAPES = ((4, 128), (8, 128), (4, 256))  # layers, width
VOCAB = 2048

# Assumptions of the second table.
PEAK = 989e12  # dense bfloat16 FLOP/s of an H100
MFU = 0.40
NVLINK = 450e9  # bytes/s each way a GPU, inside a machine of eight
NETWORK = 50e9  # bytes/s a GPU: 400 Gb/s InfiniBand each
PROMPTS, GROUP, PROMPT, RESPONSE = 4, 8, 15_000, 1536  # a device and update; the released sizes


def kernels(config: Qwen25VLConfig) -> int:
    """Elements of the kernels of all decoder layers."""
    flat = flatten(param_shapes(config))
    return sum(
        math.prod(leaf.shape)
        for path, leaf in flat.items()
        if path.startswith("text/layers/") and path.endswith("kernel")
    )


def update_traffic(
    layers: int, width: int, mesh: tuple[int, int, int], slices: int = 1
) -> Counter[Collective]:
    """Collectives of the RL update of a small model, float32."""
    shards = mesh[0] * mesh[1]
    job = Job(
        small(layers=layers, width=width, vocab=VOCAB),
        data=mesh[0],
        fsdp=mesh[1],
        tensor=mesh[2],
        prompts=shards * slices,
        micro=1,
        group=4,
        prompt=256,
        response=128,
        compute="float32",
        pages=1,
        page_tokens=64,
    )
    return collectives(compiled_update(job).as_text())


def copy_traffic(layers: int, width: int, mesh: tuple[int, int, int]) -> tuple[float, float]:
    """Bytes gathered by the copy for sampling, and bytes of all parameters."""
    config = small(layers=layers, width=width, vocab=VOCAB)
    devices = make_mesh(*mesh)
    rl = RLConfig()
    tx = make_optimiser(rl.optim)
    state = jax.eval_shape(lambda tree: init_state(tree, rl.optim, tx), param_shapes(config))
    shardings = state_shardings(config, devices, state)
    layout = SamplingLayout(config, devices)
    sampler = compile_params(UpdateConfig(rl), shardings, layout)
    placed = jax.tree.map(
        lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p),
        (state.trainable, state.frozen),
        (shardings.trainable, shardings.frozen),
    )
    found = collectives(sampler.cast.lower(*placed).compile().as_text())
    moved = sum(one.nbytes * n for one, n in found.items() if one.kind == "all-gather")
    leaves = jax.tree.leaves(param_shapes(config))
    return moved, sum(math.prod(leaf.shape) for leaf in leaves) * jnp.dtype("float32").itemsize


def bytes_of(found: Counter[Collective], kind: str, group: int) -> int:
    """Bytes of one kind in groups of one size."""
    return sum(n * one.nbytes for one, n in found.items() if (one.kind, one.group) == (kind, group))


def derived() -> str:
    """What the programs move a slice of the update, on every mesh and shape."""
    rows = [
        "| mesh | collective | devices | bytes, 4 layers of 128 | 8 of 128 | 4 of 256 | 2 slices | is |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mesh in MESHES:
        found = [update_traffic(layers, width, mesh) for layers, width in SHAPES]
        twice = update_traffic(*SHAPES[0], mesh, slices=2)
        pairs = sorted({(one.kind, one.group) for some in found for one in some})
        for kind, group in pairs:
            mib = [bytes_of(some, kind, group) / 2**20 for some in (*found, twice)]
            if max(mib) < 0.05:  # scalars and norms
                continue
            cells = " | ".join(f"{value:.2f}" for value in mib)
            name = " x ".join(str(n) for n in mesh)
            rows.append(f"| {name} | {kind} | {group} | {cells} | {meaning(mesh, kind, group)} |")
    moved, whole = copy_traffic(4, 128, (1, 8, 1))
    rows.append(
        f"| 1 x 8 x 1 | all-gather, copy for sampling | 8 | {moved / 2**20:.2f} | | | | "
        f"all parameters ({whole / 2**20:.2f}) |"
    )
    return "\n".join(rows)


def meaning(mesh: tuple[int, int, int], kind: str, group: int) -> str:
    """The formula of a row; `tests/tools/test_scaling.py` holds it to the numbers."""
    data, fsdp, tensor = mesh
    if kind == "all-gather" and group == fsdp:
        return "(4 W + 3 E) / tensor"
    if kind == "all-reduce" and tensor > 1 and group == tensor:
        return "about 8 activations of the model's width a layer and token"
    if kind == "all-reduce" and group == fsdp == data * fsdp or group == data == data * fsdp:
        return "(2 W + 3 E) / tensor"
    if kind == "all-reduce" and group == fsdp:
        return "2 W + E, of each data group"
    if kind == "all-reduce" and group == data:
        return "(2 W + E) / fsdp, between data groups"
    if kind == "all-reduce" and group == data * fsdp:
        return "2 E, gradients of the embedding"
    return ""


@dataclass(frozen=True)
class Cost:
    """Seconds of an update on one device."""

    compute: float
    inside: float
    between: float

    @property
    def alone(self) -> float:
        """Efficiency where nothing overlaps."""
        return self.compute / (self.compute + self.inside + self.between)

    @property
    def overlapped(self) -> float:
        """Efficiency where collectives run beside products."""
        return self.compute / max(self.compute, self.inside, self.between)


def cost(size: str, data: int, fsdp: int, tensor: int, *, scatter: bool) -> Cost:
    """An update of PROMPTS slices at a published size; `tensor` and `fsdp` inside a machine as far as eight
    devices go, the rest between machines. `scatter`: gradients are reduce-scattered along fsdp, as GPU
    compilers make of an all-reduce that is cut; without it both halves are counted."""
    config = published(size)
    text = config.text
    W, E = 2 * kernels(config) / tensor, 2 * text.vocab * text.width / tensor
    tokens = PROMPT + GROUP * RESPONSE
    pairs = PROMPT**2 / 2 + GROUP * RESPONSE * (PROMPT + RESPONSE / 2)
    attention = 4 * 4 * text.layers * text.heads * text.head_dim * pairs
    head = 8 * GROUP * RESPONSE * text.vocab * text.width
    flops = 8 * kernels(config) * tokens + attention + head
    compute = PROMPTS * flops / (tensor * PEAK * MFU)
    share = (fsdp - 1) / fsdp
    along = share * (4 * W + 3 * E) + (1 if scatter else 2) * share * (2 * W + E)
    width = 2 * text.width * tokens * text.layers
    across = 8 * width * 2 * (tensor - 1) / tensor
    outside = 2 * (data - 1) / data * ((2 * W + E) / fsdp)
    everyone = data * fsdp
    embedding = 2 * (everyone - 1) / everyone * 2 * E
    inside = across / NVLINK
    if fsdp * tensor <= 8:
        inside += along / NVLINK
        between = outside / NETWORK
    else:
        between = (along + outside) / NETWORK
    if everyone * tensor <= 8:
        inside += embedding / NVLINK
    else:
        between += embedding / NETWORK
    return Cost(compute, PROMPTS * inside, PROMPTS * between)


def evaluated() -> str:
    """Seconds and efficiency at 8, 64 and 512 GPUs, prompts a device held constant."""
    rows = [
        "| model | GPUs | mesh | compute s | inside s | between s | efficiency, no overlap | overlapped | "
        "copy for sampling s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in ("3b", "7b", "72b"):
        for gpus in (8, 64, 512):
            tensor = 8 if size == "72b" else 1
            fsdp = min(8, gpus // tensor)
            data = gpus // fsdp // tensor
            if size == "72b" and gpus == 8:
                continue  # does not fit (docs/memory.md)
            one = cost(size, data, fsdp, tensor, scatter=True)
            both = cost(size, data, fsdp, tensor, scatter=False)
            leaves = jax.tree.leaves(param_shapes(published(size)))
            whole = 2 * sum(math.prod(leaf.shape) for leaf in leaves) / tensor
            link = NVLINK if fsdp * tensor <= 8 else NETWORK
            rows.append(
                f"| {size.upper()} | {gpus} | data={data} fsdp={fsdp} tensor={tensor} | {one.compute:.1f} | "
                f"{one.inside:.2f} | {one.between:.2f} | {one.alone:.0%} ({both.alone:.0%}) | "
                f"{one.overlapped:.0%} | {whole * (fsdp - 1) / fsdp / link:.2f} |"
            )
    return "\n".join(rows)
