"""Per-skill accuracy of a mini model, teacher-forced: what a loss curve hides."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from evisrag_jax.data.miniworld.episodes import episode
from evisrag_jax.data.miniworld.world import ENTITIES, FIELDS, NOT_RELEVANT
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.training.forward import GroupBatch


@functools.partial(jax.jit, static_argnums=1)
def greedy_tokens(params, config, batch):
    """The greedy token at every response position, [P, T], given the true tokens before it."""
    from experiments.mini.sft import group_batch

    groups: GroupBatch = group_batch(batch)
    features = None if groups.images is None else model.encode_images(params, config, groups.images)
    hidden, prefix = model.prefill(params, config, groups.prompt, features)
    first = model.last_hidden(hidden, groups.prompt.lengths)[:, None, None]
    tokens = groups.tokens[:, :, :-1]
    positions = groups.prompt.next_position[:, None, None] + jnp.arange(tokens.shape[-1])
    positions = jnp.broadcast_to(positions, tokens.shape)
    later = model.extend(params, config, tokens, positions, groups.prompt.lengths, prefix)
    states = jnp.concatenate([first, later], axis=2)
    return jnp.argmax(model.logits(params, config, states), -1)[:, 0]


def skill_table(
    params, config, layout, *, batches: int = 6, split: str = "dev"
) -> dict[str, float]:
    """Shares of right tokens by skill on episodes of `split`.

    format: tags and markers; titles, fields: names in <observe>; yes, no: its marks of relevant and other
    pages; page, no_page: the first word of their evidence lines; value: numbers in evidence;
    answer_KIND: all tokens of <answer>.
    """
    from experiments.mini.sft import PROMPTS, make_batch

    scores: dict[str, list[float]] = {}
    tok = layout.tok
    is_tag = np.array([not t.startswith("▁") for t in tok.convert_ids_to_tokens(range(len(tok)))])
    is_value = np.array([t[1:].isdigit() for t in tok.convert_ids_to_tokens(range(len(tok)))])
    is_town = np.array([t[1:] in ENTITIES for t in tok.convert_ids_to_tokens(range(len(tok)))])
    is_field = np.array([t[1:] in FIELDS for t in tok.convert_ids_to_tokens(range(len(tok)))])
    names = {t: i for i, t in enumerate(tok.convert_ids_to_tokens(range(len(tok))))}
    no_info = tok.encode(NOT_RELEVANT, add_special_tokens=False)[0]
    for b in range(batches):
        episodes = [episode(7, split, b * PROMPTS + i) for i in range(PROMPTS)]
        batch = make_batch(layout, episodes)
        chosen = np.asarray(greedy_tokens(params, config, batch))
        for row, ids, n, e in zip(
            chosen, batch["response"][:, 0], batch["response_lengths"][:, 0], episodes, strict=True
        ):
            ids, right = ids[:n], row[:n] == ids[:n]
            section = {t: int(np.flatnonzero(ids == names[t])[0]) for t in TAGS}
            inside = np.arange(n)

            def add(name, where, right=right):
                if where.any():
                    scores.setdefault(name, []).append(float(right[where].mean()))

            evidence = (inside > section["<evidence>"]) & (inside < section["</evidence>"])
            answer = (inside > section["<answer>"]) & (inside < section["</answer>"])
            observe = (inside > section["<observe>"]) & (inside < section["</observe>"])
            add("format", is_tag[ids])
            add("titles", observe & is_town[ids])
            add("fields", observe & is_field[ids])
            add("yes", observe & (ids == names["▁yes"]))
            add("no", observe & (ids == names["▁no"]))
            starts = np.zeros(n, bool)
            starts[1:] = evidence[1:] & np.char.startswith(
                np.array(tok.convert_ids_to_tokens(ids[:-1].tolist())), "["
            )
            add("page", starts & (ids != no_info))
            add("no_page", starts & (ids == no_info))
            add("value", evidence & is_value[ids])
            scores.setdefault(f"answer_{e.kind}", []).append(float(right[answer].all()))
            scores.setdefault("answer", []).append(float(right[answer].all()))
    return {name: float(np.mean(values)) for name, values in sorted(scores.items())}


TAGS = ("<observe>", "</observe>", "<evidence>", "</evidence>", "<answer>", "</answer>")
