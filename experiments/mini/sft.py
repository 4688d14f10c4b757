"""Stage 2: the decoder learns the four sections on generated episodes; the tower stays as it is.

Page batches hold full questions and exercises (reading a page aloud, naming titles, comparing
numbers), whose share falls with time. Every other batch has no pages at all: observe and evidence are
given, and only <think> and <answer> are trained, so that reasoning costs a fraction. Fresh episodes
every step; only the "train" split is asked.
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
from experiments.mini.reader import WORDS
from experiments.mini.shapes import GRID, page_arrays, prefetch

PROMPTS, PAGES, LENGTH, RESPONSE = 32, 3, 96, 48
QUESTION_SHARES = {"lookup": 0.35, "compare": 0.40, "absent_page": 0.10, "absent_field": 0.15}
LEARNING_RATE = 1.2e-3
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


def sft_loss(text, vision, config, batch):
    """(sum of -log p) / (number of trained tokens)."""
    groups = group_batch(batch)
    mask = response_mask(groups.lengths, groups.tokens.shape[2])
    mask = mask * (jnp.arange(mask.shape[2]) >= batch["trained_from"][..., None])
    params = {"text": text, "vision": vision}
    logp = score_responses(params, config, groups, remat=False).logp
    return -jnp.sum(logp * mask) / jnp.maximum(jnp.sum(mask), 1)


def train(
    config, tok, params, seed: int, steps: int, log: Path, out: Path, *, start=0, keep=()
) -> dict:
    """Runs the stage for `steps` updates, page batches and derivation batches in turn.

    `start` is the number of updates before it: data and step numbers go on from there. Parameters
    are saved as out/sft-STEP at the steps in `keep`.
    """
    from experiments.mini.skills import skill_table

    layout = Layout(tok)
    text, vision = params["text"], params["vision"]
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 100, steps, 0.05 * LEARNING_RATE)
    matrices = functools.partial(jax.tree.map, lambda a: a.ndim > 1)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.01, mask=matrices),
    )
    state = tx.init(text)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(text, state, vision, batch):
        loss, grads = jax.value_and_grad(sft_loss)(text, vision, config, batch)
        changes, state = tx.update(grads, state, text)
        return optax.apply_updates(text, changes), state, loss

    def make(step):
        if step % 2:
            return derivation_batch(layout, seed, step)
        share = 0.6 + (0.35 - 0.6) * min(1.0, step / 1000)
        return make_batch(layout, draw_episodes(seed, step, share))

    started, batches = time.monotonic(), prefetch(make, start)
    history = defaultdict(list)
    with log.open("a", encoding="utf-8") as file:
        for step in range(start, start + steps):
            text, state, loss = update(text, state, vision, next(batches))
            history["loss_derivation" if step % 2 else "loss"].append(loss)
            done, now = step + 1, {"text": text, "vision": vision}
            if done % 100 == 0 or done == start + steps or done in keep:
                row = {"stage": "sft", "step": done, "seconds": time.monotonic() - started}
                row |= {k: float(np.mean(jax.device_get(v))) for k, v in history.items()}
                history.clear()
                row |= skill_table(now, config, layout)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)
            if done in keep:
                save(out / f"sft-{done}", now)
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
