"""What a judge's verdicts say of a set: accuracy, refusals, and what was made up.

                right   wrong   refused   failed
sufficient         12       3         1        0     hallucination = wrong / judged: an answer that
insufficient        0       2         6        1     is neither right nor a refusal
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evisrag_jax.evaluation.metrics import answer_text, mean
from evisrag_jax.evaluation.statistics import RESAMPLES, bootstrap
from evisrag_jax.rewards.judge import JudgeItem, Verdict
from evisrag_jax.runtime.json_files import read_jsonl

COLUMNS = ("right", "wrong", "refused", "failed")


def judge_items(folder: str | os.PathLike) -> list[JudgeItem]:
    """What RUN/predictions.jsonl answered. ValueError when there is no such file or a row lacks its
    question."""
    path = Path(folder) / "predictions.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; `evisrag eval --out {folder}` writes it")
    items = []
    for number, row in enumerate(read_jsonl(path), start=1):
        missing = {"id", "question", "answers", "is_sufficient"} - row.keys()
        if missing:
            raise ValueError(f"{path}: row {number} has no {', '.join(sorted(missing))}")
        said = answer_text(row["prediction"], block="first", given=row.get("answer"))
        items.append(
            JudgeItem(
                row["id"], row["question"], tuple(row["answers"]), said, bool(row["is_sufficient"])
            )
        )
    return items


def judge_summary(
    items: Sequence[JudgeItem],
    verdicts: Sequence[Verdict],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """Names "judge/…". Failures are in `judge/n_failed` and in no mean; means over nothing are None.

    accuracy: mean score.  accuracy_sufficient.  refusal_rate: of insufficient contexts.
    over_refusal_rate: of sufficient ones.  hallucination_rate: wrong and not refused.
    table: {sufficient, insufficient} x {right, wrong, refused, failed} counts.  ci: of accuracy, 95 %.
    """
    table = {row: dict.fromkeys(COLUMNS, 0) for row in ("sufficient", "insufficient")}
    judged = []
    for item, verdict in zip(items, verdicts, strict=True):
        row = "sufficient" if item.is_sufficient else "insufficient"
        table[row][verdict.verdict or "failed"] += 1
        if verdict.score is not None:
            judged.append((item, verdict))

    def share(outcome: str, *, sufficient: bool | None = None) -> float | None:
        return mean(
            float(v.verdict == outcome)
            for i, v in judged
            if sufficient is None or i.is_sufficient == sufficient
        )

    scores = {item.id: float(verdict.score) for item, verdict in judged}
    interval = bootstrap([scores], resamples=resamples, seed=seed) if scores else None
    return {
        "judge/accuracy": mean(scores.values()),
        "judge/accuracy_sufficient": mean(float(v.score) for i, v in judged if i.is_sufficient),
        "judge/refusal_rate": share("refused", sufficient=False),
        "judge/over_refusal_rate": share("refused", sufficient=True),
        "judge/hallucination_rate": share("wrong"),
        "judge/n_judged": len(judged),
        "judge/n_failed": len(items) - len(judged),
        "judge/ci": None if interval is None else [interval.low, interval.high],
        "judge/table": table,
    }


def format_table(table: Mapping[str, Mapping[str, int]]) -> str:
    """The table of counts as text."""
    lines = [" " * 14 + "".join(f"{name:>9}" for name in COLUMNS)]
    lines += [
        f"{row:14}" + "".join(f"{counts[name]:9}" for name in COLUMNS)
        for row, counts in table.items()
    ]
    return "\n".join(lines)
