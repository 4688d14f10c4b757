"""Groups that dynamic sampling keeps for the next step, as plain JSON in a checkpoint.

    {"position": 412, "completions": [{"ids": [..], "logp": "<base64 float32>", "finish": "stop"}, ..]}

What follows from the ids (text, rewards, scopes) is computed again when they are read back.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from evisrag_jax.prompts.tokenizer import decode_with_offsets
from evisrag_jax.rl.told import Judged
from evisrag_jax.rollout.requests import DEGENERATE_RUN, Completion, longest_run


def to_json(groups: Sequence[Judged]) -> list[dict[str, Any]]:
    """The groups' places in the stream, ids and log-probs."""
    return [
        {
            "position": group.position,
            "completions": [
                {
                    "ids": done.ids.tolist(),
                    "logp": base64.b64encode(done.logp.astype("<f4").tobytes()).decode("ascii"),
                    "finish": done.finish,
                }
                for done in group.completions
            ],
        }
        for group in groups
    ]


def completions_of(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Completion]:
    """The completions of a row of `to_json`, decoded as they were."""
    return [_completion(one, tokenizer) for one in row["completions"]]


def _completion(one: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Completion:
    ids = np.asarray(one["ids"], np.int32)
    logp = np.frombuffer(base64.b64decode(one["logp"]), "<f4").astype(np.float32)
    stopped = one["finish"] == "stop"
    text, offsets = decode_with_offsets(tokenizer, ids[:-1] if stopped else ids)
    if stopped:
        offsets = np.concatenate([offsets, np.full((1, 2), len(text), np.int32)])
    return Completion(
        ids=ids,
        logp=logp,
        text=text,
        offsets=offsets.astype(np.int32),
        finish=one["finish"],
        length=len(ids),
        degenerate=longest_run(ids) >= DEGENERATE_RUN,
    )
