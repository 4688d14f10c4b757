"""StepGRPO's rewards in the reading of R1-VL, on pages: a right answer, key steps named, a valid layout.

    R = correct + 0.1 · steps + validity        one number a response, no scopes (baselines spec 3.1)

In R1-VL a large model writes the key steps of a question; here they are the words of the gold evidence.
"""

from evisrag_jax.prompts.sections import NO_EVIDENCE, evidence_records
from evisrag_jax.rewards import text as matching

KEY_STEP_WEIGHT = 0.1


def exact_answer(response: str, gold: str, mode: str, answers_from: str = "first") -> float:
    """1.0 when the answer block equals one of the gold ones, both normalised as the mode does.

    answers_from: which block counts of several, as in `evisrag.RewardConfig.answers_from`.
    """
    if "<answer>" not in response or "</answer>" not in response:
        return 0.0
    if answers_from == "single" and response.count("<answer>") != 1:
        return 0.0
    which = "last" if answers_from == "last" else "first"
    answer = matching.extract_tag("answer", response, which) or ""
    golds = matching.extract_tags("answer", gold)
    return float(max(matching.exact(answer, one, mode) for one in golds))


def key_steps(response: str, gold: str, mode: str) -> float:
    """Share of the key steps that the reasoning names.

    A key step is a word of the gold evidence of a relevant page, once a page; it is named when it stands
    as a whole word in the response before `<answer>`. 0 where no page is relevant.
    """
    said = set(matching.words(response.split("<answer>")[0], mode))
    steps = [
        word
        for record in evidence_records(gold)
        if not matching.exact(record.text, NO_EVIDENCE, mode)
        for word in dict.fromkeys(matching.words(record.text, mode))
    ]
    return sum(word in said for word in steps) / len(steps) if steps else 0.0
