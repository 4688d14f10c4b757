"""StepGRPO as R1-Router has it: every reasoning step is a prompt of its own, with a group and a reward.

    record ─► question                          <observe>..</observe> <evidence>..</evidence>│ paid perception
          └─► question, evidence of the first   <think>..</think> <answer>..</answer>        │ paid derivation

The first step's responses are cut behind their evidence; the second one's prompt ends with evidence, the
gold one or that of a response of the first group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from evisrag_jax.data.schema import Record
from evisrag_jax.prompts.chat import extend_prompt
from evisrag_jax.prompts.sections import NO_EVIDENCE, find_section
from evisrag_jax.prompts.spans import char_to_token
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.training.batching import Prepared

STEPS = ("perception", "derivation")
CLOSE = "</evidence>"


def cut_at_evidence(done: Completion) -> Completion:
    """The response up to the token that closes its evidence; unchanged where nothing closes it."""
    section = find_section(done.text, "evidence")
    if section is None or not section.closed or done.finish == "error":
        return done
    count = char_to_token(done.offsets, section.end - 1) + 1
    if count >= done.length:
        return done
    return dataclasses.replace(
        done,
        ids=done.ids[:count],
        logp=done.logp[:count],
        text=done.text[: int(done.offsets[count - 1, 1])],
        offsets=done.offsets[:count],
        finish="stop",
        length=count,
    )


def gold_prefix(record: Record) -> str:
    """The response that a record teaches up to its evidence, or its gold evidence alone."""
    if record.response and CLOSE in record.response:
        return record.response.split(CLOSE)[0] + CLOSE
    lines = "".join(f"[{i}]: {one or NO_EVIDENCE}\n" for i, one in enumerate(record.evidence, 1))
    return f"<evidence>\n{lines}{CLOSE}"


def behind_evidence(
    item: Prepared,
    encode: Callable[[str], Sequence[int]],
    first: Sequence[Completion] = (),
) -> Prepared:
    """The second step's prompt. first: cut responses of the first step; the earliest one with evidence is
    taken, the gold evidence where there is none."""
    for done in first:
        if CLOSE in done.text and done.finish != "error":
            ids = done.ids
            break
    else:
        ids = np.asarray(encode(gold_prefix(item.record)), np.int32)
    return dataclasses.replace(item, prompt=extend_prompt(item.prompt, ids))


def only(rewards: dict[str, float], step: str) -> dict[str, float]:
    """The rewards of a step: its own channel, zeros elsewhere."""
    return {name: value if name == step else 0.0 for name, value in rewards.items()}
