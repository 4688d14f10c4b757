"""Offline rerank on samples small enough to follow, and at the sizes of the published table."""

import numpy as np
import pytest

from evisrag_jax.evaluation.rerank import Choices, choose, rerank

# Samples: the score corrects the log-prob; it breaks it; a tie; all texts equal.
SCORES = np.array([[0.1, 0.9, 0.2], [0.8, 0.1, 0.3], [0.5, 0.5, 0.5], [1.0, 0.0, 0.0]])
LOGP = np.array([[-1.0, -2.0, -3.0], [-2.0, -1.0, -3.0], [-3.0, -1.0, -2.0], [-1.0, -2.0, -2.0]])
CORRECT = np.array([[0, 1, 0], [0, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
TEXTS = [["a", "b", "a"], ["a", "b", "c"], ["a", "b", "a"], ["x", "x", "x"]]


def test_choices_by_hand():
    got = rerank(SCORES, LOGP, CORRECT, TEXTS)
    assert got.chosen.tolist() == [1, 0, 1, 0]
    assert got.everything == Choices(4, 0.5, 0.5, 0.25, 5 / 12, 0.75, 1, 1)
    assert got.informative == Choices(3, 2 / 3, 2 / 3, 1 / 3, 5 / 9, 1.0, 1, 1)
    assert got.strong == Choices(2, 0.5, 0.5, 0.0, 1 / 3, 1.0, 1, 1)
    assert (got.rnc, got.flip, got.not_first) == (0.75, 0.5, 0.5)


def test_ties_go_to_the_higher_log_prob_then_to_the_earlier_candidate():
    scores = np.array([[1.0, 1.0 - 5e-10, 0.0], [1.0, 1.0 - 2e-9, 0.0], [0.3, 0.3, 0.3]])
    logp = np.array([[-2.0, -1.0, -0.1], [-2.0, -1.0, -0.1], [-1.0, -0.5, -0.5]])
    assert choose(scores, logp).tolist() == [1, 0, 1]
    assert rerank(scores[:2], logp[:2], scores[:2] > 0, [["a"] * 3] * 2).rnc == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_random_cases_by_counting(seed):
    """Every number again, candidate by candidate."""
    rng = np.random.default_rng(seed)
    S, N = 40, 5
    scores, logp = rng.integers(0, 3, (S, N)) / 2.0, rng.normal(size=(S, N))
    correct = rng.random((S, N)) < 0.4
    texts = rng.choice(["a", "b"], (S, N), p=[0.8, 0.2]).tolist()
    got = rerank(scores, logp, correct, texts)
    chosen, likely = [], []
    for s in range(S):
        chosen.append(max(range(N), key=lambda n: (scores[s, n], logp[s, n])))
        likely.append(max(range(N), key=lambda n: logp[s, n]))
    assert got.chosen.tolist() == chosen
    groups = {
        "everything": range(S),
        "informative": [s for s in range(S) if len(set(texts[s])) > 1],
        "strong": [s for s in range(S) if 0 < sum(correct[s]) < N],
    }
    for name, members in groups.items():
        one, count = getattr(got, name), len(members)
        assert 0 < count == one.samples
        right = [correct[s, chosen[s]] for s in members]
        before = [correct[s, likely[s]] for s in members]
        assert one.accuracy == pytest.approx(sum(right) / count)
        assert one.logprob == pytest.approx(sum(before) / count)
        assert one.top1 == pytest.approx(sum(correct[s, 0] for s in members) / count)
        assert one.random == pytest.approx(sum(sum(correct[s]) / N for s in members) / count)
        assert one.oracle == pytest.approx(sum(any(correct[s]) for s in members) / count)
        assert one.wins == sum(a and not b for a, b in zip(right, before, strict=True))
        assert one.losses == sum(b and not a for a, b in zip(right, before, strict=True))
    assert got.rnc == sum(len(set(row)) > 1 for row in scores.tolist()) / S
    assert got.flip == sum(a != b for a, b in zip(chosen, likely, strict=True)) / S
    assert got.not_first == sum(a != 0 for a in chosen) / S


def test_the_published_table_has_these_shares():
    """CED spec 1.7: 94 samples, 12 of them mixed; rnc of correctness as a score is 12.8 %, the log-prob is
    right in 89 and in 9 of the 12; correctness in 92 and in all 12, with three flips at least."""
    correct = np.zeros((94, 6), bool)
    correct[:80] = True
    correct[80:92, :3] = True
    logp = np.zeros((94, 6))
    logp[:, 0] = 1.0
    logp[80:83, 5] = 2.0  # where it prefers a wrong candidate
    got = rerank(correct.astype(float), logp, correct, [list("abcdef")] * 94)
    assert got.rnc == pytest.approx(0.128, abs=5e-4) and got.strong.samples == 12
    assert (got.everything.logprob * 94, got.strong.logprob * 12) == pytest.approx((89, 9))
    assert (got.everything.accuracy * 94, got.strong.accuracy * 12) == pytest.approx((92, 12))
    assert got.flip * 94 == pytest.approx(3) and got.everything.wins == 3


def test_nothing_to_average_is_none():
    got = rerank(np.zeros((1, 2)), np.zeros((1, 2)), np.ones((1, 2), bool), [["a", "a"]])
    assert got.strong == Choices(0, None, None, None, None, None, 0, 0)
    assert got.informative.samples == 0 and got.rnc == got.flip == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": np.zeros((0, 3))}, "no candidate to choose"),
        ({"scores": np.where(SCORES == 0.3, np.nan, SCORES)}, r"scores\[1, 2\] is not finite"),
        ({"logp": LOGP - np.where(LOGP == -3, np.inf, 0)}, r"logp\[0, 2\] is not finite"),
        ({"texts": TEXTS[:3]}, r"texts of \[3, 3, 3\] candidates for scores of shape \(4, 3\)"),
    ],
)
def test_bad_arrays_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        fields = {"scores": SCORES, "logp": LOGP, "correct": CORRECT, "texts": TEXTS} | changes
        if len(fields["scores"]) == 0:
            fields |= {"logp": np.zeros((0, 3)), "correct": np.zeros((0, 3), bool), "texts": []}
        rerank(**fields)
