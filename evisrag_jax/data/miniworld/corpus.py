"""A mini-world corpus: documents of drawn pages, raw questions, and what a noisy search ranks for each.

    document "Oslo"     page 0: rain 23, tax 71, oil 40      page 1: fish 55, tea 12, coal 90

Towns lie in regions of four, and comparisons stay inside one, so that questions hang together by region at
most. The layout is that of `data.corpus` with two fields more: `retrieved` and `retrieved_scores`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from evisrag_jax.data.miniworld import world
from evisrag_jax.data.miniworld.draw import PageSpec, draw_page, random_page
from evisrag_jax.data.miniworld.episodes import COMPARE_GAP

REGION = 4  # towns that comparisons may span
ROWS = 3  # fields a page
SHARES: Mapping[str, float] = {"lookup": 0.5, "compare": 0.3, "absent_field": 0.2}
TITLE, FIELD = 1.0, 0.6  # what a search sees in a page that shows an asked town, or the asked field


@dataclass(frozen=True)
class CorpusQuestion:
    """A question about one or two towns. `answer` is INSUFFICIENT where no page shows the field."""

    kind: str
    towns: tuple[str, ...]
    field: str
    answer: str


def town_pages(seed: int, split: str, pages: int) -> dict[str, tuple[PageSpec, ...]]:
    """Pages of every known town; no field stands on two of a town's pages. ValueError if they are too many."""
    if not 1 <= pages <= len(world.FIELDS) // ROWS:
        limit = len(world.FIELDS) // ROWS
        raise ValueError(f"miniworld: a town has 1 to {limit} pages, not {pages}")
    documents = {}
    for index, town in enumerate(world.KNOWN_ENTITIES):
        rng = world.stream(seed, split, index, task=3)
        fields = [world.FIELDS[i] for i in rng.permutation(len(world.FIELDS))]
        documents[town] = tuple(
            random_page(rng, town, must=fields[ROWS * page : ROWS * (page + 1)])
            for page in range(pages)
        )
    return documents


def corpus_questions(
    documents: Mapping[str, Sequence[PageSpec]], split: str
) -> dict[str, list[CorpusQuestion]]:
    """All questions of each kind that `split` may ask about these pages."""
    shown = {
        town: {field: value for page in pages for field, value in page.rows}
        for town, pages in documents.items()
    }

    def may_ask(field: str, *towns: str) -> bool:
        return all(world.pair_split(town, field) == split for town in towns)

    found: dict[str, list[CorpusQuestion]] = {kind: [] for kind in SHARES}
    towns = list(documents)
    for place, town in enumerate(towns):
        for field in world.FIELDS:
            value = shown[town].get(field)
            if not may_ask(field, town):
                continue
            if value is None:
                missing = CorpusQuestion("absent_field", (town,), field, world.INSUFFICIENT)
                found["absent_field"].append(missing)
                continue
            found["lookup"].append(CorpusQuestion("lookup", (town,), field, str(value)))
            region = place - place % REGION
            for other in towns[region : region + REGION]:
                against = shown[other].get(field)
                if other == town or against is None or not may_ask(field, other):
                    continue
                if abs(value - against) >= COMPARE_GAP:
                    more = town if value > against else other
                    found["compare"].append(CorpusQuestion("compare", (town, other), field, more))
    return found


def write_corpus(
    folder: str | Path,
    questions: int,
    split: str = "train",
    seed: int = 0,
    *,
    pages: int = 2,
    ranked: int = 10,
    noise: float = 0.35,
) -> Path:
    """Writes corpus.jsonl, pages/ and questions.jsonl into `folder` and returns it.

    Args:
        questions: how many, in the shares of SHARES; each is asked once.
        split, seed: as for episodes. Questions are about pairs of the split, pages show any.
        pages: pages a town.
        ranked: pages a ranked list.
        noise: standard deviation of a page's score, beside TITLE and FIELD; 0 ranks perfectly.

    Equal arguments write equal bytes.

    Raises:
        ValueError: the pages hold fewer questions of a kind than are wanted.
    """
    folder = Path(folder)
    (folder / "pages").mkdir(parents=True, exist_ok=True)
    documents = town_pages(seed, split, pages)
    rng = world.stream(seed, split, 0, task=4)
    ids = _write_pages(folder, documents, rng)
    chosen = _choose(corpus_questions(documents, split), questions, rng)
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as out:
        for index, asked in enumerate(chosen):
            row = _question_row(f"{split}-{seed}-{index:06d}", asked, ids, rng, ranked, noise)
            out.write(json.dumps(row) + "\n")
    return folder


def _write_pages(folder: Path, documents, rng) -> dict[str, PageSpec]:
    ids: dict[str, PageSpec] = {}
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as out:
        for town, pages in documents.items():
            for number, page in enumerate(pages):
                id = f"{town}-p{number}"
                file = f"pages/{id}.png"
                pixels, _ = draw_page(page, rng)
                Image.fromarray(pixels).save(folder / file, compress_level=1)
                text = " ".join([town, *(f"{field} {value}" for field, value in page.rows)])
                row = {"page_id": id, "file": file, "doc_id": town, "text": text}
                out.write(json.dumps(row) + "\n")
                ids[id] = page
    return ids


def _choose(found, questions: int, rng) -> list[CorpusQuestion]:
    chosen: list[CorpusQuestion] = []
    for kind, share in SHARES.items():
        wanted = round(share * questions)
        if kind == list(SHARES)[-1]:
            wanted = questions - len(chosen)
        if wanted > len(found[kind]):
            raise ValueError(
                f"miniworld: these pages hold {len(found[kind])} questions of kind {kind}, "
                f"{wanted} of {questions} are wanted; give towns more pages"
            )
        order = rng.permutation(len(found[kind]))
        chosen += [found[kind][i] for i in order[:wanted]]
    return [chosen[i] for i in rng.permutation(len(chosen))]


def _question_row(
    id: str, asked: CorpusQuestion, pages: Mapping[str, PageSpec], rng, ranked: int, noise: float
) -> dict:
    def shows(page: PageSpec) -> bool:
        return page.value(asked.field) is not None

    names = list(pages)
    scores = np.array(
        [
            TITLE * (page.title in asked.towns) + FIELD * shows(page)
            for page in (pages[name] for name in names)
        ]
    )
    scores = scores + noise * rng.standard_normal(len(names))
    order = np.argsort(-scores, kind="stable")[:ranked]
    relevant = [name for name in names if pages[name].title in asked.towns and shows(pages[name])]
    wordings = world.COMPARE_QUESTIONS if len(asked.towns) == 2 else world.LOOKUP_QUESTIONS
    wording = wordings[int(rng.random() * len(wordings))]
    retrieved = [names[i] for i in order]
    return {
        "id": id,
        "dataset": asked.kind,
        "question": wording.format(field=asked.field, a=asked.towns[0], b=asked.towns[-1]),
        "answers": [asked.answer],
        "answerable": asked.kind != "absent_field",
        "relevant_page_ids": relevant,
        "candidate_page_ids": retrieved,
        "retrieved": retrieved,
        "retrieved_scores": [round(float(scores[i]), 4) for i in order],
        "doc_ids": list(asked.towns),
    }
