"""The optimiser: AdamW in float32 over the parameters that train, chosen by their paths.

    gradients ─clip to norm─► Adam moments ─► + decay · matrices ─► × -rate(k) ─► updates
                      └ norm not finite, or exactly 0: no update, moments untouched, counted; k goes on

The rate follows the number k of updates seen, skipped ones included, as in the released trainer
(EVisRAG spec 7), whose every-tensor weight decay is left to matrices here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from evisrag_jax.models.layers import ADAPTERS
from evisrag_jax.models.lora import LoraConfig, is_adapter
from evisrag_jax.training.schedule import Schedule, constant_with_warmup, cosine_with_warmup

SCHEDULES = ("constant", "cosine")
MOMENTS = ("float32", "bfloat16")
DECAYED = ("kernel", "embedding", *ADAPTERS)
LAYERS = "text/layers/"  # paths of the stacked decoder layers


class OptimError(ValueError):
    """Optimiser settings that cannot be; the message names the field."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and what it is applied to.

    learning_rate: the base rate.  schedule: "constant" or "cosine", after `warmup_steps` of linear
    warm-up; the cosine ends at `total_steps` (0: the trainer fills in the run's steps).
    first_step_lr: "zero" as released (the first update fills the moments only) or "base".
    b1, b2, eps, weight_decay: AdamW's; the decay is decoupled and applies to kernels, embeddings and
    adapters, never to norms and biases.  moments: the format both moments are kept in, "float32" or
    "bfloat16" (`kept_in` says what that costs).  clip_norm: largest global gradient norm, 0 for no
    limit.
    train, freeze: regular expressions searched in "/"-joined parameter paths such as
    "text/layers/q/kernel"; what matches `train` and not `freeze` trains (an empty `freeze` freezes
    nothing).  last_layers: of the decoder's layers only the last so many train, 0 for all; what lies
    outside of them (embedding, final norm, head, vision tower) is chosen by `train` and `freeze` alone.
    """

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    first_step_lr: str = "base"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    moments: str = "float32"
    clip_norm: float = 1.0
    train: str = ".*"
    freeze: str = "^vision"
    last_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "clip_norm", "last_layers"):
            if getattr(self, name) < 0:
                raise OptimError(f"optim.{name}={getattr(self, name)} must not be negative")
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OptimError(f"optim.{name}={getattr(self, name)} is outside [0, 1)")
        if self.moments not in MOMENTS:
            raise OptimError(f"optim.moments={self.moments!r}; one of {', '.join(MOMENTS)}")
        for name in ("train", "freeze"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise OptimError(
                    f"optim.{name}={getattr(self, name)!r} is no regular expression ({error})"
                ) from error
        try:
            if self.schedule != "cosine" or self.total_steps:
                make_schedule(self)
        except OptimError:
            raise
        except ValueError as error:
            raise OptimError(f"optim: {error}") from error


def make_schedule(config: OptimConfig) -> Schedule:
    """The rate as a function of the number of updates before this one (0 at the first)."""
    if config.schedule not in SCHEDULES:
        raise OptimError(f"optim.schedule={config.schedule!r}; one of {', '.join(SCHEDULES)}")
    base, warmup, first = config.learning_rate, config.warmup_steps, config.first_step_lr
    if config.schedule == "constant":
        return constant_with_warmup(base, warmup, first_step_lr=first)
    if config.total_steps < 1:
        raise OptimError("optim.total_steps: a cosine needs the number of updates it ends at")
    return cosine_with_warmup(base, config.total_steps, warmup, first_step_lr=first)


def for_run(config: OptimConfig, steps: int, warmup_ratio: float = 0.0) -> OptimConfig:
    """The settings with what depends on the run's length filled in, where they leave it open.

    A `total_steps` of 0 becomes `steps`; a `warmup_steps` of 0 becomes the share `warmup_ratio` of
    them, rounded up as in the reference framework.
    """
    if not 0.0 <= warmup_ratio < 1.0:
        raise OptimError(f"warmup_ratio={warmup_ratio} is outside [0, 1)")
    warmup = config.warmup_steps or math.ceil(warmup_ratio * steps)
    total = config.total_steps or steps
    if config.schedule == "cosine" and warmup >= total:
        raise OptimError(
            f"optim.warmup_steps={warmup} leaves nothing of {total} updates to the cosine"
        )
    return dataclasses.replace(config, warmup_steps=warmup, total_steps=total)


def for_adapters(config: OptimConfig, lora: LoraConfig) -> OptimConfig:
    """The settings with the rule of adapters: they train, what `lora.also` names does, nothing else.

    Without adapters the settings as they are; OptimError for `lora.also`, which is then without effect.
    """
    if not lora.rank:
        if lora.also:
            raise OptimError(
                f"lora.also={lora.also!r} needs lora.rank; without adapters optim.train says what trains"
            )
        return config
    also = f"|(?:{lora.also})" if lora.also else ""
    adapters = rf"/({'|'.join(ADAPTERS)})$"
    return dataclasses.replace(config, train=adapters + also, freeze="")


def learning_rate(config: OptimConfig, opt_state: Any) -> Float[Array, ""]:
    """The rate that the next update of this optimiser state will have."""
    return jnp.asarray(make_schedule(config)(opt_state[1].count), jnp.float32)


def is_trainable(path: str, config: OptimConfig) -> bool:
    """Whether the parameter at this "/"-joined path trains."""
    frozen = bool(config.freeze) and re.search(config.freeze, path) is not None
    return re.search(config.train, path) is not None and not frozen


def trainable_paths(paths: Iterable[str], config: OptimConfig) -> tuple[str, ...]:
    """The paths that train, in order. OptimError when none does."""
    paths = tuple(paths)
    chosen = tuple(path for path in paths if is_trainable(path, config))
    if not chosen:
        raise OptimError(
            f"nothing trains: no parameter path matches train={config.train!r} and not "
            f"freeze={config.freeze!r}; paths look like {', '.join(paths[:3])}"
        )
    return chosen


class GuardState(NamedTuple):
    """Counts of updates left out: gradient norm not finite, and exactly zero (nothing was learnt);
    and of those not finite since the last update that was made."""

    skipped: Int[Array, ""]
    empty: Int[Array, ""]
    in_a_row: Int[Array, ""]
    inner: Any


def guard(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, left out (state untouched, zero updates) for a gradient that must not be applied.

    That is a gradient whose norm is not finite, or exactly zero: a step with nothing to train on is
    no step, so neither momentum nor weight decay moves the parameters.
    """

    def init(params: Any) -> GuardState:
        counts = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return GuardState(*counts, inner.init(params))

    def update(grads: Any, state: GuardState, params: Any = None) -> tuple[Any, GuardState]:
        norm = optax.global_norm(grads)
        finite, empty = jnp.isfinite(norm), norm == 0
        use = finite & ~empty
        safe = jax.tree.map(lambda g: jnp.where(use, g, jnp.zeros_like(g)), grads)
        updates, after = inner.update(safe, state.inner, params)
        updates = jax.tree.map(lambda u: jnp.where(use, u, jnp.zeros_like(u)), updates)
        kept = jax.tree.map(lambda new, old: jnp.where(use, new, old), after, state.inner)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        in_a_row = jnp.where(use, 0, state.in_a_row + (~finite).astype(jnp.int32))
        count = state.empty + empty.astype(jnp.int32)
        return updates, GuardState(skipped, count, in_a_row, kept)

    return optax.GradientTransformation(init, update)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on float32 copies: moments and products are float32 whatever the parameters are."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return inner.init(wide(params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(wide(grads), state, None if params is None else wide(params))

    return optax.GradientTransformation(init, update)


def kept_in(dtype: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` with the float arrays of its state stored in `dtype`; its arithmetic stays float32.

    In bfloat16 moments take half the bytes and are rounded to nearest after every update. With normal
    gradients (mean half their spread, rate 1e-3) parameters then end up elsewhere by 0.2 % of the way
    that they moved in 20 updates, whatever b2 (tested); by 2.8 % after 2,000 with b2 = 0.999, 0.2 % with
    0.98. The reason: b2 = 0.999 takes a thousandth off the second moment, less than half a step of
    bfloat16, so it cannot fall where gradients shrink. After a fall to a tenth, the next 1,000 updates
    move parameters 21 % less than they should with b2 = 0.999, 1 % with 0.99. Use b2 <= 0.99 with it.
    """

    def cast(state: Any, to: Any) -> Any:
        return jax.tree.map(
            lambda a: a.astype(to) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
        )

    def init(params: Any) -> Any:
        return cast(inner.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, after = inner.update(grads, cast(state, jnp.float32), params)
        return updates, cast(after, dtype)

    return optax.GradientTransformation(init, update)


def decays(params: Any) -> Any:
    """True at the leaves that weight decay applies to: kernels, embeddings and adapters.

    By name, since the norms of stacked layers are matrices by shape.
    """

    def named(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return name.rsplit("/", 1)[-1] in DECAYED

    return jax.tree_util.tree_map_with_path(named, params)


def make_optimiser(config: OptimConfig) -> optax.GradientTransformation:
    """AdamW over a tree of trainable parameters; apply its updates with `optax.apply_updates`."""
    steps = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    steps.append(
        kept_in(config.moments, optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    )
    if config.weight_decay:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask=decays))
    rate = optax.scale_by_learning_rate(make_schedule(config))
    return in_float32(optax.chain(guard(optax.chain(*steps)), rate))


def norm_group(path: str) -> str:
    """The part of the model that a parameter's gradient is counted to: lora (adapters anywhere),
    vision, or of the decoder attention, mlp, norm, embed or head."""
    if is_adapter(path):
        return "lora"
    tower, *_, module, _ = path.split("/")
    if tower == "vision":
        return tower
    if "/mlp/" in path:
        return "mlp"
    if module.startswith("norm"):
        return "norm"
    return "attention" if path.startswith(LAYERS) else module


def gradient_norms(grads: Mapping[str, Any]) -> dict[str, Float[Array, ""]]:
    """L2 norms of gradients by path, float32: "loss/grad_norm" of all, and "loss/grad_norm/GROUP" of
    each part of the model that trains (`norm_group`)."""
    groups: dict[str, dict[str, Any]] = {}
    wide = {path: g.astype(jnp.float32) for path, g in grads.items()}
    for path, g in wide.items():
        groups.setdefault(norm_group(path), {})[path] = g
    norms = {f"loss/grad_norm/{name}": optax.global_norm(part) for name, part in groups.items()}
    return {"loss/grad_norm": optax.global_norm(wide), **norms}


def skipped_updates(opt_state: Any) -> dict[str, Int[Array, ""]]:
    """How many updates were left out so far: {"optim/skipped": …, "optim/empty": …}, and how many of
    the first kind in a row: "optim/skipped_in_a_row"."""
    state = opt_state[0]
    return {
        "optim/skipped": state.skipped,
        "optim/empty": state.empty,
        "optim/skipped_in_a_row": state.in_a_row,
    }
