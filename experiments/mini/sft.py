"""Stage 2: the decoder learns the four sections on generated episodes; the tower stays as it is.

A mixture of full questions and two short reading exercises ("read page k", "which page shows X"),
whose share falls from one half to a tenth. Fresh pages every step; only the "train" split is asked.
"""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from evisrag_jax.data.miniworld.episodes import Episode, episode, reading_task
from evisrag_jax.data.miniworld.world import stream
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig
from evisrag_jax.prompts.chat import build_prompt
from evisrag_jax.prompts.positions import mrope_positions
from evisrag_jax.prompts.tokenizer import SpecialIds, encode_plain
from evisrag_jax.training.forward import GroupBatch, response_mask, score_responses
from experiments.mini.reader import WORDS
from experiments.mini.shapes import GRID, mini_config, page_arrays, prefetch

PROMPTS, PAGES, LENGTH, RESPONSE = 32, 3, 96, 48
LEARNING_RATE = 1.5e-3
PAGE_TOKENS = GRID[0] * GRID[1] // 4


class Layout:
    """Prompts of mini episodes, equal to `build_prompt`'s, with the fixed parts laid out once."""

    def __init__(self, tok):
        self.tok, self.special = tok, SpecialIds.from_tokenizer(tok)
        mark = encode_plain(tok, "Which")
        self.parts = {}
        for n in range(1, PAGES + 1):
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


def make_batch(layout: Layout, episodes: list[Episode]) -> dict[str, np.ndarray]:
    """Host arrays of P episodes, one response each."""
    P = len(episodes)
    batch = {
        "tokens": np.full((P, LENGTH), layout.special.endoftext, np.int32),
        "positions": np.zeros((P, 3, LENGTH), np.int32),
        "lengths": np.zeros(P, np.int32),
        "image_index": np.full((P, LENGTH), -1, np.int32),
        "next_position": np.zeros(P, np.int32),
        "pixels": np.full((P, PAGES, *episodes[0].images.shape[1:]), 255, np.uint8),
        "response": np.full((P, 1, RESPONSE), layout.special.endoftext, np.int32),
        "response_lengths": np.zeros((P, 1), np.int32),
    }
    for i, e in enumerate(episodes):
        n = len(e.images)
        ids, positions, following, slots = layout.row(e.question, n)
        batch["tokens"][i, : len(ids)] = ids
        batch["positions"][i, :, : len(ids)] = positions
        batch["lengths"][i], batch["next_position"][i] = len(ids), following
        batch["image_index"][i, slots] = np.arange(n * PAGE_TOKENS)
        batch["pixels"][i, :n] = e.images
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
    return GroupBatch(
        prompt, page_arrays(batch["pixels"]), batch["response"], batch["response_lengths"]
    )


def draw_episodes(seed: int, step: int, reading_share: float) -> list[Episode]:
    """Mostly three pages; the shorter prompts keep the page number from being a fixed place."""
    rng = stream(seed, "train", step, task=7)
    episodes = []
    for i in range(PROMPTS):
        n = 3 if rng.random() < 0.8 else int(rng.integers(1, 3))
        make = reading_task if rng.random() < reading_share else episode
        episodes.append(make(seed, "train", step * PROMPTS + i, n_pages=n))
    return episodes


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


def sft_loss(trainable, vision, config, batch):
    """(sum of -log p) / (number of trained tokens), and the token accuracy's inputs."""
    params = {"text": trainable, "vision": vision}
    groups = group_batch(batch)
    mask = response_mask(groups.lengths, groups.tokens.shape[2])
    logp = score_responses(params, config, groups, remat=False).logp
    return -jnp.sum(logp * mask) / jnp.maximum(jnp.sum(mask), 1)


def train(config, tok, params, seed: int, steps: int, log: Path, out: Path, *, keep=()) -> dict:
    """Runs the stage, evaluating and saving at the steps in `keep`; returns the parameters."""
    from experiments.mini.skills import skill_table

    layout = Layout(tok)
    warm = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 100, steps, 0.05 * LEARNING_RATE)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            warm,
            b1=0.9,
            b2=0.98,
            weight_decay=0.01,
            mask=functools.partial(jax.tree.map, lambda a: a.ndim > 1),
        ),
    )
    text, vision = params["text"], params["vision"]
    state = tx.init(text)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(text, state, vision, batch):
        loss, grads = jax.value_and_grad(sft_loss)(text, vision, config, batch)
        changes, state = tx.update(grads, state, text)
        return optax.apply_updates(text, changes), state, loss

    def make(step):
        share = 0.5 + (0.1 - 0.5) * min(1.0, step / (0.4 * steps))
        return make_batch(layout, draw_episodes(seed, step, share))

    started, batches = time.monotonic(), prefetch(make, 0)
    history = defaultdict(list)
    with log.open("a", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            text, state, loss = update(text, state, vision, next(batches))
            history["loss"].append(loss)
            if step % 100 == 0 or step == steps:
                row = {"stage": "sft", "step": step, "seconds": time.monotonic() - started}
                row["loss"] = float(np.mean(jax.device_get(history.pop("loss"))))
                if step % 200 == 0 or step == steps or step in keep:
                    row |= skill_table({"text": text, "vision": vision}, config, layout)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()},
                    flush=True,
                )
            if step in keep:
                save(out / f"sft-{step}", {"text": text, "vision": vision})
    return {"text": text, "vision": vision}


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


def main() -> None:
    import argparse

    from evisrag_jax.prompts.tokenizer import load_tokenizer
    from experiments.mini import tokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer.build(args.out / "tokenizer")
    tok = load_tokenizer(args.out / "tokenizer")
    config = mini_config(len(tok), special_ids(tok))
    params = init_from_reader(config, load(args.out / "reader"), tokenizer.word_ids(), args.seed)
    keep = set(range(500, args.steps + 1, 250))
    params = train(
        config, tok, params, args.seed, args.steps, args.out / "sft.jsonl", args.out, keep=keep
    )
    save(args.out / "sft", params)


if __name__ == "__main__":
    main()
