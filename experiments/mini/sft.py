"""Stages 2 and 3: the decoder learns the four sections, first alone, then together with the tower.

In stage 2 the tower stays as it is. In stage 3 everything trains, and the reader's losses keep the
tower reading; its word table is then the tied embedding itself. Episodes are a mixture of full
questions and two short reading exercises ("read page k", "which page shows X"), whose share falls
from one half to a tenth. Fresh pages every step; only the "train" split is asked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from evisrag_jax.data.miniworld.draw import HEIGHT, WIDTH
from evisrag_jax.data.miniworld.episodes import COMPARE_GAP, Episode, episode, reading_task
from evisrag_jax.data.miniworld.world import FIELDS, KNOWN_ENTITIES, stream
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.prompts.chat import build_prompt
from evisrag_jax.prompts.positions import mrope_positions
from evisrag_jax.prompts.tokenizer import SpecialIds, encode_plain
from evisrag_jax.training.forward import GroupBatch, response_mask, score_responses
from experiments.mini.reader import WORDS, page_labels, reader_losses
from experiments.mini.shapes import GRID, page_arrays, prefetch

PROMPTS, PAGES, LENGTH, RESPONSE = 32, 3, 96, 48
QUESTION_SHARES = {"lookup": 0.35, "compare": 0.40, "absent_page": 0.10, "absent_field": 0.15}
LEARNING_RATE, JOINT_RATE, TOWER_SHARE, READING_WEIGHT = 1.5e-3, 1.2e-3, 0.6, 0.5
PAGE_TOKENS = GRID[0] * GRID[1] // 4


class Layout:
    """Prompts of mini episodes, equal to `build_prompt`'s, with the fixed parts laid out once."""

    def __init__(self, tok):
        self.tok, self.special = tok, SpecialIds.from_tokenizer(tok)
        mark = encode_plain(tok, "Which")
        self.parts = {}
        for n in range(PAGES + 1):
            ids = build_prompt(tok, "Which", [GRID] * n).ids.tolist()
            at = next(i for i in range(len(ids)) if ids[i : i + len(mark)] == mark)
            self.parts[n] = (ids[:at], ids[at + len(mark) :])

    @functools.cache  # noqa: B019 - one layout lives as long as the run
    def places(self, n: int, width: int):
        before, after = self.parts[n]
        ids = np.array([*before, *[self.special.endoftext] * width, *after], np.int32)
        positions, following = mrope_positions(ids, [GRID] * n, self.special)
        slots = np.flatnonzero(ids == self.special.image_pad)
        return positions, following, slots

    def row(self, question: str, n: int):
        before, after = self.parts[n]
        asked = encode_plain(self.tok, question)
        return [*before, *asked, *after], *self.places(n, len(asked))


def make_batch(
    layout: Layout, episodes: list[Episode], pages: int = PAGES
) -> dict[str, np.ndarray]:
    """Host arrays of P episodes, one response each, with room for `pages` pages a prompt."""
    P, length = len(episodes), LENGTH if pages else 32
    batch = {
        "tokens": np.full((P, length), layout.special.endoftext, np.int32),
        "positions": np.zeros((P, 3, length), np.int32),
        "lengths": np.zeros(P, np.int32),
        "image_index": np.full((P, length), -1, np.int32),
        "next_position": np.zeros(P, np.int32),
        "pixels": np.full((P, pages, HEIGHT, WIDTH, 3), 255, np.uint8),
        "word": np.full((P, pages, PAGE_TOKENS), -1, np.int32),
        "place": np.full((P, pages, PAGE_TOKENS), -1, np.int32),
        "page": np.full((P, pages, PAGE_TOKENS), -1, np.int32),
        "response": np.full((P, 1, RESPONSE), layout.special.endoftext, np.int32),
        "response_lengths": np.zeros((P, 1), np.int32),
        "trained_from": np.zeros((P, 1), np.int32),
    }
    for i, e in enumerate(episodes):
        n = len(e.pages)
        ids, positions, following, slots = layout.row(e.question, n)
        batch["tokens"][i, : len(ids)] = ids
        batch["positions"][i, :, : len(ids)] = positions
        batch["lengths"][i], batch["next_position"][i] = len(ids), following
        batch["image_index"][i, slots] = np.arange(n * PAGE_TOKENS)
        batch["pixels"][i, :n] = e.images[:n]
        for k, spec in enumerate(e.pages):
            batch["word"][i, k], batch["place"][i, k], batch["page"][i, k] = page_labels(spec)
        answer = [*layout.tok.encode(e.response, add_special_tokens=False), layout.special.im_end]
        batch["response"][i, 0, : len(answer)] = answer
        batch["response_lengths"][i, 0] = len(answer)
    return batch


def group_batch(batch: dict) -> GroupBatch:
    """The model's view of a host batch, on the device."""
    prompt = model.PromptInputs(
        batch["tokens"],
        batch["positions"],
        batch["lengths"],
        batch["image_index"],
        batch["next_position"],
    )
    images = page_arrays(batch["pixels"]) if batch["pixels"].shape[1] else None
    return GroupBatch(prompt, images, batch["response"], batch["response_lengths"])


def derivation_batch(layout: Layout, seed: int, step: int) -> dict[str, np.ndarray]:
    """Twice as many rows without pages, trained on <think> and <answer> only: observe and evidence
    are given in the response, so that reasoning is learned at a fraction of the cost."""
    rows = 2 * PROMPTS
    shares = {**QUESTION_SHARES, "compare": 1.5}
    episodes = [episode(seed, "train", step * rows + i, shares=shares) for i in range(rows)]
    batch = make_batch(layout, [dataclasses.replace(e, pages=()) for e in episodes], pages=0)
    think = layout.tok.convert_tokens_to_ids("<think>")
    batch["trained_from"] = np.argmax(batch["response"] == think, axis=-1) + 1
    return batch


def draw_episodes(seed: int, step: int, exercises: float) -> list[Episode]:
    """Mostly questions on three pages; the shorter prompts keep a page's number from being a place.

    A share `exercises` of the rows are exercises: reading aloud, naming titles, comparing numbers.
    """
    rng = stream(seed, "train", step, task=7)
    episodes = []
    for i in range(PROMPTS):
        n = 3 if rng.random() < 0.8 else int(rng.integers(1, 3))
        index, kind = step * PROMPTS + i, rng.random() / exercises
        if kind < 0.3:
            episodes.append(reading_task(seed, "train", index, n_pages=n))
        elif kind < 0.5:
            episodes.append(title_task(seed, index))
        elif kind < 1.0:
            episodes.append(number_task(seed, index))
        else:
            episodes.append(episode(seed, "train", index, n_pages=n, shares=QUESTION_SHARES))
    return episodes


def title_task(seed: int, index: int) -> Episode:
    """Names the titles of three pages, as <observe> does. Any town may stand there, also one that no
    training question asks for: a name that is never written could never be answered with."""
    pages = reading_task(seed, "reader", index, n_pages=PAGES, kind="which")
    titles = " , ".join(page.title for page in pages.pages)
    return dataclasses.replace(
        pages, question="What does page show ?", response=f"<observe> {titles}</observe>"
    )


def number_task(seed: int, index: int, clauses: int = 3) -> Episode:
    """Comparisons whose values stand in the question: the order of the numbers is learned far more
    cheaply here than from one comparison a question about pages."""
    rng = stream(seed, "train", index, task=8)
    field = FIELDS[rng.integers(len(FIELDS))]
    asked, said = [], []
    for _ in range(clauses):
        a, b = (KNOWN_ENTITIES[i] for i in rng.choice(len(KNOWN_ENTITIES), 2, replace=False))
        x, y = 0, 0
        while abs(x - y) < COMPARE_GAP:
            x, y = (int(v) for v in rng.integers(10, 100, 2))
        asked.append(f"{a} {x} or {b} {y}")
        said.append(f"{a} {field} {x} , {b} {field} {y} , more is {a if x > y else b}")
    page = reading_task(seed, "train", index, n_pages=1)
    return dataclasses.replace(
        page,
        question=f"Which has more {field} , " + " , ".join(asked) + " ?",
        response=" " + " , ".join(said),
        kind="number",
    )


def init_from_reader(config: Qwen25VLConfig, reader: dict, word_ids: dict[str, int], seed: int):
    """A fresh decoder around the reader's tower and word table."""
    params = model.init_params(config, jax.random.key(seed + 1))
    words = np.asarray(reader["words"])
    table = np.asarray(params["text"]["embed"]["embedding"]) * (words[:-1].std() / 0.02)
    for i, word in enumerate(WORDS):
        table[word_ids[word]] = words[i]
    params["text"]["embed"]["embedding"] = jnp.asarray(table)
    params["vision"] = jax.tree.map(jnp.asarray, reader["vision"])
    return params


def sft_loss(trainable, fixed, config, batch, word_rows):
    """(sum of -log p) / (number of trained tokens), plus the reader's losses in stage 3.

    `trainable` holds "text" and, in stage 3, "vision" and the reader's "heads"; `fixed` the rest.
    """
    params = {**fixed, **trainable}
    joint = "vision" in trainable and batch["pixels"].shape[1] > 0
    groups = group_batch(batch)
    mask = response_mask(groups.lengths, groups.tokens.shape[2])
    mask = mask * (jnp.arange(mask.shape[2]) >= batch["trained_from"][..., None])
    model_params = {"text": params["text"], "vision": params["vision"]}
    features = None
    if groups.images is not None:
        features = model.encode_images(model_params, config, groups.images)
    logp = score_responses(model_params, config, groups, features=features, remat=False).logp
    loss = -jnp.sum(logp * mask) / jnp.maximum(jnp.sum(mask), 1)
    if not joint:
        return loss, {"loss": loss}
    features = features.reshape(-1, PAGE_TOKENS, features.shape[-1])
    labels = {k: batch[k].reshape(-1, PAGE_TOKENS) for k in ("word", "place", "page")}
    heads = params["heads"]
    words = params["text"]["embed"]["embedding"][word_rows]
    words = jnp.concatenate([words, heads["blank"]])
    reading, read = reader_losses(features, words, heads["place"], heads["page"], labels)
    return loss + READING_WEIGHT * reading, {"loss": loss, "reading": reading} | {
        f"read_{k}": v for k, v in read.items()
    }


def optimiser(rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW on a cosine, the tower at a share of the rate."""

    def adamw(peak):
        return optax.adamw(
            optax.warmup_cosine_decay_schedule(0.0, peak, 100, steps, 0.05 * peak),
            b1=0.9,
            b2=0.98,
            weight_decay=0.01,
            mask=functools.partial(jax.tree.map, lambda a: a.ndim > 1),
        )

    rates = {"text": adamw(rate), "vision": adamw(TOWER_SHARE * rate), "heads": adamw(rate)}

    def label(tree):
        return {part: jax.tree.map(lambda _: part, leaves) for part, leaves in tree.items()}  # noqa: B023

    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(rates, label))


def train(
    config,
    tok,
    params,
    seed: int,
    steps: int,
    log: Path,
    out: Path,
    *,
    heads=None,
    start=0,
    keep=(),
) -> dict:
    """Runs stage 2, or 3 when the reader's `heads` are given, for `steps` updates.

    `start` is the number of updates before it: data and step numbers go on from there. Parameters
    are saved as out/sft-STEP at the steps in `keep`, with "heads" in stage 3.
    """
    from experiments.mini import tokenizer
    from experiments.mini.skills import skill_table

    layout = Layout(tok)
    trainable = {"text": params["text"]}
    fixed = {"vision": params["vision"]}
    if heads is not None:
        trainable, fixed = {**trainable, "vision": params["vision"], "heads": heads}, {}
    tx = optimiser(LEARNING_RATE if heads is None else JOINT_RATE, steps)
    state = tx.init(trainable)
    ids = tokenizer.word_ids()
    word_rows = jnp.asarray([ids[word] for word in WORDS])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(trainable, state, fixed, batch):
        grad = jax.value_and_grad(sft_loss, has_aux=True)
        (_, metrics), grads = grad(trainable, fixed, config, batch, word_rows)
        changes, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, changes), state, metrics

    def make(step):
        if heads is None and step % 2:
            return derivation_batch(layout, seed, step)
        share = 0.6 + (0.35 - 0.6) * min(1.0, step / 1000)
        return make_batch(layout, draw_episodes(seed, step, share))

    started, batches = time.monotonic(), prefetch(make, start)
    history = defaultdict(list)
    with log.open("a", encoding="utf-8") as file:
        for step in range(start + 1, start + steps + 1):
            trainable, state, metrics = update(trainable, state, fixed, next(batches))
            for name, value in metrics.items():
                history[f"{name}_derivation" if heads is None and step % 2 == 0 else name].append(
                    value
                )
            now = {**fixed, **trainable}
            if step % 100 == 0 or step == start + steps or step in keep:
                row = {"stage": "sft" if heads is None else "joint", "step": step}
                row["seconds"] = time.monotonic() - started
                row |= {k: float(np.mean(jax.device_get(v))) for k, v in history.items()}
                history.clear()
                row |= skill_table(now, config, layout)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()},
                    flush=True,
                )
            if step in keep:
                save(out / f"sft-{step}", now)
    return now


def save(folder: Path, params) -> None:
    """An intermediate parameter tree (orbax)."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as saver:
        saver.save(folder.absolute(), jax.device_get(params), force=True)


def load(folder: Path):
    """What `save` wrote."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as saver:
        return saver.restore(folder.absolute())


def special_ids(tok) -> dict[str, int]:
    """Token ids that the model's config.json names."""
    special = SpecialIds.from_tokenizer(tok)
    return {
        "image_token": special.image_pad,
        "video_token": special.video_pad,
        "vision_start": special.vision_start,
        "vision_end": special.vision_end,
    }
