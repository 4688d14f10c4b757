"""Words of the mini world, its train/dev/test/reader splits, and the random streams of each.

An (entity, field) pair belongs to exactly one of "train", "dev" and "test", decided by its crc32; a
few entities are held out as a whole. "reader" is the split of single pages for learning to read
words: it may show everything.
"""

from __future__ import annotations

import zlib

import numpy as np

SPLITS = ("train", "dev", "test", "reader")

# Short place names; each is at most 26 px wide in every face of draw.FACES.
# fmt: off
ENTITIES = (
    "Oslo", "Nice", "Riga", "Linz", "Ulm", "Pisa", "Bari", "Bath", "Hull", "Giza", "Fes",
    "Cali", "Sion", "Biel", "Zug", "Albi", "Kyiv", "Jaen", "Juba", "Beja", "Pula", "Iasi",
    "Cluj", "Tula", "Ufa", "Orel", "Iona", "Acre", "Ipoh", "Hue", "Elba", "Xian", "Hilo",
    "Enid", "Pau", "Toul", "Jena", "Kiel", "Hof", "Asti", "Kos", "Van", "Rize", "Bali", "Fiji",
    "Ayr", "Fife", "Oita", "Jeju", "Lviv", "Izu", "Gifu", "Elko", "Spa", "Fuji", "Mull",
)
FIELDS = (
    "rain", "cost", "oil", "ice", "tax", "sun", "salt", "rice", "fish", "coal", "tea", "rent",
    "gas", "mail", "iron", "silk",
)
# fmt: on
VALUES = tuple(range(10, 100))

TEST_ENTITIES = ("Kyiv", "Pula", "Xian", "Kiel", "Asti", "Jeju")
DEV_ENTITIES = ("Tula", "Elko")
KNOWN_ENTITIES = tuple(e for e in ENTITIES if e not in TEST_ENTITIES + DEV_ENTITIES)

INSUFFICIENT = "insufficient to answer"
NOT_RELEVANT = "no relevant information"

LOOKUP_QUESTIONS = (
    "What is the {field} of {a} ?",
    "How much {field} has {a} ?",
    "Which {field} does {a} show ?",
)
COMPARE_QUESTIONS = (
    "Which has more {field} , {a} or {b} ?",
    "Is there more {field} in {a} or in {b} ?",
    "Where is the {field} higher , {a} or {b} ?",
)
READ_QUESTIONS = ("Read page {page} .", "What does page {page} show ?")
WHICH_QUESTIONS = ("Which page shows {a} ?", "On which page is {a} ?")


def pair_split(entity: str, field: str) -> str:
    """Split ("train", "dev" or "test") whose questions may ask for `field` of `entity`.

    Pairs of held-out entities follow their entity. Of the others 20 % are "test" and 5 % "dev", by
    crc32.
    """
    if entity in TEST_ENTITIES:
        return "test"
    if entity in DEV_ENTITIES:
        return "dev"
    bucket = zlib.crc32(f"{entity} {field}".encode()) % 20
    return "test" if bucket < 4 else "dev" if bucket == 4 else "train"


def held_out_entities(split: str) -> tuple[str, ...]:
    """Entities only `split` ("dev" or "test") asks for; empty for "train"."""
    return {"test": TEST_ENTITIES, "dev": DEV_ENTITIES}.get(split, ())


def visible_entities(split: str) -> tuple[str, ...]:
    """Entities that may appear on a page of `split`."""
    if split not in SPLITS:
        raise ValueError(f"miniworld: unknown split {split!r}; choose one of {SPLITS}")
    return ENTITIES if split == "reader" else KNOWN_ENTITIES + held_out_entities(split)


# field -> known entities whose pair with it belongs to the split
KNOWN_BY_FIELD: dict[str, dict[str, tuple[str, ...]]] = {
    split: {f: tuple(e for e in KNOWN_ENTITIES if pair_split(e, f) == split) for f in FIELDS}
    for split in ("train", "dev", "test")
}
# entity -> fields that train may ask for
TRAIN_FIELDS: dict[str, tuple[str, ...]] = {
    e: tuple(f for f in FIELDS if pair_split(e, f) == "train") for e in KNOWN_ENTITIES
}


def stream(seed: int, split: str, index: int, task: int = 0) -> np.random.Generator:
    """Philox generator of one example; streams with another (seed, split, index, task) never
    overlap.

    `task` tells apart the kinds of example drawn for one split: 0 questions, 1 reading tasks, 2 single
    pages, 3 and 4 the pages and questions of a corpus; 7 to 15 are free for experiments.
    """
    if split not in SPLITS:
        raise ValueError(f"miniworld: unknown split {split!r}; choose one of {SPLITS}")
    if not (0 <= seed < 2**56 and 0 <= index < 2**63 and 0 <= task < 16):
        raise ValueError(f"miniworld: seed {seed}, index {index} or task {task} is out of range")
    key = np.array([seed << 8 | SPLITS.index(split) << 4 | task, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
