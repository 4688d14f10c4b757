"""Exercises on scenes for the early phase of SFT: many small look-ups in one response.

A question of the short format trains the look at a picture with one or two tokens; these train it with a
dozen, for little more than the price of the same prompt.

    What does page 1 show ?   star 2 3 red , ring 1 1 blue , ...          each shape occurs once
    Read page 1 .             red circle 2 , blue circle 1 , ...          how many there are of each kind,
                              or of each colour (red 2 , blue 1), or of each shape

Only what the picture decides is trained: place and colour behind a shape, the number behind a kind. Some
scenes have one or two objects, with which the search for the asked one begins, and counting begins with
what a single property decides.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from jaxtyping import UInt8

from evisrag_jax.data.miniworld.world import READ_QUESTIONS
from experiments.evidence_rl.scenes import COLOURS, SHAPES, draw_scene, repeated_kinds

ROOM = 32  # response tokens: eight counts of three words, the commas between them and the end
_READ, _SHOW = (wording.format(page=1) for wording in READ_QUESTIONS)


def exercise(
    rng: np.random.Generator,
) -> tuple[str, UInt8[np.ndarray, "1 112 140 3"], str, list[int]]:
    """Question, picture, response, and for each word of the response whether it is trained."""
    if rng.random() < 0.5:
        question, image, entries = _SHOW, *_show(rng)
        trained = [0, 1, 1, 1]
    else:
        question, image, entries = _READ, *_count(rng)
        trained = [0] * (len(entries[0]) - 1) + [1]
    response = " , ".join(" ".join(entry) for entry in entries)
    weights = [*trained, 0] * len(entries)
    return question, image[None], f" {response}", weights[:-1]


def _show(rng: np.random.Generator):
    shapes = [SHAPES[i] for i in rng.permutation(len(SHAPES))[: rng.integers(1, len(SHAPES) + 1)]]
    names = tuple(COLOURS)
    image, things = draw_scene(rng, [(names[rng.integers(len(names))], s) for s in shapes])
    return image, [(t.shape, str(t.col + 1), str(t.row + 1), t.colour) for t in things]


def _count(rng: np.random.Generator):
    """The numbers of each kind, colour or shape."""
    drawn = repeated_kinds(rng)
    image, _ = draw_scene(rng, drawn)
    part = (slice(0, 2), slice(0, 2), slice(0, 1), slice(1, 2))[rng.integers(4)]
    counts = list(Counter(kind[part] for kind in drawn).items())
    return image, [(*counts[i][0], str(counts[i][1])) for i in rng.permutation(len(counts))]
