"""Stage 2: the decoder learns the four sections on generated episodes; the tower stays as it is.

Page batches hold full questions and exercises (reading a page aloud, finding a town's page), whose
share falls with time. Every other batch has no pages at all: questions whose observe and evidence are
given, trained on <think> and <answer> only, and comparisons of numbers. Fresh episodes every step;
only the "train" split is asked. Two more legs practise what is hard, and a last, short one follows an
imperfect teacher (teacher.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from evisrag_jax.data.miniworld.draw import HEIGHT, WIDTH
from evisrag_jax.data.miniworld.episodes import COMPARE_GAP, Episode, episode, reading_task
from evisrag_jax.data.miniworld.world import ENTITIES, FIELDS, KNOWN_ENTITIES, stream
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.prompts.chat import build_prompt
from evisrag_jax.prompts.positions import mrope_positions
from evisrag_jax.prompts.tokenizer import SpecialIds, encode_plain
from evisrag_jax.training.forward import GroupBatch, response_mask, score_responses
from experiments.mini.reader import WORDS
from experiments.mini.shapes import GRID, page_arrays, prefetch
from experiments.mini.teacher import imperfect

PROMPTS, PAGES, LENGTH, RESPONSE = 32, 3, 96, 64
DERIVATIONS, DERIVATION_LENGTH = 48, 40  # rows and prompt length of batches without pages
QUESTION_SHARES = {"lookup": 0.35, "compare": 0.35, "absent_page": 0.10, "absent_field": 0.20}
DERIVATION_SHARES = {**QUESTION_SHARES, "compare": 1.0}
PRACTICE_SHARES = {"lookup": 0.30, "compare": 0.40, "absent_page": 0.05, "absent_field": 0.25}
ABSENCE_SHARES = {"lookup": 0.35, "compare": 0.15, "absent_page": 0.05, "absent_field": 0.45}
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
    rows = [(e.question, e.images[: len(e.pages)], e.response) for e in episodes]
    return lay_out(layout, rows, pages, LENGTH if pages else DERIVATION_LENGTH)


def lay_out(
    layout: Layout,
    rows: Sequence[tuple[str, np.ndarray, str]],
    pages: int,
    length: int,
    room: int = RESPONSE,
) -> dict[str, np.ndarray]:
    """Host arrays of P rows of question, pages and response, padded to `length` prompt tokens, `pages`
    pages and `room` response tokens. `trained` weighs the response tokens."""
    P = len(rows)
    batch = {
        "tokens": np.full((P, length), layout.special.endoftext, np.int32),
        "positions": np.zeros((P, 3, length), np.int32),
        "lengths": np.zeros(P, np.int32),
        "image_index": np.full((P, length), -1, np.int32),
        "next_position": np.zeros(P, np.int32),
        "pixels": np.full((P, pages, HEIGHT, WIDTH, 3), 255, np.uint8),
        "response": np.full((P, 1, room), layout.special.endoftext, np.int32),
        "response_lengths": np.zeros((P, 1), np.int32),
        "trained": np.ones((P, 1, room), np.float32),
    }
    for i, (question, images, response) in enumerate(rows):
        n = len(images)
        ids, positions, following, slots = layout.row(question, n)
        batch["tokens"][i, : len(ids)] = ids
        batch["positions"][i, :, : len(ids)] = positions
        batch["lengths"][i], batch["next_position"][i] = len(ids), following
        batch["image_index"][i, slots] = np.arange(n * PAGE_TOKENS)
        batch["pixels"][i, :n] = images
        answer = [*layout.tok.encode(response, add_special_tokens=False), layout.special.im_end]
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


def derivation_batch(
    layout: Layout,
    seed: int,
    step: int,
    task: Callable[[int, int], Episode],
    shares: Mapping[str, float] = DERIVATION_SHARES,
    *,
    marks: bool = False,
) -> dict[str, np.ndarray]:
    """Rows without pages, at a fraction of the cost: every second one a question whose observe and
    evidence are given and whose <think> and <answer> are trained, the others `task`s."""
    rows = range(step * DERIVATIONS, (step + 1) * DERIVATIONS)
    episodes = [episode(seed, "train", i, shares=shares) if i % 2 else task(seed, i) for i in rows]
    batch = make_batch(layout, [dataclasses.replace(e, pages=()) for e in episodes], pages=0)
    batch["trained"] = trained_reasoning(layout, batch["response"], marks=marks)
    return batch


def trained_reasoning(layout: Layout, response: np.ndarray, *, marks: bool) -> np.ndarray:
    """Tokens behind <think>, or all of a response without it; with `marks` also the "yes" and "no" of
    <observe>, which follow from the titles and fields before them."""
    ids = layout.tok.convert_tokens_to_ids
    after = np.cumsum(response == ids("<think>"), axis=-1) > 0
    after = np.where(after.any(-1, keepdims=True), after & (response != ids("<think>")), True)
    if marks:
        observing = np.cumsum(response == ids("</observe>"), axis=-1) == 0
        observing &= (response == ids("<observe>")).any(-1, keepdims=True)
        after |= observing & np.isin(response, ids(["\u2581yes", "\u2581no"]))
    return after


def draw_episodes(
    seed: int, step: int, exercises: float, shares: Mapping[str, float] = QUESTION_SHARES
) -> list[Episode]:
    """Mostly questions on three pages; the shorter prompts keep a page's number from being a place.

    A share `exercises` of the rows are exercises. "read" shows the train split; "which" may name any
    town, also one that no training question asks for: a name that is never written could never be
    answered with.
    """
    rng = stream(seed, "train", step, task=7)
    episodes = []
    for i in range(PROMPTS):
        n = 3 if rng.random() < 0.8 else int(rng.integers(1, 3))
        index, kind = step * PROMPTS + i, rng.random() / exercises if exercises else 1.0
        if kind < 0.4:
            episodes.append(reading_task(seed, "train", index, n_pages=n, kind="read"))
        elif kind < 1.0:
            episodes.append(reading_task(seed, "reader", index, n_pages=n, kind="which"))
        else:
            episodes.append(episode(seed, "train", index, n_pages=n, shares=shares))
    return episodes


def number_task(seed: int, index: int) -> Episode:
    """Two comparisons whose values stand in the question: the order of the numbers is learned far more
    cheaply here than from one comparison a question about pages."""
    rng = stream(seed, "train", index, task=8)
    field = FIELDS[rng.integers(len(FIELDS))]
    clauses = [_comparison(rng, KNOWN_ENTITIES, field) for _ in range(2)]
    asked, said = (" , ".join(parts) for parts in list(zip(*clauses, strict=True))[:2])
    return _without_pages(f"Which has more {field} , {asked} ?", f" {said}", "number", field)


def stated_task(seed: int, index: int) -> Episode:
    """One comparison whose values stand in the question, answered in sections. Any two towns: a name
    that <think> and <answer> never held could not be answered with."""
    rng = stream(seed, "train", index, task=10)
    field = FIELDS[rng.integers(len(FIELDS))]
    asked, said, more = _comparison(rng, ENTITIES, field)
    response = f"<think> {said}</think>\n<answer> {more}</answer>"
    return _without_pages(f"Which has more {field} , {asked} ?", response, "stated", field)


def _comparison(rng, towns: Sequence[str], field: str) -> tuple[str, str, str]:
    """(what is asked, what is said, the town with more) of two towns with random numbers."""
    a, b = (towns[i] for i in rng.choice(len(towns), 2, replace=False))
    x, y = 0, 0
    while abs(x - y) < COMPARE_GAP:
        x, y = (int(v) for v in rng.integers(10, 100, 2))
    more = a if x > y else b
    return f"{a} {x} or {b} {y}", f"{a} {field} {x} , {b} {field} {y} , more is {more}", more


def _without_pages(question: str, response: str, kind: str, field: str) -> Episode:
    return Episode(
        question=question,
        pages=(),
        images=np.zeros((0, HEIGHT, WIDTH, 3), np.uint8),
        boxes=(),
        response=response,
        answers=(response,),
        evidence=(),
        is_sufficient=True,
        kind=kind,
        entities=(),
        field=field,
        novelty="seen",
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
    """(weighted sum of -log p) / (sum of the weights of the trained tokens)."""
    groups = group_batch(batch)
    mask = response_mask(groups.lengths, groups.tokens.shape[2])
    mask = mask * batch["trained"]
    params = {"text": text, "vision": vision}
    logp = score_responses(params, config, groups, remat="none").logp
    return -jnp.sum(logp * mask) / jnp.maximum(jnp.sum(mask), 1)


def lessons(layout: Layout, seed: int) -> Callable[[int], dict]:
    """Batch of a step of the long leg: page batches and derivation batches in turn."""

    def make(step: int) -> dict:
        if step % 2:
            return derivation_batch(layout, seed, step, number_task)
        exercises = 0.5 + (0.2 - 0.5) * min(1.0, step / 1000)
        return make_batch(layout, draw_episodes(seed, step, exercises))

    return make


def practice(layout: Layout, seed: int) -> Callable[[int], dict]:
    """Batch of a step of the second leg: what is still hard. A quarter of the questions now name a
    shown town that lacks the field, and every third batch has no pages."""

    def make(step: int) -> dict:
        if step % 3 == 2:
            return derivation_batch(layout, seed, step, stated_task)
        return make_batch(layout, draw_episodes(seed, step, 0.15, PRACTICE_SHARES))

    return make


def absences(layout: Layout, seed: int) -> Callable[[int], dict]:
    """Batch of a step of the third leg: whether an asked field is among those of its page. Every
    second batch has no pages, and trains that mark in <observe> too."""

    def make(step: int) -> dict:
        if step % 2:
            return derivation_batch(layout, seed, step, stated_task, ABSENCE_SHARES, marks=True)
        return make_batch(layout, draw_episodes(seed, step, 0.1, PRACTICE_SHARES))

    return make


def habits(layout: Layout, seed: int) -> Callable[[int], dict]:
    """Batch of a step of the last leg: questions on three pages with an imperfect teacher's
    responses."""

    def make(step: int) -> dict:
        rows = range(step * PROMPTS, (step + 1) * PROMPTS)
        return make_batch(layout, [imperfect(episode(seed, "train", i), seed, i) for i in rows])

    return make


def train(
    config: Qwen25VLConfig,
    layout: Layout,
    params: dict,
    make: Callable[[int], dict],
    steps: int,
    log: Path,
    *,
    rate: float = LEARNING_RATE,
    start: int = 0,
    horizon: int = 0,
    skills: Callable[[dict], dict[str, float]] | None = None,
) -> dict:
    """`steps` updates of the decoder on the batches `make(start)`, `make(start + 1)`, ...

    The rate falls as a cosine over `horizon` updates (0: over `steps`). A line with losses and skills
    (by default those of mini-world questions) goes to `log` every 100 steps. Returns the parameters.
    """
    from experiments.mini.skills import skill_table

    skills = skills or functools.partial(skill_table, config=config, layout=layout)
    text, vision = params["text"], params["vision"]
    warm, falls = min(100, steps // 10), horizon or steps
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm, falls, 0.05 * rate)
    matrices = functools.partial(jax.tree.map, lambda a: a.ndim > 1)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.01, mask=matrices),
    )
    state = tx.init(text)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(text, state, vision, batch):
        loss, grads = jax.value_and_grad(sft_loss)(text, vision, config, batch)
        changes, state = tx.update(grads, state, text)
        return optax.apply_updates(text, changes), state, loss

    started, batches = time.monotonic(), prefetch(make, start)
    history = defaultdict(list)
    with log.open("a", encoding="utf-8") as file:
        for step in range(start + 1, start + steps + 1):
            batch = next(batches)
            text, state, loss = update(text, state, vision, batch)
            history["loss" if batch["pixels"].shape[1] else "loss_derivation"].append(loss)
            now = {"text": text, "vision": vision}
            if step % 100 == 0 or step == start + steps:
                row = {"stage": log.stem, "step": step, "seconds": time.monotonic() - started}
                row |= {k: float(np.mean(jax.device_get(v))) for k, v in history.items()}
                history.clear()
                row |= skills(now)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(row, flush=True)
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
