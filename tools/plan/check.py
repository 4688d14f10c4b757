"""The plan against XLA's account of the compiled update: argument + output - alias + temporary bytes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig
from evisrag_jax.models.qwen25vl.model import PromptInputs, param_shapes
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.passes import UpdateConfig as RLSettings
from evisrag_jax.rl.update import RLBatch
from evisrag_jax.rl.update import compile_update as compile_rl
from evisrag_jax.runtime.mesh import batch_sharding, make_mesh
from evisrag_jax.sft.objective import UpdateConfig as SFTSettings
from evisrag_jax.sft.objective import compile_update as compile_sft
from evisrag_jax.training.forward import GroupBatch
from evisrag_jax.training.optimiser import OptimConfig, make_optimiser
from evisrag_jax.training.state import init_state, state_shardings
from plan.job import Job
from plan.parts import plan

LIMIT = 0.15  # relative


def small(layers: int = 8, vocab: int = 8192, width: int = 256) -> Qwen25VLConfig:
    """A decoder in the proportions of the published ones, beside a token tower."""
    head = width // 8
    text = TextConfig(
        vocab=vocab,
        width=width,
        mlp=4 * width,
        layers=layers,
        heads=8,
        kv_heads=2,
        head_dim=head,
        theta=1e6,
        mrope_section=(head // 8, head // 8, head // 4),
        tied=False,
    )
    vision = VisionConfig(depth=2, width=64, mlp=64, heads=2, out_width=width, full_attention=(1,))
    return Qwen25VLConfig(text, vision)


def jobs() -> dict[str, Job]:
    """The configurations that are compared: activations, logits or accumulated gradients dominate, on one
    device and on a mesh."""
    cpu = {"compute": "float32", "page_tokens": 128, "pages": 1, "blocked": True}
    one = Job(small(), prompts=4, micro=0, group=4, prompt=1024, response=512, **cpu)
    mesh = {**cpu, "blocked": False, "fused": False}
    return {
        "rl, long responses": one,
        "rl, slices of one prompt": one.change(micro=1, response=256),
        "sft, everything kept": one.change(
            method="sft", group=1, prompt=512, remat="none", response=512
        ),
        "rl, 16 layers, small vocabulary": one.change(
            model=small(layers=16, vocab=2048), prompt=1536, response=384
        ),
        "rl, 8 devices, fsdp": Job(
            small(), fsdp=8, prompts=16, micro=0, group=4, prompt=512, response=256, **mesh
        ),
        "rl, 8 devices, fsdp x tensor": Job(
            small(), fsdp=4, tensor=2, prompts=8, micro=0, group=4, prompt=512, response=256, **mesh
        ),
    }


def compiled_update(job: Job) -> jax.stages.Compiled:
    """The update of a job, compiled for this machine's first devices; never run."""
    mesh = make_mesh(job.data, job.fsdp, job.tensor, devices=jax.devices()[: job.devices])
    optim = OptimConfig()
    tx = make_optimiser(optim)
    state = jax.eval_shape(lambda tree: init_state(tree, optim, tx), param_shapes(job.model))
    shardings = state_shardings(job.model, mesh, state)
    P, G, T, L = job.prompts, job.group, job.response, job.prompt
    split = batch_sharding(mesh)

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    prompt = PromptInputs(array(P, L), array(P, 3, L), array(P), array(P, L), array(P))
    features = array(P, job.pages * job.page_tokens, job.model.text.width, dtype=jnp.float32)
    batch = GroupBatch(prompt, None, array(P, G, T), array(P, G), features)
    if job.method == "rl":
        rl = RLConfig(prompts=P, group=G, micro=job.micro, max_tokens=T, optim=optim)
        C = len(rl.reward.channels)
        batch = RLBatch(
            groups=batch,
            sampled=array(P, G, T, dtype=jnp.float32),
            old=None,
            rewards=array(P, G, C, dtype=jnp.float32),
            masks=array(P, G, C, T, dtype=bool),
            valid=array(P, G, dtype=bool),
            trained=array(P, G, dtype=bool),
            stale=array(P, dtype=bool),
        )
        settings = RLSettings(rl, "float32", job.remat, job.chunk)
        update = compile_rl(job.model, settings, mesh, shardings)
    else:
        settings = SFTSettings(optim, job.micro, "float32", job.remat, job.chunk)
        update = compile_sft(job.model, settings, mesh, shardings)
    placed = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings
    )
    return update.lower(placed, batch).compile()


def compiled_bytes(job: Job) -> int:
    """Bytes a device of the compiled update."""
    memory = compiled_update(job).memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


@dataclasses.dataclass(frozen=True)
class Compared:
    """Bytes by the plan and by the compiler."""

    name: str
    planned: float
    compiled: float

    @property
    def error(self) -> float:
        return self.planned / self.compiled - 1


def compare(name: str) -> Compared:
    """One of `jobs`."""
    job = jobs()[name]
    return Compared(name, plan(job).update_peak, compiled_bytes(job))
