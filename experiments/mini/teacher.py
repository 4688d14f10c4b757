"""An imperfect teacher: it reads well but has two habits, one in each half of a response.

`mini-sft` is taught by it last, so that its mistakes are of a kind that models trained on other
models' responses have, and that rewards can undo: it often overlooks the last page, and often names
the first town of a comparison without looking at the numbers.
"""

from __future__ import annotations

import dataclasses

from evisrag_jax.data.miniworld.episodes import Episode, respond
from evisrag_jax.data.miniworld.world import stream

OVERLOOKS, FIRST_NAMED = 0.6, 0.6


def imperfect(episode: Episode, seed: int, index: int) -> Episode:
    """The episode with what the teacher writes; what is right (answers, evidence) stays as it was."""
    rng = stream(seed, "train", index, task=9)
    overlooks, hasty = rng.random() < OVERLOOKS, rng.random() < FIRST_NAMED
    unread = {len(episode.pages) - 1} if overlooks else set()
    response, _, _ = respond(
        episode.pages, episode.entities, episode.field, unread=unread, hasty=hasty
    )
    return dataclasses.replace(episode, response=response)
