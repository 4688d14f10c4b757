"""What a model of the experiment can do, by kind of question: free responses, greedy and sampled.

python -m experiments.evidence_rl.skills MODEL FILE
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from evisrag_jax.data.miniworld.draw import HEIGHT, WIDTH
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.prompts.tokenizer import load_tokenizer
from experiments.evidence_rl.questions import (
    FAMILIES,
    SOURCES,
    USUAL,
    Question,
    question,
    text_question,
)
from experiments.evidence_rl.sft import LENGTH, RESPONSE
from experiments.mini.sft import DERIVATION_LENGTH, Layout, group_batch, lay_out
from experiments.mini.sft import RESPONSE as TEXT_RESPONSE

SPLITS = ("test", "shifted")
NO_PICTURE = np.zeros((0, HEIGHT, WIDTH, 3), np.uint8)
QUESTIONS, BATCH, SAMPLES, SEED = 256, 64, 4, 90_000
_FORM = re.compile(r"<evidence> (.+)</evidence>\n<answer> (.+)</answer>")


@functools.partial(jax.jit, static_argnames=("config", "samples", "room", "greedy"))
def generate(
    params, config, batch, key: Key[Array, ""], *, samples: int, room: int, greedy: bool
) -> Int[Array, "P G T"]:
    """`samples` responses of `room` tokens a prompt at temperature 1, or the likeliest one. What
    follows the end token is to be cut."""
    groups = group_batch(batch)
    features = None if groups.images is None else model.encode_images(params, config, groups.images)
    hidden, prefix = model.prefill(params, config, groups.prompt, features)
    first = model.last_hidden(hidden, groups.prompt.lengths)[:, None, None]
    P = first.shape[0]
    positions = groups.prompt.next_position[:, None, None] + jnp.arange(room)
    positions = jnp.broadcast_to(positions, (P, samples, room))

    def choose(state, t):
        scores = model.logits(params, config, state)
        if greedy:
            return jnp.argmax(scores, -1)
        return jax.random.categorical(jax.random.fold_in(key, t), scores)

    def step(t, tokens):
        states = model.extend(params, config, tokens, positions, groups.prompt.lengths, prefix)
        return tokens.at[:, :, t].set(choose(states[:, :, t - 1], t))

    tokens = jnp.zeros((P, samples, room), jnp.int32)
    start = jnp.broadcast_to(first[:, :, 0], (P, samples, first.shape[-1]))
    tokens = tokens.at[:, :, 0].set(choose(start, 0))
    return jax.lax.fori_loop(1, room, step, tokens)


def responses(
    params, config, layout: Layout, asked: Sequence[Question], *, greedy: bool, seed: int = 0
) -> list[list[str]]:
    """Free responses to questions, all with pictures or all without: one greedy or SAMPLES each."""
    pictured = asked[0].image is not None
    room = RESPONSE if pictured else TEXT_RESPONSE
    texts = []
    for at in range(0, len(asked), BATCH):
        part = asked[at : at + BATCH]
        rows = [(q.text, q.image[None] if pictured else NO_PICTURE, "") for q in part]
        batch = lay_out(layout, rows, int(pictured), LENGTH if pictured else DERIVATION_LENGTH)
        key = jax.random.fold_in(jax.random.key(seed), at)
        n = 1 if greedy else SAMPLES
        tokens = generate(params, config, batch, key, samples=n, room=room, greedy=greedy)
        texts += [[_text(layout, ids) for ids in row] for row in np.asarray(tokens)]
    return texts


def _text(layout: Layout, ids: np.ndarray) -> str:
    ids = ids.tolist()
    end = layout.special.im_end
    return layout.tok.decode(ids[: ids.index(end)] if end in ids else ids)


def scores(asked: Sequence[Question], texts: Sequence[Sequence[str]]) -> dict[str, float]:
    """Shares over all responses: `accuracy`, `format`, `lazy`, `usual` (the usual answer is given),
    `cue` (a grounded cue names evidence), and accuracy where grounded and where lazy."""
    found = defaultdict(list)
    for q, row in zip(asked, texts, strict=True):
        for text in row:
            match = _FORM.fullmatch(text.strip())
            found["format"].append(match is not None)
            cue, answer = match.groups() if match else ("", "")
            right, lazy = answer == q.answer, cue.split()[:1] == [USUAL]
            found["accuracy"].append(right)
            found["lazy"].append(lazy)
            found["usual"].append(answer == q.usual)
            if match:
                found["accuracy_lazy" if lazy else "accuracy_grounded"].append(right)
                if not lazy:
                    found["cue"].append(cue in q.cues)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def skill_rows(params, config, layout: Layout) -> list[dict]:
    """A row for each split, kind of question and way of decoding; at last questions of text alone."""
    rows = []
    for split in SPLITS:
        for source in SOURCES:
            for family in FAMILIES:
                asked = [question(SEED, split, i, family, source) for i in range(QUESTIONS)]
                for greedy in (True, False):
                    texts = responses(params, config, layout, asked, greedy=greedy)
                    row = {"split": split, "source": source, "family": family}
                    row["decoding"] = "greedy" if greedy else "sampled"
                    rows.append(row | scores(asked, texts))
    asked = [text_question(SEED, i) for i in range(QUESTIONS)]
    for greedy in (True, False):
        texts = responses(params, config, layout, asked, greedy=greedy)
        right = [
            f"<answer> {q.answer}</answer>" in t
            for q, row in zip(asked, texts, strict=True)
            for t in row
        ]
        row = {"split": "test", "source": "text", "family": "text"}
        row["decoding"] = "greedy" if greedy else "sampled"
        rows.append(row | {"accuracy": float(np.mean(right))})
    return rows


def write_skills(folder: Path, path: Path) -> None:
    """Measures the model in `folder`: a JSON line a row to `path`, and printed."""
    params, config = load_params(folder, jnp.float32)
    rows = skill_rows(params, config, Layout(load_tokenizer(folder)))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    print(text, end="")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.evidence_rl.skills")
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("out", type=Path, help="JSONL file of the rows")
    args = parser.parse_args()
    write_skills(args.model, args.out)


if __name__ == "__main__":
    main()
