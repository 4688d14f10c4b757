"""One worked update for the tests: four prompts, G = 3, rows of 10, 20, 30 and 40 tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.data.sources import read_records
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.pages.plan import processor_settings
from evisrag_jax.prompts.template import load_template
from evisrag_jax.prompts.tokenizer import load_tokenizer
from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.rl.passes import UpdateConfig, compile_old_log_probs
from evisrag_jax.rl.update import RLBatch, compile_update
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.batching import (
    Limits,
    PageCache,
    Prepared,
    make_group_batch,
    prepare,
    put_batch,
)
from evisrag_jax.training.optimiser import OptimConfig, make_optimiser
from evisrag_jax.training.state import init_state, place, state_shardings
from experiments.mini.tokenizer import vocabulary
from tests.rl import tiny

BUCKET = tiny.bucket()
P, G, T = BUCKET.prompts, BUCKET.group, BUCKET.response_length
# The first prompt's third response is a padding row.
LENGTHS = np.array([[10, 7, 0], [20, 13, 20], [30, 30, 1], [40, 22, 9]])
VALID = LENGTHS > 0
OPTIM = OptimConfig(learning_rate=1e-3, weight_decay=0.1, clip_norm=0.0)
TEMPERATURE = 1.2


@dataclass(frozen=True, eq=False)
class Case:
    """The model (parameters on the host) and prepared prompts: three with pages, one without."""

    folder: Path
    params: Any
    config: Any
    items: list[Prepared]


def make_case(folder: Path) -> Case:
    """Writes model and pages, and reads them back."""
    model = tiny.write_model(folder / "model")
    params, config = load_params(model)
    budget, layout = processor_settings(model)
    records = read_records(write_dataset(folder / "data", P, "train"))
    records[3] = dataclasses.replace(records[3], images=(), evidence=(), boxes=None)
    tokenizer, cache = load_tokenizer(model), PageCache()
    items = [
        prepare(
            record,
            tokenizer=tokenizer,
            template=load_template("mini"),
            layout=layout,
            budget=budget,
            limits=Limits.of([BUCKET]),
            cache=cache,
        )
        for record in records
    ]
    return Case(model, jax.device_get(params), config, items)


def responses() -> list[list[list[int]]]:
    """Random ids [P][G][length] of plain words and tags."""
    rng = np.random.default_rng(11)
    return [[rng.integers(8, len(vocabulary()), n).tolist() for n in row] for row in LENGTHS]


def masks(estimator: str) -> np.ndarray:
    """[P, G, C, T]: first half and second half of each response and the whole of it, as the channels
    of the estimator would have them; "code" has a channel without any token in the first prompt."""
    t, n = np.arange(T), LENGTHS[..., None]
    whole, first = t < n, t < n // 2
    if estimator == "paper":
        return np.stack([first, whole & ~first & (t < n - 1), whole], 2)
    early = t < n // 3
    early[0] = False
    return np.stack([whole & ~first, first, whole, whole, early, whole & ~first], 2)


def rewards(estimator: str) -> np.ndarray:
    """[P, G, C] in {0, 0.5, 1}; in "code" two channels are silent in some prompts, all in the second."""
    channels = 3 if estimator == "paper" else 6
    values = np.random.default_rng(3).integers(0, 3, (P, G, channels)).astype(np.float32) / 2
    values[2] = np.arange(G)[:, None] / 2
    if channels == 6:
        values[:, :, 4] *= (np.arange(P) == 2)[:, None]
        values[1] = 1.0
    return values


def rl_config(estimator: str, **changes) -> RLConfig:
    """The objective; `scope` is the divisor's."""
    loss = PolicyLossConfig.paper()
    if estimator == "code":
        scope = changes.pop("scope", "global")
        loss = PolicyLossConfig.code(divisor_scope=scope, nan_policy="safe_zero")
    fields = {
        "prompts": P,
        "group": G,
        "max_tokens": T,
        "temperature": TEMPERATURE,
        "estimator": estimator,
        "reward": RewardConfig(mode=estimator),
        "loss": loss,
        "optim": OPTIM,
    }
    return RLConfig(**(fields | changes))


def host_batch(case: Case, estimator: str, *, old=None, prompts: int = P, **changes) -> RLBatch:
    """The batch; rows beyond the four prompts are empty. `changes` replace arrays."""
    groups = make_group_batch(case.items, [BUCKET], responses=responses(), prompts=prompts)
    arrays = {
        "sampled": np.zeros((P, G, T), np.float32),
        "old": old,
        "rewards": rewards(estimator),
        "masks": masks(estimator),
        "valid": VALID,
        "trained": VALID,
        "stale": np.zeros(P, bool),
    } | changes
    groups = arrays.pop("groups", groups)
    spare = [(0, prompts - P)]
    filled = {
        name: a if a is None else np.pad(a, spare + [(0, 0)] * (a.ndim - 1))
        for name, a in arrays.items()
    }
    return RLBatch(groups=groups, **filled)


@cache
def program(config, rl: RLConfig, devices: tuple[int, int, int]):
    """(update, mesh, shardings): the real update, compiled at most once a configuration."""
    mesh = make_mesh(*devices, devices=jax.devices()[: int(np.prod(devices))])
    shapes = jax.eval_shape(lambda: fresh_state(tiny_params(config)))
    shardings = state_shardings(config, mesh, shapes)
    return compile_update(config, settings(rl), mesh, shardings), mesh, shardings


def settings(rl: RLConfig) -> UpdateConfig:
    return UpdateConfig(rl, remat="none", chunk=64)


def tiny_params(config):
    from evisrag_jax.models.qwen25vl.model import init_params

    return init_params(config, jax.random.key(0))


def fresh_state(params):
    return init_state(params, OPTIM, make_optimiser(OPTIM))


@dataclass(frozen=True, eq=False)
class Step:
    """A finished update on the host. grads: read off Adam's first moment, 0.1 of the gradient."""

    before: Any
    after: Any
    metrics: dict[str, float]

    @property
    def adam(self):
        return self.after.opt_state[0].inner[0]

    @property
    def grads(self) -> dict[str, np.ndarray]:
        return {path: np.float64(mu) / (1 - OPTIM.b1) for path, mu in self.adam.mu.items()}


def update(case: Case, batch: RLBatch, rl: RLConfig, devices=(1, 1, 1), state=None) -> Step:
    """One update from the case's parameters, or from a state on the host."""
    run, mesh, shardings = program(case.config, rl, devices)
    state = fresh_state(case.params) if state is None else state
    before = jax.device_get(state)
    placed = place(jax.tree.map(jnp.array, state), shardings)
    after, metrics = run(placed, put_batch(batch, mesh))
    return Step(before, jax.device_get(after), {k: float(v) for k, v in metrics.items()})


def log_probs(case: Case, batch: RLBatch, rl: RLConfig) -> np.ndarray:
    """[P, G, T] log-probs of the sampled ids under the case's parameters."""
    _, mesh, shardings = program(case.config, rl, (1, 1, 1))
    run = compile_old_log_probs(case.config, settings(rl), mesh, shardings)
    state = place(jax.tree.map(jnp.array, fresh_state(case.params)), shardings)
    groups = put_batch(batch.groups, mesh)
    return np.asarray(run(state.trainable, state.frozen, groups))


def relative(got, want) -> dict[str, float]:
    """‖a-b‖ / ‖b‖ a tensor. Where ‖b‖ is below a thousandth of the whole gradient's norm (biases of
    keys, which the softmax nearly cancels), it is measured against that."""
    whole = np.sqrt(sum(np.sum(np.square(np.float64(b))) for b in want.values()))
    return {
        path: np.linalg.norm(np.float64(got[path]) - b)
        / max(np.linalg.norm(np.float64(b)), 1e-3 * whole)
        for path, b in want.items()
    }
