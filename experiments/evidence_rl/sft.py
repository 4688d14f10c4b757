"""SFT stage: the decoder learns the four kinds of question in the short format; the tower stays.

    looking  mostly exercises on scenes (exercises.py)
    seeing   every answer is as frequent as any other, every response grounded: nothing helps but looking
    habits   the train split with its usual answers; 30 % of the responses are lazy

Every eighth batch is text alone, so that comparing numbers is kept. The tokens of the answer weigh more
than the rest: of the cue only one of several right ones can be foreseen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evisrag_jax.data.miniworld.world import stream
from experiments.evidence_rl.exercises import ROOM, exercise
from experiments.evidence_rl.questions import (
    FAMILIES,
    SOURCES,
    USUAL,
    Question,
    question,
    respond,
)
from experiments.mini.sft import (
    Layout,
    lay_out,
    make_batch,
    stated_task,
)
from experiments.mini.skills import greedy_tokens

PROMPTS, LENGTH, RESPONSE = 64, 52, 12
EXERCISES = 40
ANSWER_WEIGHT, TEXTS, TEXT_EVERY = 4.0, 32, 8  # TEXTS rows of text alone in every eighth batch
TASK = 15  # of the random streams: what is responded
CHECKS, CHECK_SEED = 96, 70_000  # questions of each kind that the curves are measured on


def picture_batch(layout: Layout, rows: list[tuple[Question, str]]) -> dict[str, np.ndarray]:
    """Host arrays of questions with their responses."""
    laid = [(asked.text, asked.image[None], response) for asked, response in rows]
    batch = lay_out(layout, laid, 1, LENGTH, RESPONSE)
    batch["trained"] *= np.where(answer_tokens(layout, batch["response"]), ANSWER_WEIGHT, 1.0)
    return batch


def answer_tokens(layout: Layout, response: np.ndarray) -> np.ndarray:
    """Where the response tokens are those between <answer> and </answer>."""
    begin, end = layout.tok.convert_tokens_to_ids(["<answer>", "</answer>"])
    inside = np.cumsum(response == begin, -1) > np.cumsum(response == end, -1)
    return inside & (response != begin)


def exercise_batch(layout: Layout, seed: int, step: int) -> dict[str, np.ndarray]:
    """Host arrays of EXERCISES exercises on scenes."""
    rng = stream(seed, "reader", step, task=TASK)
    drawn = [exercise(rng) for _ in range(EXERCISES)]
    batch = lay_out(layout, [row[:3] for row in drawn], 1, LENGTH, ROOM)
    batch["trained"][:] = 0
    for i, (*_, weights) in enumerate(drawn):
        batch["trained"][i, 0, : len(weights)] = weights
    return batch


def lessons(
    layout: Layout, seed: int, split: str, lazy_share: float, exercises: int, counting: float = 0.5
) -> Callable[[int], dict[str, np.ndarray]]:
    """Batch of a step: questions of `split` with responses of which `lazy_share` are lazy; every
    eighth one is text alone, and `exercises` of every four are exercises. A share `counting` of the
    questions are of that family."""

    def make(step: int) -> dict[str, np.ndarray]:
        if step % 4 < exercises:
            return exercise_batch(layout, seed, step)
        if step % TEXT_EVERY == TEXT_EVERY - 1:
            rows = range(step * TEXTS, (step + 1) * TEXTS)
            return make_batch(layout, [stated_task(seed, i) for i in rows], pages=0)
        rows = []
        for index in range(step * PROMPTS, (step + 1) * PROMPTS):
            rng = stream(seed, "train", index, task=TASK)
            asked = question(seed, split, index, FAMILIES[int(rng.random() >= counting)])
            rows.append((asked, respond(asked, rng.random() < lazy_share, rng)))
        return picture_batch(layout, rows)

    return make


def skill_table(params, config, layout: Layout, split: str = "shifted") -> dict[str, float]:
    """Teacher-forced on `split`, by source and family: `answer` behind a grounded cue, `place` the
    numbers of a cue that can be but one, `usual` the usual answer behind a lazy cue, `lazy` how often
    "usual" is the likeliest first word; `text` comparisons of numbers."""
    row = {}
    for source in SOURCES:
        for family in FAMILIES:
            asked = [question(CHECK_SEED, split, i, family, source) for i in range(CHECKS)]
            rng = stream(CHECK_SEED, "test", 0, task=TASK)
            for lazy, name in ((False, "answer"), (True, "usual")):
                batch = picture_batch(layout, [(q, respond(q, lazy, rng)) for q in asked])
                chosen = np.asarray(greedy_tokens(params, config, batch))
                true = batch["response"][:, 0]
                where = answer_tokens(layout, true)
                row[f"{name}/{source}_{family}"] = float((chosen == true)[where].mean())
                if not lazy and family == "attribute":
                    spots = np.char.isdigit(np.char.lstrip(words(layout, true), "\u2581")) & ~where
                    row[f"place/{source}"] = float((chosen == true)[spots].mean())
            first = chosen[:, 1] == layout.tok.convert_tokens_to_ids(f"\u2581{USUAL}")
            row[f"lazy/{source}_{family}"] = float(first.mean())
    tasks = [stated_task(CHECK_SEED, i) for i in range(CHECKS)]
    batch = make_batch(layout, tasks, pages=0)
    chosen, true = np.asarray(greedy_tokens(params, config, batch)), batch["response"][:, 0]
    row["text"] = float((chosen == true)[answer_tokens(layout, true)].mean())
    return row


def words(layout: Layout, ids: np.ndarray) -> np.ndarray:
    """The tokens of an array of ids."""
    table = np.array(layout.tok.convert_ids_to_tokens(range(len(layout.tok))))
    return table[ids]
