"""Stage 1: the vision tower learns to read single pages, no decoder pass.

Three losses on the merged tokens (one a 28-px cell):
  word   cross-entropy of the word drawn in the cell, through the tied word table (blank cells weigh 0.1)
  place  at value cells, the field of the row: the tower binds a value to its field
  page   at field and value cells, the title of the page: the tower binds both to the entity
The word table becomes the rows of the decoder's tied embedding, the two linear heads are dropped.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from evisrag_jax.data.miniworld.draw import PageSpec, cell_labels, draw_page, random_page
from evisrag_jax.data.miniworld.world import ENTITIES, FIELDS, VALUES, stream
from evisrag_jax.models.qwen25vl import vision as tower
from experiments.mini.shapes import VISION, page_arrays, prefetch

WORDS = (*ENTITIES, *FIELDS, *(str(v) for v in VALUES))
_WORD = {w: i for i, w in enumerate(WORDS)}
_FIELD = {w: i for i, w in enumerate(FIELDS)}
_TITLE = {w: i for i, w in enumerate(ENTITIES)}
PAGES, LEARNING_RATE = 64, 1.5e-3


def page_labels(spec: PageSpec) -> np.ndarray:
    """Labels [word, place, page] of each merged token in reading order, -1 for none: int [3, M]."""
    grids = zip(cell_labels(spec), (_WORD, _FIELD, _TITLE), strict=True)
    return np.array([[-1 if w is None else ids[w] for w in grid.ravel()] for grid, ids in grids])


def make_batch(seed: int, step: int, pages: int = PAGES) -> dict[str, np.ndarray]:
    """`pages` fresh pages of the "reader" split: pixels and the three label grids (-1 = no label)."""
    pixels, labels = [], []
    for i in range(pages):
        rng = stream(seed, "reader", step * pages + i, task=2)
        spec = random_page(rng, ENTITIES[rng.integers(len(ENTITIES))])
        pixels.append(draw_page(spec, rng)[0])
        labels.append(page_labels(spec))
    word, place, page = np.moveaxis(np.asarray(labels, np.int32), 1, 0)
    return {"pixels": np.stack(pixels), "word": word, "place": place, "page": page}


def init_reader(key) -> dict:
    """Tower, word table [words + blank, D] and the two heads."""
    k_tower, k_words, k_place, k_page = jax.random.split(key, 4)
    import flax.linen as nn

    D = VISION.out_width

    def normal(k, *shape):
        return 0.02 * jax.random.normal(k, shape)

    return {
        "vision": nn.unbox(tower.init_vision(VISION, k_tower)),
        "words": normal(k_words, len(WORDS) + 1, D),
        "place": normal(k_place, D, len(FIELDS)),
        "page": normal(k_page, D, len(ENTITIES)),
    }


def reader_losses(features, words, place, page, batch) -> tuple[jax.Array, dict]:
    """The three losses on features [B, M, D] and the share of labelled cells read right."""
    metrics, total = {}, 0.0
    for name, table in (("word", words.T), ("place", place), ("page", page)):
        label = batch[name]
        if name == "word":
            weight = jnp.where(label >= 0, 1.0, 0.1)
            label = jnp.where(label >= 0, label, len(WORDS))
        else:
            weight = (label >= 0).astype(jnp.float32)
            label = jnp.maximum(label, 0)
        logits = features @ table
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        total = total + jnp.sum(loss * weight) / jnp.maximum(jnp.sum(weight), 1)
        read = (batch[name] >= 0).astype(jnp.float32)
        right = (jnp.argmax(logits, -1) == label) * read
        metrics[name] = jnp.sum(right) / jnp.maximum(jnp.sum(read), 1)
    return total, metrics


def reader_loss(params, batch):
    images = page_arrays(batch["pixels"])
    features = tower.encode(params["vision"], VISION, *images)
    loss, metrics = reader_losses(features, params["words"], params["place"], params["page"], batch)
    return loss, metrics | {"loss": loss}


def optimiser(steps: int, rate: float = LEARNING_RATE) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 50, steps, 0.02 * rate)
    decay = functools.partial(jax.tree.map, lambda a: a.ndim > 1)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.01, mask=decay),
    )


def train(
    seed: int,
    steps: int,
    log: Path,
    *,
    params: dict | None = None,
    start: int = 0,
    rate: float = LEARNING_RATE,
    report_every: int = 100,
) -> dict:
    """Runs the stage; returns the reader's parameters. `log` receives a JSON line a report.

    `params` and `start` (the steps behind them) go on from an earlier leg, on fresh pages.
    """
    import json

    tx = optimiser(steps, rate)
    params = init_reader(jax.random.key(seed)) if params is None else params
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch):
        (_, metrics), grads = jax.value_and_grad(reader_loss, has_aux=True)(params, batch)
        changes, state = tx.update(grads, state, params)
        return optax.apply_updates(params, changes), state, metrics

    started = time.monotonic()
    batches = prefetch(lambda i: make_batch(seed, i), start)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for step in range(start + 1, start + steps + 1):
            params, state, metrics = update(params, state, next(batches))
            if step % report_every == 0 or step == start + steps:
                row = {"stage": "reader", "step": step, "seconds": time.monotonic() - started}
                row |= {k: float(v) for k, v in metrics.items()}
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)
    return jax.device_get(params)
