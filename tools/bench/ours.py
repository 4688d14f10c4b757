"""Our side: the engine and the update, as a training run builds them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from evisrag_jax.models.qwen25vl import model as qwen
from evisrag_jax.models.qwen25vl.model import PromptInputs
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.pages.patches import stack_pages
from evisrag_jax.prompts.chat import batch_prompts
from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl.config import RLConfig
from evisrag_jax.rl.passes import UpdateConfig, old_log_probs
from evisrag_jax.rl.update import RLBatch, compile_update, rl_gradient, token_advantages
from evisrag_jax.rollout.buckets import Bucket, BucketTable
from evisrag_jax.rollout.engine import Engine, Request
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.batching import put_batch
from evisrag_jax.training.forward import GroupBatch
from evisrag_jax.training.optimiser import OptimConfig, make_optimiser
from evisrag_jax.training.state import TrainState, init_state, place, state_shardings

from .case import Case, Responses
from .shapes import Shape

OPTIM = OptimConfig(learning_rate=1e-6, weight_decay=0.01, clip_norm=1.0)


def load(case: Case) -> Any:
    """The parameters of the case's folder, float32, on the device."""
    params, _ = load_params(case.folder)
    return jax.block_until_ready(jax.device_put(params))


def make_engine(case: Case, params: Any, prompts: int | None = None) -> Engine:
    """An engine of one bucket that fits the case exactly, as the other side's batch does."""
    shape = case.shape
    bucket = Bucket(
        prompts=prompts or shape.prompts,
        images=shape.pages,
        windows=case.pages[0][0].patches.shape[0],
        tokens=shape.page_tokens,
        length=shape.prompt,
        response=shape.response,
    )
    return Engine(
        params,
        shape.config,
        case.tokenizer,
        BucketTable((bucket,)),
        stop_ids=case.stop_ids,
        layout=case.layout,
        banned_ids=case.never_sampled,
    )


def make_requests(case: Case, features: Any = None) -> list[Request]:
    """One request a prompt; `features` [P, I·M, D] go in place of the tower's work."""
    rows = []
    for p, (prompt, pages) in enumerate(zip(case.prompts, case.pages, strict=True)):
        given = None
        if features is not None:
            given = np.split(np.asarray(features[p]), case.shape.pages)
        rows.append(Request(f"prompt {p}", prompt, pages, given))
    return rows


def sampling(shape: Shape, *, greedy: bool) -> SamplingConfig:
    """Plain sampling at temperature 1, or greedy; T tokens."""
    return SamplingConfig(temperature=0.0 if greedy else 1.0, max_tokens=shape.response)


def image_arrays(case: Case) -> Any:
    """The pages of all prompts as the tower takes them."""
    return stack_pages(
        case.pages,
        images=case.shape.pages,
        windows=case.pages[0][0].patches.shape[0],
        tokens=case.shape.page_tokens,
    )


def prompt_arrays(case: Case) -> PromptInputs:
    """The prompts as the decoder takes them."""
    shape = case.shape
    return PromptInputs(
        *batch_prompts(case.prompts, length=shape.prompt, tokens_per_image=shape.page_tokens)
    )


def image_features(case: Case, params: Any) -> np.ndarray:
    """Features of the case's pages: what a warm cache holds."""
    encode = jax.jit(qwen.encode_images, static_argnums=1)
    return np.asarray(encode(params, case.shape.config, image_arrays(case)))


def make_batch(
    case: Case,
    tokens: np.ndarray,
    rewards: np.ndarray,
    masks: np.ndarray,
    *,
    lengths: np.ndarray | None = None,
    sampled: np.ndarray | None = None,
) -> RLBatch:
    """An update's batch on the host: [P, G, T] tokens, [P, G, 3] rewards, [P, G, 3, T] masks."""
    P, G, T = tokens.shape
    if lengths is None:
        lengths = np.full((P, G), T, np.int32)
    groups = GroupBatch(prompt_arrays(case), image_arrays(case), tokens, lengths)
    exist = np.ones((P, G), bool)
    sampled = np.zeros((P, G, T), np.float32) if sampled is None else sampled
    return RLBatch(groups, sampled, None, rewards, masks, exist, exist, np.zeros(P, bool))


def rl_settings(
    shape: Shape, *, compute: str = "float32", optim: OptimConfig = OPTIM
) -> UpdateConfig:
    """The paper's objective, log-probs at temperature 1; all else as the package's defaults."""
    rl = RLConfig(
        prompts=shape.prompts,
        group=max(2, shape.group),  # of a group of one there is no advantage; the work is the same
        max_tokens=shape.response,
        estimator="paper",
        reward=RewardConfig(mode="paper"),
        optim=optim,
    )
    return UpdateConfig(rl, compute=compute)


class Update:
    """The jitted update of a training run, compiled ahead for one batch's shapes."""

    def __init__(
        self, case: Case, batch: RLBatch, *, settings: UpdateConfig | None = None, dtype=None
    ):
        self.model = case.shape.config
        self.settings = settings or rl_settings(case.shape)
        self.optim = self.settings.rl.optim
        self.mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
        shapes = jax.eval_shape(lambda: self._fresh(_zeros(self.model, dtype)))
        self.shardings = state_shardings(self.model, self.mesh, shapes)
        self.batch = put_batch(batch, self.mesh)
        jitted = compile_update(self.model, self.settings, self.mesh, self.shardings)
        self.program = jitted.lower(shapes, self.batch).compile()
        self.state: TrainState | None = None

    def _fresh(self, params: Any) -> TrainState:
        return init_state(params, self.optim, make_optimiser(self.optim))

    def start(self, params: Any) -> None:
        """A state at step 0. The arrays of `params` are the state's from now on."""
        self.state = place(self._fresh(params), self.shardings)

    def __call__(self) -> dict[str, Any]:
        """One step, waited for; its metrics."""
        self.state, metrics = self.program(self.state, self.batch)
        return jax.block_until_ready(metrics)

    def program_bytes(self) -> int:
        """Device memory of the compiled step by XLA's own account: arguments, results, working space.

        A donated argument is counted once.
        """
        of = self.program.memory_analysis()
        parts = of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes
        return parts + of.temp_size_in_bytes


def _zeros(model: Any, dtype: Any) -> Any:
    shapes = qwen.param_shapes(model)
    return jax.tree.map(lambda a: jax.numpy.zeros(a.shape, dtype or a.dtype), shapes)


class Checked(NamedTuple):
    """What the other side is compared with. old, advantages: [P, G, T]."""

    loss: float
    grads: dict[str, np.ndarray]
    old: np.ndarray
    advantages: np.ndarray


def gradients(case: Case, params: Any, responses: Responses, seed: int = 2) -> Checked:
    """Loss and gradients by path, outside any timing.

    Old log-probs are the policy's with noise: ratios then differ from 1 and some are clipped, so that
    the loss is not 0 by construction.
    """
    settings, model = rl_settings(case.shape), case.shape.config
    batch = make_batch(case, responses.tokens, responses.rewards, responses.masks)
    state = init_state(params, OPTIM, make_optimiser(OPTIM))
    score = jax.jit(partial(old_log_probs, model=model, settings=settings))
    logp = np.asarray(score(state.trainable, state.frozen, batch.groups))
    noise = np.random.default_rng(seed).normal(0, 0.2, logp.shape).astype(np.float32)
    batch = batch._replace(old=logp + noise)
    run = jax.jit(partial(rl_gradient, model=model, settings=settings))
    grads, metrics = jax.device_get(run(state, batch))
    values, _ = token_advantages(batch, settings.rl)
    return Checked(float(metrics["loss/total"]), grads, batch.old, np.asarray(values)[:, :, 0])
