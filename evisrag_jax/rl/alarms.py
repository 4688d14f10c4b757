"""Alarms: what a curve would show too late, said once when it begins.

    name              raised when                                               source
    logp_gap          sampler and trainer differ by more than 0.05 on average   known failure B51
    format_start      the first step has the format in less than half           B64
    format_collapse   the format falls by half against the first steps
    clipped           every response is cut, three steps in a row               B46
    flat              no group has any spread, three steps in a row             B55
    at_the_top        every paid channel at its highest in 95 % of responses
    no_information    responses say "no relevant information" of every page
    soft_credit       answers are paid without being right, ever more
    length            mean length halves or doubles against the first steps
    entropy           entropy falls below a tenth of the first steps'
    kl                KL to the reference above 10 times that of its first steps, and above 0.1

Each is raised again only after a step in which it was not true. RUN/alarms.jsonl holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from evisrag_jax.rewards.evisrag import RewardConfig

GAP = 0.05  # nats
IN_A_ROW = 3  # steps
FIRST = 5  # steps that later ones are compared with
KL_FLOOR = 0.1


@dataclass(frozen=True)
class Alarm:
    """step, name (see above), message: what was seen, and what it calls for."""

    step: int
    name: str
    message: str


class Alarms:
    """`alarms(rollout metrics, update metrics, step)` → the alarms that begin at this step.

    Args:
        reward: whose channels are paid.
        whole: whether a response has all sections (not with step prompts).

    Attributes:
        steps: rows seen; those of a run that goes on are fed first.
    """

    def __init__(self, reward: RewardConfig | None = None, *, whole: bool = True):
        self.reward, self.whole = reward or RewardConfig(), whole
        self.steps = 0
        self._true: set[str] = set()
        self._row: dict[str, int] = {}
        self._first: dict[str, list[float]] = {}

    def __call__(
        self, rollout: Mapping[str, Any], update: Mapping[str, Any], step: int
    ) -> list[Alarm]:
        """See the class."""
        self.steps += 1
        merged = {**rollout, **update}
        row = {name: float(v) for name, v in merged.items() if v is not None and np.ndim(v) == 0
               and not isinstance(v, str | list | dict)}  # fmt: skip
        seen = dict(self._seen(row, step))
        fresh = [Alarm(step, name, text) for name, text in seen.items() if name not in self._true]
        self._true = set(seen)
        for name in ("rollout/length_mean", "loss/entropy", "loss/kl", "reward/format",
                     "rollout/soft_credit"):  # fmt: skip
            if name in row and len(self._first.setdefault(name, [])) < FIRST:
                self._first[name].append(row[name])
        return fresh

    def _seen(self, row: Mapping[str, float], step: int) -> list[tuple[str, str]]:
        out = []

        def say(name: str, text: str) -> None:
            out.append((name, text))

        gap = row.get("rollout/logp_gap_mean", 0.0)
        if gap > GAP:
            say("logp_gap", f"sampled and trained log-probabilities differ by {gap:.3f} on average "
                            f"(alarm at {GAP}): sampler and trainer do not compute the same "
                            "distribution")  # fmt: skip
        layout = row.get("reward/format", row.get("reward/validity", 1.0))
        if step == 1 and self.whole and layout < 0.5:
            wanted = " ".join(f"<{tag}>" for tag in self.reward.sections)
            say("format_start", f"only {layout:.0%} of the responses have the format ({wanted}); start "
                                "from a model that was fine-tuned on it")  # fmt: skip
        base = self._base("reward/format")
        if self.whole and base and layout < 0.5 * base:
            say("format_collapse", f"the format rate fell from {base:.2f} to {layout:.2f}")
        if self._lasts("clipped", row.get("rollout/clipped_ratio") == 1):
            say(
                "clipped",
                f"every response of the last {IN_A_ROW} steps was cut at max_tokens; raise it",
            )
        flat = [row.get(f"reward/{name}_flat", 0.0) for name in self.reward.paid]
        if self._lasts("flat", min(flat) == 1):
            say("flat", f"no group of the last {IN_A_ROW} steps had any spread: nothing is learned; "
                        "choose questions that are sometimes answered, or raise the temperature")  # fmt: skip
        high = [row.get(f"reward/{name}_high", 0.0) for name in self.reward.paid]
        if min(high) >= 0.95:
            say("at_the_top", "95 % of the responses have the highest value of every channel")
        nothing = row.get("rollout/all_no_info", 0.0)
        if nothing > 0.9:
            say(
                "no_information",
                f"{nothing:.0%} of the responses see no relevant information anywhere",
            )
        soft, before = row.get("rollout/soft_credit", 0.0), self._base("rollout/soft_credit")
        if before is not None and soft > 0.3 and soft > before + 0.2:
            say("soft_credit", f"answers are paid {soft:.2f} more than they are right ({before:.2f} in "
                               "the first steps): look at what they say")  # fmt: skip
        length, before = row.get("rollout/length_mean"), self._base("rollout/length_mean")
        if length is not None and before and not 0.5 <= length / before <= 2:
            say("length", f"mean length went from {before:.0f} to {length:.0f} tokens")
        entropy, before = row.get("loss/entropy"), self._base("loss/entropy")
        if entropy is not None and before and entropy < 0.1 * before:
            say(
                "entropy",
                f"entropy fell from {before:.3f} to {entropy:.4f}: sampling has lost its variety",
            )
        kl, before = row.get("loss/kl"), self._base("loss/kl")
        if kl is not None and before is not None and kl > max(KL_FLOOR, 10 * before):
            say("kl", f"the KL to the reference rose from {before:.4f} to {kl:.3f}")
        return out

    def _base(self, name: str) -> float | None:
        """The mean over the first steps, once they are over."""
        values = self._first.get(name, [])
        return sum(values) / FIRST if len(values) == FIRST else None

    def _lasts(self, name: str, now: bool) -> bool:
        """True from the third step in a row on."""
        self._row[name] = self._row.get(name, 0) + 1 if now else 0
        return self._row[name] >= IN_A_ROW
