"""The mini tokenizer with the words of scenes and of the short evidence format at its end."""

from __future__ import annotations

from pathlib import Path

from experiments.evidence_rl.scenes import COLOURS, SHAPES
from experiments.mini import tokenizer as mini

#: In the order of their ids, behind all words of the mini tokenizer: new ones go to the end.
WORDS = (*COLOURS, *SHAPES, "many", "there", "colour", "values", "above", "usual", "row")
WORDS = tuple(w for w in WORDS if w not in mini.word_ids())


def build(folder: str | Path) -> Path:
    """Writes the folder of the start model but for weights and config.json; returns the folder."""
    return mini.build(folder, WORDS)


def word_ids() -> dict[str, int]:
    """Id of each word without its marker."""
    return mini.word_ids(WORDS)
