"""EVisRAG's reward channels in the three named behaviours.

    mode     channels                                                   source
    code     accuracy evidence format overlong isObserve isThink        the released code
    paper    perception derivation format                               EVisRAG eq. 11, 12, 13
    strict   the same three, judged as a reader would                   this project

and, as another `kind`:

    r1vl                      correct steps validity      StepGRPO (`rewards.steps`), in any of the modes
    perception_r1, vlm_r1     match format                boxes in the answer (`rewards.box_rewards`)

A response has the tagged form

    <observe>..</observe> <evidence> [1]: .. [2]: no relevant information </evidence>
    <think>..</think> <answer>..</answer>

"code" keeps the release's oddities (containment of characters for short gold records, an undivided
sum from six records on, 3x weights of two channels); see each function.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evisrag_jax.prompts.sections import NO_EVIDENCE, TAGS, evidence_records
from evisrag_jax.rewards import text as matching
from evisrag_jax.rewards.box_rewards import TASKS, box_score, edit_reward
from evisrag_jax.rewards.boxes import UNITS, BoxGold, answer_region
from evisrag_jax.rewards.gold import GoldError, check_gold
from evisrag_jax.rewards.steps import KEY_STEP_WEIGHT, exact_answer, key_steps

CODE_CHANNELS = ("accuracy", "evidence", "format", "overlong", "isObserve", "isThink")
PAPER_CHANNELS = ("perception", "derivation", "format")
STEP_CHANNELS = ("correct", "steps", "validity")
BOX_CHANNELS = ("match", "format")
KINDS = ("evisrag", "r1vl", *TASKS)

_MARK = re.compile(r"\[([0-9]{1,6})\]:")
_RELEASED_RECORDS = 6  # the release reads records 1..6 and divides only if one of them is missing
_CODE_WEIGHT = 3.0  # factor of the accuracy and evidence channels
_SHORT_GOLD = 5  # a gold record with fewer words is judged by containment


@dataclass(frozen=True)
class RewardConfig:
    """How responses are scored.

    mode            "paper", "code" or "strict"; every score file names it
    k_pos           weight of a relevant page against an irrelevant one (eq. 11; 3 in the release)
    overlong_*      token counts of the length penalty (code): maximum, buffer before it, minimum
    max_records     gold records read at most; None = all (code: the released six, see above)
    strip           outer white space is allowed by the format; None = by mode (strict only)
    answer_block    which of several answer blocks counts: "first", "last", or "single" (a response
                    with several scores 0); None = by mode (strict: single, else first)
    kind            "evisrag", "r1vl", "perception_r1" or "vlm_r1"
    sections        tags, in order, that the format demands; ("think", "answer") without perception. Of
                    boxes also (): the response is the list
    task            perception_r1: "box", "point", "count" or "text"; vlm_r1: "map" or "weighted", for
                    records with several boxes. "" is the first, and all that other kinds have
    units           of written boxes: "pixels" or "cells" (`rewards.boxes`)
    length_penalty  paper, strict: a further channel "overlong" (DAPO's soft penalty with overlong_min 0)
    unpaid          channels that are measured and logged, but count neither in an advantage nor in the
                    group filter
    """

    mode: str = "paper"
    k_pos: float = 3.0
    overlong_max: int = 1536
    overlong_buffer: int = 512
    overlong_min: int = 200
    max_records: int | None = None
    strip: bool | None = None
    answer_block: str | None = None
    kind: str = "evisrag"
    sections: tuple[str, ...] = TAGS
    task: str = ""
    units: str = "pixels"
    length_penalty: bool = False
    unpaid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        matching.check_mode(self.mode)
        if not self.k_pos > 0:
            raise ValueError(f"k_pos={self.k_pos}; a positive weight")
        if not (self.overlong_buffer > 0 and self.overlong_min >= 0):
            raise ValueError("overlong_buffer must be positive and overlong_min not negative")
        if self.overlong_min > self.overlong_max - self.overlong_buffer:
            raise ValueError(
                f"overlong_min={self.overlong_min} lies inside the penalty zone, which starts at "
                f"overlong_max - overlong_buffer = {self.overlong_max - self.overlong_buffer}"
            )
        if self.max_records is not None and self.max_records < 1:
            raise ValueError(f"max_records={self.max_records}; at least 1, or None for all")
        if self.answer_block not in (None, "first", "last", "single"):
            raise ValueError(f"answer_block={self.answer_block!r}; first, last, single or None")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; one of {', '.join(KINDS)}")
        ordered = tuple(tag for tag in TAGS if tag in self.sections)
        bare = self.kind in TASKS and not self.sections
        if self.sections != ordered or not ("answer" in ordered or bare):
            raise ValueError(f"sections={self.sections!r}; of {TAGS}, in order, with answer")
        if self.length_penalty and (self.mode == "code" or self.kind != "evisrag"):
            raise ValueError(
                f"length_penalty: mode code has an overlong channel, kind {self.kind} has none"
            )
        self._check_boxes()
        unknown = set(self.unpaid) - set(self.channels)
        if unknown or not self.paid:
            raise ValueError(
                f"unpaid={self.unpaid!r}; some, and not all, of {', '.join(self.channels)}"
            )

    def _check_boxes(self) -> None:
        tasks = TASKS.get(self.kind, ())
        if self.task and self.task not in tasks:
            known = f"one of {', '.join(tasks)}" if tasks else "which has no tasks"
            raise ValueError(f"task={self.task!r} of kind {self.kind}; {known}")
        if self.units not in UNITS:
            raise ValueError(f"units={self.units!r}; one of {', '.join(UNITS)}")
        if self.units != "pixels" and not self.reads_boxes:
            raise ValueError(
                f"units={self.units!r} with kind={self.kind!r}, task={self.task!r}, which has no boxes"
            )
        if tasks and self.mode == "code":
            raise ValueError(
                f"mode='code': kind {self.kind} has no released channels; paper or strict"
            )

    @property
    def reads_boxes(self) -> bool:
        """Whether responses hold boxes or points, and gold is a `boxes.BoxGold`."""
        return self.kind in TASKS and self.task != "text"

    @property
    def channels(self) -> tuple[str, ...]:
        """Channel names in array order."""
        if self.kind in TASKS:
            return BOX_CHANNELS
        if self.kind == "r1vl":
            return STEP_CHANNELS
        if self.mode == "code":
            return CODE_CHANNELS
        return PAPER_CHANNELS + (("overlong",) if self.length_penalty else ())

    @property
    def paid(self) -> tuple[str, ...]:
        """The channels that count."""
        return tuple(name for name in self.channels if name not in self.unpaid)

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of each channel (code: with fewer than six gold records)."""
        highest = {"accuracy": _CODE_WEIGHT, "evidence": _CODE_WEIGHT, "steps": KEY_STEP_WEIGHT}
        penalties = ("overlong", "isObserve", "isThink")
        return {
            name: (-1.0, 0.0) if name in penalties else (0.0, highest.get(name, 1.0))
            for name in self.channels
        }

    @property
    def strips(self) -> bool:
        """Whether white space around the response is ignored by the format channel."""
        return self.mode == "strict" if self.strip is None else self.strip

    @property
    def answers_from(self) -> str:
        """The resolved rule for several answer blocks."""
        return self.answer_block or ("single" if self.mode == "strict" else "first")


def score_response(
    response: str, gold: str | Sequence[str] | BoxGold, length: int, config: RewardConfig
) -> dict[str, float]:
    """The channel values of one response, in the order of `config.channels`.

    Args:
      response: decoded text without special tokens.
      gold: tagged gold text (`gold_text`). Several `<answer>` blocks, or a sequence of gold texts,
        mean "any of": the best score counts (paper, strict). "code" reads the first block only and
        refuses a sequence, as the release knows one gold string. Of boxes it is a `BoxGold`
        (`boxes.gold_boxes`).
      length: response tokens including the end token (code: the overlong channel).

    Raises GoldError when the gold has no `<answer>` or no `<evidence>`, or is not of that kind.
    """
    if isinstance(gold, BoxGold) != config.reads_boxes:
        wanted = "boxes" if config.reads_boxes else "a tagged text"
        raise GoldError(
            f"kind {config.kind} compares with {wanted}, not with {type(gold).__name__}"
        )
    if isinstance(gold, BoxGold):
        return _match(response, gold, config)
    if isinstance(gold, Sequence) and not isinstance(gold, str):
        if config.mode == "code" or not gold:
            raise GoldError(
                f"a sequence of {len(gold)} gold texts; mode {config.mode} needs a text"
            )
        scores = [score_response(response, one, length, config) for one in gold]
        return {name: max(score[name] for score in scores) for name in config.channels}
    check_gold(gold)
    if config.kind in TASKS:
        return _match(response, matching.extract_tags("answer", gold), config)
    layout = format_score(response, strip=config.strips, sections=config.sections)
    if config.kind == "r1vl":
        return {
            "correct": exact_answer(response, gold, config.mode, config.answers_from),
            "steps": KEY_STEP_WEIGHT * key_steps(response, gold, config.mode),
            "validity": layout,
        }
    if config.mode != "code":
        scores = {
            "perception": perception(response, gold, config),
            "derivation": accuracy(response, gold, config),
            "format": layout,
        }
        return scores | ({"overlong": overlong(length, config)} if config.length_penalty else {})
    return {
        "accuracy": _CODE_WEIGHT * accuracy(response, gold, config),
        "evidence": _CODE_WEIGHT * released_evidence(response, gold, config),
        "format": layout,
        "overlong": overlong(length, config),
        "isObserve": observe_penalty(response),
        "isThink": think_penalty(response),
    }


def _match(response: str, gold: BoxGold | Sequence[str], config: RewardConfig) -> dict[str, float]:
    """Boxes, points or a text against their gold; the format is the layout and a list that can be read."""
    region = answer_region(response, config.answers_from, tagged="answer" in config.sections)
    if isinstance(gold, BoxGold):
        match, readable = box_score(
            region, gold, config.task or TASKS[config.kind][0], config.units
        )
    else:
        match, readable = 0.0 if region is None else edit_reward(region, gold), region is not None
    layout = (
        format_score(response, strip=config.strips, sections=config.sections)
        if config.sections
        else 1.0
    )
    return {"match": match, "format": layout * readable}


def overall(scores: Mapping[str, float]) -> float:
    """Sum of the channels: what the group filter and the logs use, never the loss."""
    return float(sum(scores.values()))


def accuracy(response: str, gold: str, config: RewardConfig) -> float:
    """F1 of the answer blocks; 0 unless both answer tags stand in the response (eq. 12).

    Set F1 against the first gold block (code), the best of all gold blocks (paper); bag-of-words F1
    with the strict normaliser, best of all gold blocks (strict).
    """
    if not _has_tags(response, "answer"):
        return 0.0
    if config.answers_from == "single" and response.count("<answer>") != 1:
        return 0.0
    which = "last" if config.answers_from == "last" else "first"
    answer = matching.extract_tag("answer", response, which) or ""
    golds = matching.extract_tags("answer", gold)
    if config.mode == "code":
        golds = golds[:1]
    f1 = matching.f1_multiset if config.mode == "strict" else matching.f1_set
    return max(f1(answer, one, mode=config.mode) for one in golds)


def perception(response: str, gold: str, config: RewardConfig) -> float:
    """Weighted mean over the gold records (eq. 11): weight k_pos if relevant, 1 if not.

    A record without relevant information is judged by equality of the normalised texts. A relevant
    one by set F1 (paper); in strict mode by bag-of-words F1, or, for gold of fewer than five words,
    by containment of whole words. A missing record scores 0, further ones are ignored.
    """
    if not _has_tags(response, "evidence"):
        return 0.0
    strict = config.mode == "strict"
    read = records_by_line if strict else records_by_marker
    wanted = read(matching.extract_tag("evidence", gold) or "")
    given = read(matching.extract_tag("evidence", response) or "")
    score = total = 0.0
    for index, target in list(wanted.items())[: config.max_records]:
        irrelevant = bool(matching.exact(target, NO_EVIDENCE, config.mode))
        weight = 1.0 if irrelevant else config.k_pos
        total += weight
        if index not in given:
            continue
        if irrelevant:
            score += weight * matching.exact(given[index], target, config.mode)
        elif strict and len(target.split()) < _SHORT_GOLD:
            score += weight * matching.contains_tokens(given[index], target, config.mode)
        else:
            f1 = matching.f1_multiset if strict else matching.f1_set
            score += weight * f1(given[index], target, config.mode)
    return score / total if total else 0.0


def released_evidence(response: str, gold: str, config: RewardConfig) -> float:
    """The evidence channel as released, before its factor 3.

    Gold records are read from 1 upwards until one is missing. "No relevant information" is
    recognised by the exact string; gold of fewer than five words is judged by character
    containment, longer gold by set F1. With `max_records=None` six records are read and the sum is
    divided by its weight only when one of the six is missing; a set maximum always divides.
    """
    if not _has_tags(response, "evidence"):
        return 0.0
    given = matching.extract_tag("evidence", response) or ""
    wanted = matching.extract_tag("evidence", gold) or ""
    score = total = 0.0
    for index in range(1, (config.max_records or _RELEASED_RECORDS) + 1):
        target = _marked_record(wanted, index)
        if target is None:
            return score / total if total else 0.0
        weight = 1.0 if target == NO_EVIDENCE else config.k_pos
        total += weight
        guess = _marked_record(given, index)
        if guess is None:
            continue
        short = len(target.split()) < _SHORT_GOLD
        score += weight * (matching.contains if short else matching.f1_set)(guess, target, "code")
    return score if config.max_records is None else score / total


def records_by_marker(evidence: str) -> dict[int, str]:
    """Records from a marker `[i]:` anywhere to the next marker; of a repeated index the first."""
    marks = list(_MARK.finditer(evidence))
    ends = [mark.start() for mark in marks[1:]] + [len(evidence)]
    records: dict[int, str] = {}
    for mark, end in zip(marks, ends, strict=False):
        records.setdefault(int(mark[1]), evidence[mark.end() : end].strip())
    return records


def records_by_line(evidence: str) -> dict[int, str]:
    """Records whose marker opens a line (`prompts.sections.evidence_records`)."""
    return {record.index: record.text for record in evidence_records(evidence)}


def _marked_record(evidence: str, index: int) -> str | None:
    """Text between the first `[i]:` and a second one or `[i+1]` (no colon), stripped; or None."""
    pieces = evidence.split(f"[{index}]:")
    return None if len(pieces) == 1 else pieces[1].split(f"[{index + 1}]")[0].strip()


def format_score(response: str, *, strip: bool = False, sections: Sequence[str] = TAGS) -> float:
    """1.0 when the response is the sections in order, each of their tags exactly once (eq. 13).

    White space is allowed between sections; around the response only with `strip`.
    """
    text = response.strip() if strip else response
    once = all(text.count(f"<{slash}{tag}>") == 1 for tag in sections for slash in ("", "/"))
    return float(once and _layout(tuple(sections)).fullmatch(text) is not None)


@functools.cache
def _layout(sections: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(r"\s*".join(f"<{tag}>.*?</{tag}>" for tag in sections), re.DOTALL)


def overlong(length: int, config: RewardConfig) -> float:
    """Length penalty in [-1, 0]: -1 under the minimum, falling linearly over the buffer."""
    soft = config.overlong_max - config.overlong_buffer
    if length < config.overlong_min or length > config.overlong_max:
        return -1.0
    return 0.0 if length <= soft else (soft - length) / config.overlong_buffer


def observe_penalty(response: str) -> float:
    """-1 when the observe section cites a page as [1] .. [5], else 0."""
    if not _has_tags(response, "observe"):
        return 0.0
    observed = matching.extract_tag("observe", response) or ""
    return -1.0 if any(f"[{index}]" in observed for index in range(1, 6)) else 0.0


def think_penalty(response: str) -> float:
    """-1 when the think section is the answer repeated verbatim (both empty counts), else 0."""
    if not (_has_tags(response, "think") and _has_tags(response, "answer")):
        return 0.0
    same = matching.extract_tag("think", response) == matching.extract_tag("answer", response)
    return -1.0 if same else 0.0


def _has_tags(response: str, tag: str) -> bool:
    return f"<{tag}>" in response and f"</{tag}>" in response
