"""Reader stage: the bundled tower learns to see scenes and keeps reading pages.

Most of a batch are scenes, the rest mini pages. At the cell of an object three cross-entropies: its
colour and its shape through the rows of the decoder's word table, and both at once through a linear head
that is dropped (a question asks for the conjunction). Pages have the three losses of the mini reader. Two
more heads name row and column of every cell: the decoder sees distances alone, and a cue says where.
Rows of words that the decoder knows stay fixed, so that its reading survives; new words learn theirs.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from evisrag_jax.data.miniworld.draw import COLS, ROWS, draw_page, random_page
from evisrag_jax.data.miniworld.world import ENTITIES, FIELDS, stream
from evisrag_jax.models.qwen25vl import vision as tower
from experiments.evidence_rl import tokenizer
from experiments.evidence_rl.scenes import COLOURS, SHAPES, draw_scene, random_kinds
from experiments.mini.reader import WORDS, optimiser, page_labels, reader_losses
from experiments.mini.shapes import VISION, page_arrays, prefetch

SCENES, PAGES, LEARNING_RATE = 40, 24, 1.2e-3
TASK = 12  # of the random streams: reader batches
_COLOUR = {name: i for i, name in enumerate(COLOURS)}
_SHAPE = {name: i for i, name in enumerate(SHAPES)}


def make_batch(seed: int, step: int) -> dict[str, np.ndarray]:
    """Pixels of SCENES scenes, then PAGES pages; `kind` [S, M, 2] has colour and shape of each cell of
    the scenes (-1 = none), `word`, `place` and `page` [PAGES, M] the labels of the mini reader."""
    rng = stream(seed, "reader", step, task=TASK)
    pixels, kinds, labels = [], np.full((SCENES, ROWS * COLS, 2), -1, np.int32), []
    for i in range(SCENES):
        image, things = draw_scene(rng, random_kinds(rng))
        pixels.append(image)
        for thing in things:
            kinds[i, thing.row * COLS + thing.col] = _COLOUR[thing.colour], _SHAPE[thing.shape]
    for _ in range(PAGES):
        spec = random_page(rng, ENTITIES[rng.integers(len(ENTITIES))])
        pixels.append(draw_page(spec, rng)[0])
        labels.append(page_labels(spec))
    word, place, page = np.moveaxis(np.asarray(labels, np.int32), 1, 0)
    return {"pixels": np.stack(pixels), "kind": kinds, "word": word, "place": place, "page": page}


def init(params: dict, key) -> tuple[dict, dict]:
    """What is trained (tower, rows of the new words, blank row, heads), and the fixed word table."""
    table = params["text"]["embed"]["embedding"]
    known = jnp.asarray(table[np.array([tokenizer.word_ids()[w] for w in WORDS])])
    keys = jax.random.split(key, 6)
    width, scale = VISION.out_width, jnp.std(known)

    def normal(k, std, *shape):
        return std * jax.random.normal(k, shape)

    trained = {
        "vision": params["vision"],
        "new": jnp.asarray(table[np.array([tokenizer.word_ids()[w] for w in tokenizer.WORDS])]),
        "blank": normal(keys[1], scale, 1, width),
        "place": normal(keys[2], 0.02, width, len(FIELDS)),
        "page": normal(keys[3], 0.02, width, len(ENTITIES)),
        "joint": normal(keys[4], 0.02, width, len(COLOURS) * len(SHAPES) + 1),
        "row": normal(keys[5], 0.02, width, ROWS),
        "column": normal(keys[0], 0.02, width, COLS),
    }
    return trained, {"known": known}


def loss_fn(trained, fixed, batch):
    """Sum of the eight losses and the share of labelled cells read right, by name."""
    features = tower.encode(trained["vision"], VISION, *page_arrays(batch["pixels"]))
    words = jnp.concatenate([fixed["known"], trained["blank"]])
    total, metrics = reader_losses(
        features[SCENES:], words, trained["place"], trained["page"], batch
    )
    seen, kind = features[:SCENES], batch["kind"]
    there = (kind[..., 0] >= 0).astype(jnp.float32)
    weight = jnp.where(there > 0, 1.0, 0.1)
    at = {w: i for i, w in enumerate(tokenizer.WORDS)}
    tables = {
        "colour": (trained["new"][np.array([at[w] for w in COLOURS])], kind[..., 0]),
        "shape": (trained["new"][np.array([at[w] for w in SHAPES])], kind[..., 1]),
    }
    scores = {
        name: (seen @ jnp.concatenate([rows, trained["blank"]]).T, label)
        for name, (rows, label) in tables.items()
    }
    scores["joint"] = (seen @ trained["joint"], kind[..., 0] * len(SHAPES) + kind[..., 1])
    for name, (logits, label) in scores.items():
        label = jnp.where(there > 0, label, logits.shape[-1] - 1)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        total = total + jnp.sum(loss * weight) / jnp.sum(weight)
        right = jnp.argmax(logits, -1) == label
        metrics[name] = jnp.sum(right * there) / jnp.sum(there)
    metrics["blank"] = jnp.sum(right * (1 - there)) / jnp.sum(1 - there)
    at_cell = {"row": jnp.arange(ROWS * COLS) // COLS, "column": jnp.arange(ROWS * COLS) % COLS}
    for name, label in at_cell.items():
        logits = features @ trained[name]
        label = jnp.broadcast_to(label, logits.shape[:-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        total = total + jnp.mean(loss)
        metrics[name] = jnp.mean(jnp.argmax(logits, -1) == label)
    return total, metrics | {"loss": total}


def train(params: dict, seed: int, steps: int, log: Path) -> dict:
    """Runs the stage on a model's parameters; returns them with the new tower and word rows. `log`
    receives a JSON line every 100 steps."""
    trained, fixed = init(params, jax.random.key(seed))
    tx = optimiser(steps, LEARNING_RATE)
    state = tx.init(trained)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(trained, state, batch):
        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(trained, fixed, batch)
        changes, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, changes), state, metrics

    started, batches = time.monotonic(), prefetch(lambda i: make_batch(seed, i), 0)
    with log.open("a", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            trained, state, metrics = update(trained, state, next(batches))
            if step % 100 == 0 or step == steps:
                row = {"stage": "reader", "step": step, "seconds": time.monotonic() - started}
                row |= {k: float(v) for k, v in metrics.items()}
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)
    table = np.asarray(params["text"]["embed"]["embedding"]).copy()
    ids = tokenizer.word_ids()
    table[[ids[w] for w in tokenizer.WORDS]] = np.asarray(trained["new"])
    text = dict(params["text"]) | {"embed": {"embedding": jnp.asarray(table)}}
    return {"text": text, "vision": trained["vision"]}
