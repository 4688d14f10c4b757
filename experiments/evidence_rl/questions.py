"""Questions on scenes and mini pages that have a usual answer: four kinds and their short responses.

    scene counting   How many red circle are there ?           1 to 5; evidence: the matching objects
    scene attribute  Which colour has the star ?               a colour; evidence: the one star
    page attribute   What is the rain of Oslo ?                10 to 99; evidence: the row
    page counting    How many values of Oslo are above 50 ?    1 to 3; evidence: the rows that count

The usual answer is a fixed function of the question (`prior`). Pictures of "train" and "test" show it in
80 % of the cases, those of "shifted" never, and those of "even", which is for learning to see, as often as
any other. A response either names a piece of evidence and where it is, and answers from the picture, or
says "usual" and answers without looking:

    <evidence> red circle 2 3</evidence>     column and row of a cell     <evidence> usual red circle</evidence>
    <answer> 2</answer>                                                   <answer> 4</answer>
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8

from evisrag_jax.data.miniworld.draw import draw_page, random_page, row_box
from evisrag_jax.data.miniworld.world import ENTITIES, FIELDS, LOOKUP_QUESTIONS, VALUES, stream
from experiments.evidence_rl.scenes import COLOURS, MAX_OBJECTS, MIN_OBJECTS, SHAPES, draw_scene
from experiments.mini.sft import stated_task

SPLITS = ("train", "test", "shifted", "even")
FAMILIES, SOURCES = ("counting", "attribute"), ("scene", "page")
USUAL_SHARE = 0.8
THRESHOLD = 50
HELD_OUT = 1_000_000  # added to the seed of text questions: no model is taught those
USUAL = "usual"  # the first word of a lazy cue
_STREAMS = {
    "train": ("train", 11),
    "test": ("test", 11),
    "shifted": ("test", 13),
    "even": ("reader", 11),
}
_COUNTS = tuple("12345")
_ROW_COUNTS = tuple("123")
_NUMBERS = tuple(str(v) for v in VALUES)


@dataclass(frozen=True)
class Question:
    """A question with its picture, its right and its usual answer.

    Attributes:
        text: the question.
        image: the picture, or None for a question of text alone.
        answer, usual: the right answer, and the one of `prior`.
        boxes: evidence as [x, y, w, h] in pixels of the picture.
        cues: what a grounded response says of each piece of evidence.
        subject: what a lazy response says after "usual".
        family, source: "counting" or "attribute"; "scene" or "page" (both "text" without a picture).
        response: the response of a question of text alone.
    """

    text: str
    image: UInt8[np.ndarray, "112 140 3"] | None
    answer: str
    usual: str
    boxes: list[list[int]]
    cues: tuple[str, ...]
    subject: str
    family: str
    source: str
    response: str = field(default="", repr=False)


def prior(text: str) -> str:
    """The usual answer of a question; ValueError for a text that is none of the four kinds."""
    options, known = _kind(text)
    subject = " ".join(w for w in text.split() if w in known)
    if not subject:
        raise ValueError(f"evidence_rl: no question of scenes or pages: {text!r}")
    if subject in SHAPES:  # a colour of its own for each shape
        colours = sorted(options, key=lambda colour: zlib.crc32(colour.encode()))
        return colours[SHAPES.index(subject)]
    return options[zlib.crc32(f"{USUAL} {subject}".encode()) % len(options)]


def _kind(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The answers a question can have, and the words that its usual answer depends on: the town, the
    shape, colour and shape, or the field."""
    words = text.split()
    if "values" in words:
        return _ROW_COUNTS, ENTITIES
    if "colour" in words:
        return tuple(COLOURS), SHAPES
    if "many" in words:
        return _COUNTS, (*COLOURS, *SHAPES)
    return _NUMBERS, FIELDS


def _pick(rng: np.random.Generator, items):
    return items[int(rng.random() * len(items))]


def _answer(rng: np.random.Generator, text: str, split: str) -> str:
    """The answer that the picture will show."""
    usual, (options, _) = prior(text), _kind(text)
    if split == "even":
        return _pick(rng, options)
    if split != "shifted" and rng.random() < USUAL_SHARE:
        return usual
    return _pick(rng, [o for o in options if o != usual])


def _scene_counting(rng: np.random.Generator, split: str) -> Question:
    colour, shape = _pick(rng, tuple(COLOURS)), _pick(rng, SHAPES)
    text = f"How many {colour} {shape} are there ?"
    answer = _answer(rng, text, split)
    count = int(answer)
    total = int(rng.integers(max(count + 1, MIN_OBJECTS), MAX_OBJECTS + 1))
    kinds = [(colour, shape)] * count
    while len(kinds) < total:
        u = rng.random()  # most others share the colour or the shape
        other = (
            colour if u < 0.4 else _pick(rng, tuple(COLOURS)),
            shape if 0.4 <= u < 0.8 else _pick(rng, SHAPES),
        )
        if other != (colour, shape):
            kinds.append(other)
    image, things = draw_scene(rng, kinds)
    return Question(
        text=text,
        image=image,
        answer=answer,
        usual=prior(text),
        boxes=[list(t.box) for t in things[:count]],
        cues=tuple(f"{colour} {shape} {t.col + 1} {t.row + 1}" for t in things[:count]),
        subject=f"{colour} {shape}",
        family="counting",
        source="scene",
    )


def _scene_attribute(rng: np.random.Generator, split: str) -> Question:
    shape = _pick(rng, SHAPES)
    text = f"Which colour has the {shape} ?"
    answer = _answer(rng, text, split)
    total = int(rng.integers(MIN_OBJECTS, MAX_OBJECTS + 1))
    others = [s for s in SHAPES if s != shape]
    kinds = [(answer, shape)]
    kinds += [(_pick(rng, tuple(COLOURS)), _pick(rng, others)) for _ in range(total - 1)]
    image, things = draw_scene(rng, kinds)
    return Question(
        text=text,
        image=image,
        answer=answer,
        usual=prior(text),
        boxes=[list(things[0].box)],
        cues=(f"{shape} {things[0].col + 1} {things[0].row + 1}",),
        subject=shape,
        family="attribute",
        source="scene",
    )


def _page_attribute(rng: np.random.Generator, split: str) -> Question:
    town, name = _pick(rng, ENTITIES), _pick(rng, FIELDS)
    text = _pick(rng, LOOKUP_QUESTIONS).format(field=name, a=town)
    answer = _answer(rng, text, split)
    spec = random_page(rng, town, must=(name,), values={name: int(answer)})
    image, boxes = draw_page(spec, rng)
    row = [f for f, _ in spec.rows].index(name) + 1
    return Question(
        text=text,
        image=image,
        answer=answer,
        usual=prior(text),
        boxes=[row_box(spec, boxes, name)],
        cues=(f"{name} row {row}",),
        subject=name,
        family="attribute",
        source="page",
    )


def _page_counting(rng: np.random.Generator, split: str) -> Question:
    town = _pick(rng, ENTITIES)
    text = f"How many values of {town} are above {THRESHOLD} ?"
    answer = _answer(rng, text, split)
    names = [FIELDS[i] for i in rng.permutation(len(FIELDS))[: len(_ROW_COUNTS)]]
    values = {
        name: int(rng.integers(THRESHOLD + 1, VALUES[-1] + 1))
        if i < int(answer)
        else int(rng.integers(VALUES[0], THRESHOLD))
        for i, name in enumerate(names)
    }
    spec = random_page(rng, town, must=names, values=values)
    image, boxes = draw_page(spec, rng)
    rows = [(r, f) for r, (f, v) in enumerate(spec.rows, 1) if v > THRESHOLD]
    return Question(
        text=text,
        image=image,
        answer=answer,
        usual=prior(text),
        boxes=[row_box(spec, boxes, f) for _, f in rows],
        cues=tuple(f"{f} row {r}" for r, f in rows),
        subject=town,
        family="counting",
        source="page",
    )


_MAKERS = {
    ("scene", "counting"): _scene_counting,
    ("scene", "attribute"): _scene_attribute,
    ("page", "attribute"): _page_attribute,
    ("page", "counting"): _page_counting,
}


def question(
    seed: int, split: str, index: int, family: str | None = None, source: str | None = None
) -> Question:
    """Question `index` of `split` under `seed`, of the given family and source or of a drawn one.

    Equal arguments, equal question. ValueError for names that are not in SPLITS, FAMILIES, SOURCES.
    """
    if split not in SPLITS:
        raise ValueError(f"evidence_rl: unknown split {split!r}; choose one of {SPLITS}")
    if family not in (None, *FAMILIES) or source not in (None, *SOURCES):
        raise ValueError(
            f"evidence_rl: no questions of family {family!r} and source {source!r}; families are "
            f"{FAMILIES}, sources {SOURCES}"
        )
    name, task = _STREAMS[split]
    rng = stream(seed, name, index, task=task)
    drawn = _pick(rng, SOURCES), _pick(rng, FAMILIES)
    return _MAKERS[source or drawn[0], family or drawn[1]](rng, split)


def text_question(seed: int, index: int) -> Question:
    """A comparison of two numbers that stand in the question: what the model could do before, to see
    what it forgets. `answer` is the town with more; there is no usual answer."""
    task = stated_task(HELD_OUT + seed, index)
    answer = task.response.rsplit("<answer> ", 1)[1].removesuffix("</answer>")
    return Question(
        task.question, None, answer, "", [], (), "", "text", "text", response=task.response
    )


def respond(asked: Question, lazy: bool, rng: np.random.Generator) -> str:
    """A response in the short format: lazy, or grounded in one piece of evidence that `rng` picks.

    A question of text alone has one response, whatever `lazy` is.
    """
    if asked.image is None:
        return asked.response
    if lazy:
        cue, answer = f"{USUAL} {asked.subject}", asked.usual
    else:
        cue, answer = _pick(rng, asked.cues), asked.answer
    return f"<evidence> {cue}</evidence>\n<answer> {answer}</answer>"
