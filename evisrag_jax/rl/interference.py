"""Do perception and derivation pull the parameters the same way?

The gradient of the policy loss is taken twice, as if only one of the two channels were paid, with that
run's estimator, scopes and clip, and without penalties. Their cosine is below 0 where what pays one
channel costs the other.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.masked import MaskedConfig
from evisrag_jax.rl.passes import UpdateConfig
from evisrag_jax.rl.update import RLBatch, rl_gradient
from evisrag_jax.runtime import mesh as meshes
from evisrag_jax.training.state import Flat, TrainState

PAIRS = {
    "code": ("evidence", "accuracy"),
    "r1vl": ("steps", "correct"),
    "evisrag": ("perception", "derivation"),
}


def channel_pair(rl: RLConfig) -> tuple[str, str]:
    """The channels that judge perception and derivation."""
    kind = rl.reward.kind
    return PAIRS["code" if kind == "evisrag" and rl.reward.mode == "code" else kind]


def interference(
    state: TrainState, batch: RLBatch, *, model: Qwen25VLConfig, settings: UpdateConfig
) -> dict[str, Array]:
    """grad/cosine of the two channels' gradients (0 where one of them is zero) and both norms."""
    rl = settings.rl
    names = channel_pair(rl)
    grads = [_alone(state, batch, name, model, settings) for name in names]
    norms = [jnp.sqrt(_dot(one, one)) for one in grads]
    scale = norms[0] * norms[1]
    cosine = jnp.where(scale > 0, _dot(*grads) / jnp.where(scale > 0, scale, 1.0), 0.0)
    return {
        "grad/cosine": cosine,
        "grad/perception_norm": norms[0],
        "grad/derivation_norm": norms[1],
    }


def _alone(
    state: TrainState, batch: RLBatch, name: str, model: Qwen25VLConfig, settings: UpdateConfig
) -> Flat:
    """The gradient with one channel paid."""
    rl = settings.rl
    others = tuple(one for one in rl.reward.channels if one != name)
    rl = replace(
        rl,
        reward=replace(rl.reward, unpaid=others),
        loss=replace(rl.loss, kl_coef=0.0, entropy_coef=0.0, divisor_scope="global"),
        filter=replace(rl.filter, metric="overall"),
        masked=MaskedConfig(),
    )
    return rl_gradient(state, batch, model, replace(settings, rl=rl))[0]


def _dot(a: Flat, b: Flat) -> Array:
    return sum(jnp.sum(a[path] * b[path]) for path in a)


def compile_interference(
    model: Qwen25VLConfig, settings: UpdateConfig, mesh: Mesh, shardings: TrainState
):
    """`interference` under jit, with the shardings of the update."""
    return jax.jit(
        meshes.traced_on(mesh, partial(interference, model=model, settings=settings)),
        in_shardings=(shardings, meshes.batch_sharding(mesh)),
        out_shardings=meshes.replicated(mesh),
    )
