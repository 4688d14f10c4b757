"""Natural-style scenes: 140 x 112 px, shaded shapes on a textured ground, one a cell of 28 px.

The ground is a gradient with low-frequency noise of one random hue, pale or dim, so that the saturated
objects stand out. Objects come from cached masks; a scene costs some tenths of a millisecond.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image, ImageDraw

from evisrag_jax.data.miniworld.draw import CELL, COLS, HEIGHT, ROWS, WIDTH

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (205, 38, 38),
    "orange": (240, 135, 20),
    "yellow": (238, 222, 40),
    "green": (40, 150, 55),
    "blue": (40, 80, 210),
    "purple": (150, 50, 175),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
SIZES = range(18, 27)  # side of an object's square in px, drawn without turning
TURNS = (-15, -8, 0, 8, 15)  # degrees
OVERHANG = 2  # px an object may stand over the edge of its cell
MIN_OBJECTS, MAX_OBJECTS = 3, 8
_FINE = 4  # masks are drawn this many times larger


@dataclass(frozen=True, slots=True)
class Thing:
    """An object of a scene: `col` and `row` of its cell from 0, `box` its pixels as [x, y, w, h].

    `tint` moves its colour by up to 14 grey levels a channel; `size` and `turn` index the mask.
    """

    colour: str
    shape: str
    col: int
    row: int
    box: tuple[int, int, int, int]
    size: int
    turn: int
    tint: tuple[int, int, int] = (0, 0, 0)


@functools.cache
def mask(shape: str, size: int, turn: int) -> tuple[Float32[np.ndarray, "h w 1"], ...]:
    """Alpha in [0, 1] of an object, cropped to what is drawn, and the factor of its shading (light from
    the upper left, a dark rim)."""
    fine, mid = size * _FINE, size * _FINE / 2
    canvas = Image.new("L", (2 * fine, 2 * fine))
    pen, edge = ImageDraw.Draw(canvas), fine / 2
    far = edge + fine
    if shape == "circle":
        pen.ellipse((edge, edge, far, far), fill=255)
    elif shape == "ring":
        pen.ellipse((edge, edge, far, far), fill=255)
        hole = 0.27 * fine
        pen.ellipse((edge + hole, edge + hole, far - hole, far - hole), fill=0)
    elif shape == "square":
        trim = 0.08 * fine
        pen.rectangle((edge + trim, edge + trim, far - trim, far - trim), fill=255)
    elif shape == "triangle":
        pen.polygon([(fine, edge), (far, far - 0.08 * fine), (edge, far - 0.08 * fine)], fill=255)
    elif shape == "cross":
        arm = 0.17 * fine
        pen.rectangle((fine - arm, edge, fine + arm, far), fill=255)
        pen.rectangle((edge, fine - arm, far, fine + arm), fill=255)
    elif shape == "star":
        reach = [(mid if i % 2 == 0 else 0.42 * mid, np.pi * (i / 5 - 0.5)) for i in range(10)]
        pen.polygon([(fine + r * np.cos(a), fine + r * np.sin(a)) for r, a in reach], fill=255)
    else:
        raise ValueError(f"scene: unknown shape {shape!r}; choose one of {SHAPES}")
    small = canvas.rotate(turn, Image.Resampling.BILINEAR).resize(
        (2 * size, 2 * size), Image.Resampling.BOX
    )
    left, top, right, bottom = small.getbbox() or (0, 0, 0, 0)
    if max(right - left, bottom - top) > CELL:
        raise ValueError(f"scene: a {shape} of {size} px turned by {turn} does not fit a cell")
    alpha = np.asarray(small, np.float32)[top:bottom, left:right, None] / 255
    ramp = np.add.outer(np.linspace(1, -1, bottom - top), np.linspace(1, -1, right - left))
    shade = (1 + 0.11 * ramp[..., None]).astype(np.float32) * (0.75 + 0.25 * alpha)
    alpha.setflags(write=False)
    shade.setflags(write=False)
    return alpha, shade


@functools.cache
def _stretch(knots: int, length: int) -> Float32[np.ndarray, "length knots"]:
    """Linear interpolation from `knots` values to `length`."""
    at = np.linspace(0, knots - 1, length)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(knots))).astype(np.float32)


def ground(rng: np.random.Generator) -> Float32[np.ndarray, "112 140 3"]:
    """A textured ground in grey levels."""
    hue, light = rng.random() * 2 * np.pi, rng.uniform(95, 215)
    tone = light + 26 * np.cos(hue - 2 * np.pi * np.arange(3) / 3)
    slope = rng.uniform(-1, 1, (2, 3)) * 16
    knots = rng.normal(0, 1, (5, 6, 1)) * 9 + rng.normal(0, 1, (5, 6, 3)) * 4
    knots += np.linspace(-1, 1, 5)[:, None, None] * slope[0]
    knots += np.linspace(-1, 1, 6)[None, :, None] * slope[1]
    image = (tone + knots).astype(np.float32)
    image = np.einsum("ya,abc->ybc", _stretch(5, HEIGHT), image)
    image = np.matmul(_stretch(6, WIDTH), image)
    grain = rng.integers(-5, 6, (HEIGHT // 2, WIDTH // 2, 1), dtype=np.int8)
    return image + grain.repeat(2, 0).repeat(2, 1)


def place(rng: np.random.Generator, kinds: Sequence[tuple[str, str]]) -> list[Thing]:
    """Objects of the given (colour, shape) kinds in cells of their own, with random size, turn, tint
    and place in the cell. ValueError where there are more kinds than cells."""
    if len(kinds) > COLS * ROWS:
        raise ValueError(f"scene: {len(kinds)} objects for {COLS * ROWS} cells")
    things = []
    for (colour, shape), cell in zip(kinds, rng.permutation(COLS * ROWS).tolist(), strict=False):
        row, col = divmod(cell, COLS)
        u = rng.random(4).tolist()
        size = SIZES[int(u[0] * len(SIZES))]
        turn = TURNS[int(u[1] * len(TURNS))]
        h, w = mask(shape, size, turn)[0].shape[:2]
        x = int(col * CELL - OVERHANG + u[2] * (CELL - w + 2 * OVERHANG + 1))
        y = int(row * CELL - OVERHANG + u[3] * (CELL - h + 2 * OVERHANG + 1))
        box = (min(max(x, 0), WIDTH - w), min(max(y, 0), HEIGHT - h), w, h)
        tint = tuple(int(t) for t in rng.integers(-14, 15, 3))
        things.append(Thing(colour, shape, col, row, box, size, turn, tint))
    return things


def paint(
    base: Float32[np.ndarray, "112 140 3"], things: Sequence[Thing]
) -> UInt8[np.ndarray, "112 140 3"]:
    """Pixels of a ground with objects on it; nothing outside their boxes is touched."""
    image = base.copy()
    for thing in things:
        alpha, shade = mask(thing.shape, thing.size, thing.turn)
        x, y, w, h = thing.box
        tone = np.array(COLOURS[thing.colour], np.float32) + np.array(thing.tint, np.float32)
        spot = image[y : y + h, x : x + w]
        spot += (tone * shade - spot) * alpha
    return np.clip(image + 0.5, 0, 255).astype(np.uint8)


def draw_scene(
    rng: np.random.Generator, kinds: Sequence[tuple[str, str]]
) -> tuple[UInt8[np.ndarray, "112 140 3"], list[Thing]]:
    """A scene with objects of the given kinds: pixels and objects."""
    things = place(rng, kinds)
    return paint(ground(rng), things), things


def random_kinds(rng: np.random.Generator) -> list[tuple[str, str]]:
    """(colour, shape) of 3 to 8 objects, drawn alike."""
    count = int(rng.integers(MIN_OBJECTS, MAX_OBJECTS + 1))
    colours, shapes = rng.integers(0, 6, (2, count)).tolist()
    names = tuple(COLOURS)
    return [(names[c], SHAPES[s]) for c, s in zip(colours, shapes, strict=True)]


def repeated_kinds(rng: np.random.Generator) -> list[tuple[str, str]]:
    """(colour, shape) of 1 to 8 objects of two or three colours and shapes, so that kinds recur and
    share both with others."""
    colours = rng.permutation(list(COLOURS))[: rng.integers(2, 4)].tolist()
    shapes = rng.permutation(SHAPES)[: rng.integers(2, 4)].tolist()
    kinds = [(c, s) for c in colours for s in shapes]
    share = rng.dirichlet(np.full(len(kinds), 0.5))
    return [kinds[i] for i in rng.choice(len(kinds), rng.integers(1, MAX_OBJECTS + 1), p=share)]
