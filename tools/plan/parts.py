"""Bytes of every part of a training step on one device.

    resident   parameters, moments, batch                                     all the time
    rollout    resident + sampling copy + decoding layout + KV + the larger of { prefill, one decoding step }
    update     resident + compute copy + the largest of
                 head      kept activations + a chunk of logits
                 extend    kept activations + one layer of the responses, backward + gradients
                 prefill   what is still kept + one layer of the prompts, backward + gradients
                 optimiser gradients + updates

Everything follows from shapes and from what the code keeps: counts of arrays of a width that are alive at
once in a layer are written below with what they are. Nothing is compiled.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax

from evisrag_jax.models.lora import DECODER, LoraConfig, find_targets
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.runtime.mesh import DEFAULT_RULES
from evisrag_jax.training.state import flatten
from plan.job import BYTES, Job

PREFILL_TOKENS, QUERY_BLOCK = 8192, 512  # rollout/serve.py, models/attention.py

# Arrays alive at once in the backward pass of one layer, by width.
#   mlp wide: gate, up, silu(gate), their product, and the gradient of each
#   model wide, responses: block input, two norms and their float32 forms, q, attention's output, both
#   sublayer outputs, and the gradients of most; of the prompts half of them are gone by then
MLP_WIDE, RESPONSE_WIDE, PROMPT_WIDE = 8, 15, 8
KEPT_WIDE = 9  # remat "none": model-wide arrays a layer keeps, beside the MLP_WIDE ones
LOGITS = 4  # chunk of logits: themselves, log-softmax, probabilities, gradient
SCORES = 4  # a block of attention scores: themselves, weights, and the gradient of each


@dataclass(frozen=True)
class Plan:
    """Bytes a device, by part, in three phases; `peak` is the larger of the two that stand."""

    resident: dict[str, float]
    rollout: dict[str, float]
    update: dict[str, float]

    @property
    def rollout_peak(self) -> float:
        return sum(self.resident.values()) + sum(self.rollout.values())

    @property
    def update_peak(self) -> float:
        return sum(self.resident.values()) + sum(self.update.values())

    @property
    def peak(self) -> float:
        return max(self.update_peak, self.rollout_peak if self.rollout else 0)


def plan(job: Job) -> Plan:
    """The parts of a job."""
    sizes = Sizes(job)
    resident = {
        "parameters": sizes.trained * BYTES["float32" if job.lora_rank else job.param]
        + sizes.frozen * BYTES[job.param],
        "Adam moments": 2 * sizes.trained * BYTES[job.moments],
        "batch": batch(job),
    }
    rollout = rollout_parts(job, sizes) if job.method == "rl" else {}
    return Plan(resident, rollout, update_parts(job, sizes))


class Sizes:
    """Numbers of parameters on a device: `trained`, `frozen`, `text` (the decoder), `layer` (one of it, whole
    along fsdp), `table` (embedding or head, whole along fsdp)."""

    def __init__(self, job: Job):
        text = job.model.text
        mesh = {"fsdp": job.fsdp, "tensor": job.tensor}
        counts = {path: local(shape, axes, mesh) for path, shape, axes in named(job)}
        decoder = sum(n for path, n in counts.items() if path.startswith("text/"))
        everything = sum(counts.values())
        self.text = decoder
        self.trained = adapters(job) if job.lora_rank else decoder
        self.frozen = everything if job.lora_rank else everything - decoder
        gathered = {"fsdp": 1, "tensor": job.tensor}
        whole = {path: local(shape, axes, gathered) for path, shape, axes in named(job)}
        self.layer = sum(n for p, n in whole.items() if p.startswith("text/layers/")) / text.layers
        self.table = whole["text/embed/embedding"]


def named(job: Job) -> tuple[tuple[str, tuple[int, ...], tuple], ...]:
    """Path, shape and axis names of every parameter."""
    return _named(job.model)


@functools.cache
def _named(config: Qwen25VLConfig) -> tuple[tuple[str, tuple[int, ...], tuple], ...]:
    axes = jax.tree_util.tree_leaves_with_path(
        model.logical_axes(config), is_leaf=lambda node: isinstance(node, tuple)
    )
    by_path = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in axes}
    shapes = flatten(model.param_shapes(config))
    return tuple((path, leaf.shape, by_path[path]) for path, leaf in shapes.items())


def local(shape: tuple[int, ...], axes: tuple, mesh: dict[str, int]) -> float:
    """Elements of a parameter on one device; an axis that does not divide stays whole."""
    count, taken = math.prod(shape), set()
    for size, name in zip(shape, axes, strict=True):
        axis = DEFAULT_RULES.get(name) if name else None
        parts = mesh.get(axis, 1) if axis else 1
        if parts > 1 and axis not in taken and size % parts == 0:
            count //= parts
            taken.add(axis)
    return count


def adapters(job: Job) -> float:
    """Elements of the default adapters on one device (bounded from above: the rank axis is whole)."""
    lora = LoraConfig(rank=job.lora_rank, targets=DECODER)
    total = 0
    for target in find_targets(job.model, lora):
        inputs, outputs = target.sizes
        total += job.model.text.layers * job.lora_rank * (inputs + outputs)
    return total / job.fsdp


def widths(job: Job, tensor: int) -> tuple[int, int, int]:
    """Query, key-value and MLP width on a device; what does not divide stays whole."""
    text = job.model.text

    def part(n: int, wide: int) -> int:
        return n * wide // (tensor if n % tensor == 0 else 1)

    return part(text.heads, text.head_dim), part(text.kv_heads, text.head_dim), part(text.mlp, 1)


def batch(job: Job) -> float:
    """Arrays of an update: prompts, page features (frozen tower), sampled ids and what is known of them."""
    own, text = job.prompts // job.shards, job.model.text
    tokens = own * job.group * job.response
    features = own * job.pages * job.page_tokens * text.width * BYTES[job.compute]
    prompt = own * job.prompt * 4 * 5  # ids, three position axes, image index
    if job.method != "rl":
        return features + prompt + 4 * tokens
    return features + prompt + tokens * (4 + 4 + job.channels + 4 + 1)


def update_parts(job: Job, sizes: Sizes) -> dict[str, float]:
    """The update's own parts at its largest moment."""
    text, a, layers = job.model.text, BYTES[job.compute], job.model.text.layers
    query, keys, mlp = widths(job, job.tensor)
    prompt = job.rows * job.prompt
    response = job.rows * job.group * max(job.response - 1, 1)
    D = text.width
    kept = {
        "full": D,
        "attention": D + query,
        "dots": D + query + 2 * keys + D + 2 * mlp + D,
        "none": MLP_WIDE * mlp + KEPT_WIDE * D,
    }[job.remat]
    kept_prompt, kept_response = (layers * tokens * kept * a for tokens in (prompt, response))
    kv = layers * prompt * 2 * keys * a
    gradients = 4 * sizes.trained * (2 if job.slices > 1 else 1)
    if a < 4:
        gradients += a * sizes.trained  # in the compute format, before they are added up
    held = gradients if job.slices > 1 else 0  # the loop over slices keeps their room throughout
    heads = query // text.head_dim
    seen = job.prompt + job.response
    rows = min(job.group * job.response, QUERY_BLOCK)
    group_scores = 0 if job.blocked else SCORES * 4 * job.rows * heads * rows * seen
    fused = job.blocked or job.fused
    prompt_rows = min(job.prompt, QUERY_BLOCK)
    prompt_scores = 0 if fused else SCORES * 4 * job.rows * heads * prompt_rows * job.prompt
    vocab = text.vocab // (job.tensor if text.vocab % job.tensor == 0 else 1)
    chunk = min(job.chunk, job.rows * job.group * job.response)
    logits = LOGITS * 4 * chunk * vocab
    sharded = job.fsdp > 1
    layer = (2 if sharded else 0) * sizes.layer * a  # gathered, and its gradient
    table = (3 if sharded else 1) * sizes.table * a
    states = 2 * job.rows * job.group * job.response * D * a
    phases = {
        "head": {
            "kept activations": kept_prompt + kept_response + states,
            "keys and values": kv,
            "gradients": held,
            "chunk of logits": logits,
            "gathered kernels": table,
        },
        "extend": {
            "kept activations": kept_prompt + kept_response,
            "keys and values": 2 * kv,
            "gradients": gradients,
            "one layer, backward": response * (MLP_WIDE * mlp + RESPONSE_WIDE * D) * a,
            "attention scores": group_scores,
            "gathered kernels": layer,
        },
        "prefill": {
            "kept activations": kept_prompt,
            "keys and values": 2 * kv,
            "gradients": gradients,
            "one layer, backward": prompt * (MLP_WIDE * mlp + PROMPT_WIDE * D) * a,
            "attention scores": prompt_scores,
            "gathered kernels": layer,
        },
        "optimiser": {"gradients": gradients, "updates": 4 * sizes.trained},
    }
    largest = max(phases.values(), key=lambda parts: sum(parts.values()))
    copy = a * sizes.text if job.compute != job.param or job.lora_rank else 0
    return {"compute copy": copy, **largest}


def rollout_parts(job: Job, sizes: Sizes) -> dict[str, float]:
    """The rollout's own parts at its largest moment."""
    text, a, tensor = job.model.text, BYTES[job.compute], job.copy_devices
    mesh = {"tensor": tensor}
    counts = {path: local(shape, axes, mesh) for path, shape, axes in named(job)}
    decoder = sum(n for path, n in counts.items() if path.startswith("text/"))
    table = counts["text/embed/embedding"]
    same = job.shards == 1 and job.compute == job.param and not job.lora_rank
    query, keys, mlp = widths(job, tensor)
    slots = job.local_slots
    wanted = math.ceil(slots / job.group)
    copies = job.devices // job.processes // tensor
    rows = min(math.ceil(job.prompts / job.processes / copies), 2 * wanted)
    entering = max(1, min(rows, wanted, PREFILL_TOKENS // job.prompt))
    token = 2 * keys * text.layers * a
    vocab = text.vocab // (tensor if text.vocab % tensor == 0 else 1)
    prefill = entering * job.prompt * (2 * token + (3 * mlp + 6 * text.width) * a)
    decode = slots * vocab * (3 * 4 + 2)
    return {
        "sampling copy": 0 if same else a * sum(counts.values()),
        # The decoder once more, layer by layer; a tied head is a transposed copy of its own.
        "decoding layout": a * (decoder + (table if text.tied else 0)),
        "prompts' keys and values": rows * job.prompt * token,
        "responses' keys and values": slots * job.response * token,
        "prompts or logits at work": max(prefill, decode),
    }
