"""Questions over drawn pages: look-ups, comparisons, and questions that the pages cannot answer.

`episode(seed, split, index)` is the deterministic entry; `make_episode` takes a generator. Reading
tasks ("read", "which") are short extra exercises for the early phase of supervised training.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, UInt8

from evisrag_jax.data.miniworld import world
from evisrag_jax.data.miniworld.draw import PageSpec, draw_page, page_words, random_page, row_box
from evisrag_jax.data.miniworld.world import FIELDS, INSUFFICIENT, NOT_RELEVANT, VALUES

KINDS = ("lookup", "compare", "absent_page", "absent_field")
SHARES: Mapping[str, float] = {
    "lookup": 0.45,
    "compare": 0.30,
    "absent_page": 0.10,
    "absent_field": 0.15,
}
NOVELTY_SHARES: Mapping[str, float] = {"pair": 0.5, "entity": 0.25, "rendering": 0.25}
READING_KINDS = ("read", "which")
COMPARE_GAP = 5  # compared values differ by at least this much
MAX_PAGES = 20


@dataclass(frozen=True)
class Episode:
    """A question with its pages and the response that answers it.

    `boxes` has a list a page of [x, y, w, h] (pixels), one for
    each row that is evidence; `evidence` has a text or None (nothing relevant) a page. `novelty`
    says what is new to a model trained on "train": "pair", "entity", "rendering", or "seen" for
    train itself.
    """

    question: str
    pages: tuple[PageSpec, ...]
    images: UInt8[np.ndarray, "I 112 140 3"]
    boxes: tuple[list[list[int]], ...]
    response: str
    answers: tuple[str, ...]
    evidence: tuple[str | None, ...]
    is_sufficient: bool
    kind: str
    entities: tuple[str, ...]
    field: str
    novelty: str


def _pick(rng: np.random.Generator, items):
    return items[int(rng.random() * len(items))]


def _weighted(rng: np.random.Generator, shares: Mapping[str, float]) -> str:
    names = list(shares)
    u = rng.random() * sum(shares.values())
    for name in names:
        u -= shares[name]
        if u < 0:
            return name
    return names[-1]


def _subject(rng, split: str, novelty: str, two: bool) -> tuple[list[str], str]:
    """Entities to ask for (one, or two in random order) and the field."""
    by_field = world.KNOWN_BY_FIELD[split if novelty == "pair" else "train"]
    field = _pick(rng, [f for f in FIELDS if by_field[f]])
    seen = world.KNOWN_BY_FIELD["train"][field]
    new = world.held_out_entities(split) if novelty == "entity" else by_field[field]
    first = _pick(rng, new)
    if not two:
        return [first], field
    second = _pick(rng, [e for e in _union(seen, new) if e != first])
    return ([first, second] if rng.random() < 0.5 else [second, first]), field


def _union(*groups: tuple[str, ...]) -> tuple[str, ...]:
    """Union of the groups in order of first appearance."""
    return tuple(dict.fromkeys(e for group in groups for e in group))


def observation(
    pages: Sequence[PageSpec], asked: Sequence[str], marks: Sequence[str], field: str = ""
) -> str:
    """The observe section: each page's title, of an asked entity's page also the fields it shows, down
    to the asked `field` if that is there, and whether the page answers ("yes" or "no")."""
    seen = []
    for i, (page, mark) in enumerate(zip(pages, marks, strict=True), 1):
        names = [name for name, _ in page.rows] if page.title in asked else []
        if field in names:
            names = names[: names.index(field) + 1]
        seen.append(" ".join([f"page {i} {page.title}", *names, mark]))
    return f"<observe> {' , '.join(seen)}</observe>"


def respond(
    pages: Sequence[PageSpec],
    asked: Sequence[str],
    field: str,
    *,
    unread: Container[int] = (),
    hasty: bool = False,
) -> tuple[str, list[str | None], str]:
    """The four sections that follow from reading the pages, the evidence in them, and the answer.

    Evidence is "ENTITY FIELD VALUE", or None, a page. If an asked entity has none the answer is
    INSUFFICIENT; of two, the one with more; of one, its value. A flawed reader passes over the pages
    whose index is in `unread`, and in `hasty` comparisons names the first entity whatever it has.
    """
    known = [page.title for i, page in enumerate(pages) if page.title in asked and i not in unread]
    evidence = [
        f"{page.title} {field} {page.value(field)}"
        if page.title in known and page.value(field) is not None
        else None
        for page in pages
    ]
    records = {e.split()[0]: e for e in evidence if e}
    missing = next((entity for entity in asked if entity not in records), None)
    if missing:
        think, answer = f"no page shows {field} of {missing}", INSUFFICIENT
    elif len(asked) == 2:
        more = max(asked, key=lambda entity: int(records[entity].split()[-1]))
        answer = asked[0] if hasty else more
        think = " , ".join([*records.values(), f"more is {answer}"])
    else:
        think = records[asked[0]]
        answer = think.split()[-1]
    lines = "".join(f"[{i}]: {e or NOT_RELEVANT}\n" for i, e in enumerate(evidence, 1))
    observed = observation(pages, known, ["yes" if e else "no" for e in evidence], field)
    response = (
        f"{observed}\n"
        f"<evidence>\n{lines}</evidence>\n<think> {think}</think>\n<answer> {answer}</answer>"
    )
    return response, evidence, answer


def _check(n_pages: int, kind: str | None, kinds: tuple[str, ...]) -> None:
    if not 1 <= n_pages <= MAX_PAGES:
        raise ValueError(f"miniworld: n_pages is {n_pages}; 1 to {MAX_PAGES} are possible")
    if kind is not None and kind not in kinds:
        raise ValueError(f"miniworld: unknown kind {kind!r}; choose one of {kinds}")


def make_episode(
    rng: np.random.Generator,
    split: str,
    kind: str | None = None,
    n_pages: int = 3,
    *,
    novelty: str | None = None,
    shares: Mapping[str, float] = SHARES,
) -> Episode:
    """One question of "train", "dev" or "test" with `n_pages` pages of distinct entities.

    `kind` and `novelty` fix what is else drawn by `shares` and NOVELTY_SHARES ("train" is always
    "seen"). With one page there are no comparisons. An evidence line belongs to every page that
    shows the asked field of an asked entity, also where the other half of a comparison is missing.
    Raises ValueError for impossible requests.
    """
    _check(n_pages, kind, KINDS)
    if split not in ("train", "dev", "test"):
        raise ValueError(f"miniworld: questions exist for train, dev and test, not for {split!r}")
    if split == "train":
        if novelty not in (None, "seen"):
            raise ValueError(f"miniworld: train has no questions of novelty {novelty!r}")
        novelty = "seen"
    elif novelty is None:
        novelty = _weighted(rng, NOVELTY_SHARES)
    elif novelty not in NOVELTY_SHARES:
        raise ValueError(
            f"miniworld: unknown novelty {novelty!r}; choose one of {tuple(NOVELTY_SHARES)}"
        )
    if kind is None:
        possible = {k: w for k, w in shares.items() if n_pages > 1 or k != "compare"}
        kind = _weighted(rng, possible)
    if kind == "compare" and n_pages < 2:
        raise ValueError("miniworld: a comparison needs at least two pages")

    two = kind == "compare" or (kind.startswith("absent") and n_pages > 1 and rng.random() < 0.4)
    asked, field = _subject(rng, split, novelty, two)

    # state of each asked entity: its row is shown, only its page is shown, or nothing is
    lack = {"absent_page": "nothing", "absent_field": "page"}.get(kind)
    states = dict.fromkeys(asked, "row")
    if lack:
        missing = _pick(rng, asked)
        states[missing] = lack
        if two and rng.random() < 0.5:
            states = dict.fromkeys(asked, lack)

    values = {e: _pick(rng, VALUES) for e in asked}
    if two:
        a, b = asked
        while abs(values[a] - values[b]) < COMPARE_GAP:
            values[b] = _pick(rng, VALUES)

    pages = []
    for entity, state in states.items():
        if state == "row":
            pages.append(random_page(rng, entity, must=(field,), values={field: values[entity]}))
        elif state == "page":
            pages.append(random_page(rng, entity, avoid=(field,)))
    others = world.KNOWN_ENTITIES + (world.held_out_entities(split) if novelty == "entity" else ())
    others = [e for e in others if e not in asked]
    while len(pages) < n_pages:
        entity = others.pop(int(rng.random() * len(others)))
        pages.append(random_page(rng, entity, must=(field,) if rng.random() < 0.7 else ()))
    pages = [pages[i] for i in rng.permutation(n_pages)]

    response, evidence, answer = respond(pages, asked, field)
    wording = _pick(rng, world.COMPARE_QUESTIONS if two else world.LOOKUP_QUESTIONS)
    question = wording.format(field=field, a=asked[0], b=asked[-1])
    drawn = [draw_page(p, rng) for p in pages]
    return Episode(
        question=question,
        pages=tuple(pages),
        images=np.stack([image for image, _ in drawn]),
        boxes=tuple(
            [row_box(p, b, field)] if e else []
            for p, e, (_, b) in zip(pages, evidence, drawn, strict=True)
        ),
        response=response,
        answers=(answer,),
        evidence=tuple(evidence),
        is_sufficient=lack is None,
        kind=kind,
        entities=tuple(asked),
        field=field,
        novelty=novelty,
    )


def make_reading_task(
    rng: np.random.Generator, split: str, n_pages: int = 3, *, kind: str | None = None
) -> Episode:
    """A reading exercise: "read" (page k aloud) or "which" (the observe section for the page of an
    entity).

    Pages that "train" reads aloud hold only rows whose pair train may ask for. A quarter of "which"
    has no such page (answer `no page`). `field` is empty. Raises ValueError for an unknown split or
    kind.
    """
    _check(n_pages, kind, READING_KINDS)
    visible = list(world.visible_entities(split))
    kind = kind or _pick(rng, READING_KINDS)
    target = int(rng.random() * n_pages)
    titles = [visible.pop(int(rng.random() * len(visible))) for _ in range(n_pages)]
    limited = split == "train" and kind == "read"
    pages = [
        random_page(rng, t, fields=world.TRAIN_FIELDS[t] if limited and i == target else FIELDS)
        for i, t in enumerate(titles)
    ]
    drawn = [draw_page(p, rng) for p in pages]
    boxes: list[list[list[int]]] = [[] for _ in pages]
    title, shown = titles[target], True
    if kind == "read":
        question = _pick(rng, world.READ_QUESTIONS).format(page=target + 1)
        answer = " ".join(word for _, _, word in page_words(pages[target]))
        response = f" {answer}"
        boxes[target] = [row_box(pages[target], drawn[target][1], f) for f, _ in pages[target].rows]
    else:
        shown = rng.random() >= 0.25
        if not shown:
            title = _pick(rng, visible)
        question = _pick(rng, world.WHICH_QUESTIONS).format(a=title)
        answer = f"page {target + 1}" if shown else "no page"
        marks = ["yes" if t == title else "no" for t in titles]
        response = observation(pages, [title], marks)
        if shown:
            boxes[target] = [drawn[target][1][0, pages[target].title_col].tolist()]
    return Episode(
        question=question,
        pages=tuple(pages),
        images=np.stack([image for image, _ in drawn]),
        boxes=tuple(boxes),
        response=response,
        answers=(answer,),
        evidence=(None,) * n_pages,
        is_sufficient=shown,
        kind=kind,
        entities=(title,),
        field="",
        novelty="seen" if split == "train" else "rendering",
    )


def episode(seed: int, split: str, index: int, **options) -> Episode:
    """Question `index` of `split` under `seed`; `options` go to make_episode. Equal arguments,
    equal episode.
    """
    return make_episode(world.stream(seed, split, index), split, **options)


def reading_task(seed: int, split: str, index: int, **options) -> Episode:
    """Reading exercise `index` of `split` under `seed`; `options` go to make_reading_task."""
    return make_reading_task(world.stream(seed, split, index, task=1), split, **options)


def single_page(
    seed: int, split: str, index: int
) -> tuple[PageSpec, UInt8[np.ndarray, "112 140 3"], Int32[np.ndarray, "4 5 4"]]:
    """One random page of `split` ("reader" shows every word): its spec, pixels and ink boxes as
    draw_page gives them.
    """
    rng = world.stream(seed, split, index, task=2)
    spec = random_page(rng, _pick(rng, world.visible_entities(split)))
    return (spec, *draw_page(spec, rng))
