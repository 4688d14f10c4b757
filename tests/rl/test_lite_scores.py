"""PAPO-Lite and VPPO-Lite against the equations of baselines spec 3.1, token by token."""

import math

import numpy as np
import pytest

from evisrag_jax.rl.lite_scores import papo_lite, vppo_lite


def v(plain, masked):
    """k3 with d = masked - plain in [-20, 20], at most 10."""
    d = min(max(masked - plain, -20.0), 20.0)
    return min(math.exp(d) - d - 1, 10.0)


def cases(seed=0, n=6, T=11):
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(1.0, (n, T))
    masked = logp - rng.normal(0.3, 1.5, (n, T))
    lengths = np.array([11, 10, 5, 3, 1, 0])
    return logp, masked, np.arange(T) < lengths[:, None], lengths


def test_scores_are_means_over_tokens():
    """The 40 % are ⌈0.4 n⌉ tokens: 5 of 11, 4 of 10, 2 of 5, 2 of 3 and 1 of 1; tolerance float32."""
    logp, masked, mask, lengths = cases()
    masked[0, 0] = logp[0, 0] - 50.0  # beyond both limits
    papo, vppo = papo_lite(logp, masked, mask), vppo_lite(logp, masked, mask)
    for n, length in enumerate(lengths):
        own = [v(logp[n, t], masked[n, t]) for t in range(length)]
        kept = sorted(own, reverse=True)[: [5, 4, 2, 2, 1, 0][n]]
        assert papo[n] == pytest.approx(sum(own) / length if own else 0.0, rel=1e-5)
        assert vppo[n] == pytest.approx(sum(kept) / len(kept) if kept else 0.0, rel=1e-5)
    assert (papo >= 0).all() and (vppo >= papo).all()
    np.testing.assert_allclose(vppo_lite(logp, masked, mask, top=1.0), papo, rtol=1e-6)


def test_what_stands_beyond_a_response_does_not_matter():
    logp, masked, mask, _ = cases()
    odd = [np.where(mask, x, np.nan) for x in (logp, masked)]
    for score in (papo_lite, vppo_lite):
        np.testing.assert_array_equal(score(*odd, mask), score(logp, masked, mask))
        stacked = score(*(np.stack([x, x[::-1]]) for x in (logp, masked, mask)))
        np.testing.assert_allclose(stacked[1][::-1], stacked[0])
        assert stacked.shape == (2, 6)


def test_bad_values_are_named():
    logp, masked, mask, _ = cases()
    masked[2, 4] = -np.inf
    with pytest.raises(ValueError, match=r"logp_mask is not finite at \[2, 4\]"):
        papo_lite(logp, masked, mask)
    with pytest.raises(ValueError, match="top=0.0; a share above 0"):
        vppo_lite(logp, logp, mask, top=0.0)
