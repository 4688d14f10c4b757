"""KL penalties: released values and gradients, the known values of B56, and the torch formulae."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.rl.kl import ALIASES, adapt_coefficient, kl_kind, kl_penalty
from tests.rl import torch_reference as reference

TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}  # float32


def value_and_grad(x, y, kind):
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    grad = jax.grad(lambda v: jnp.sum(kl_penalty(v, y, kind)))(x)
    return np.asarray(kl_penalty(x, y, kind)), np.asarray(grad)


def test_golden_kl_values_and_gradients(golden):
    data = golden("kl")
    assert data["unknown_type_raises"]  # by the released function; and so does ours
    with pytest.raises(ValueError, match="unknown KL kind"):
        value_and_grad(data["log_probs"], data["ref_log_probs"], "k4")
    for case in data["cases"]:
        got = value_and_grad(data["log_probs"], data["ref_log_probs"], case["kl_penalty"])
        for mine, key in zip(got, ("value", "grad_of_sum_wrt_log_probs"), strict=True):
            np.testing.assert_allclose(mine, case[key], err_msg=case["kl_penalty"], **TOLERANCE)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "full"])
def test_kl_matches_torch(kind):
    rng = np.random.default_rng(3)
    x, y = (np.log(rng.dirichlet(np.ones(7), (2, 5))).astype(np.float32) for _ in range(2))
    leaf = reference.tensor(x).requires_grad_()
    want = reference.kl(leaf, reference.tensor(y), kind)
    (grad,) = torch.autograd.grad(want.sum(), leaf)
    got = value_and_grad(x, y, kind)
    np.testing.assert_allclose(got[0], want.detach().numpy(), **TOLERANCE)
    np.testing.assert_allclose(got[1], grad.numpy(), rtol=2e-6, atol=4e-6)


def test_b56_k3_values_gradient_and_small_differences():
    """B56: k3 = exp(d) - d - 1 with d = ref - policy, dk3/dlogp = 1 - exp(d), never negative."""
    d = np.asarray([0.1, -0.1, 1.0, -1.0], np.float32)
    value, grad = value_and_grad(np.zeros(4), d, "k3")
    np.testing.assert_allclose(value, [0.0051709, 0.0048374, 0.7182818, 0.3678794], atol=1e-7)
    np.testing.assert_allclose(grad, 1 - np.exp(d), **TOLERANCE)
    assert abs(grad[2] + 1.71828) < 1e-5
    small = np.asarray([1e-6, -1e-6, 1e-4, 1e-8, 0.0, 0.0299, 0.0301], np.float32)
    value, _ = value_and_grad(np.zeros(7), small, "k3")
    exact = np.expm1(small.astype(np.float64)) - small.astype(np.float64)
    assert 0 <= value[0] < 1e-11 and np.all(value >= 0)
    np.testing.assert_allclose(value, exact, rtol=1e-4, atol=1e-20)
    wide = np.linspace(-30, 30, 241, dtype=np.float32)
    assert np.all(value_and_grad(np.zeros(241), wide, "k3")[0] >= 0)


def test_b56_names_and_their_gradients():
    """B56: k1 k2 k3 are kl, mse, low_var_kl; swapped arguments change the sign of k1."""
    assert [kl_kind(name) for name in ("k1", "k2", "k3")] == list(ALIASES.values())
    x, y = np.asarray([-1.0, -2.0]), np.asarray([-1.5, -1.0])
    value, grad = value_and_grad(x, y, "k1")
    np.testing.assert_allclose(value, [0.5, -1.0])
    np.testing.assert_allclose(grad, [1.0, 1.0])  # no pull towards the reference: why k1 is no loss
    np.testing.assert_allclose(value_and_grad(x, y, "k2")[0], [0.125, 0.5])
    with pytest.raises(ValueError, match="unknown KL kind 'k4'.*low_var_kl.*k3"):
        kl_kind("k4")


def test_adaptive_coefficient():
    """Measured 50 % above a target of 0.1: the error is cut to 0.2; below it shrinks."""
    assert adapt_coefficient(0.1, 0.15, 1000) == pytest.approx(0.1 * 1.02)
    assert adapt_coefficient(0.1, 0.11, 1000) == pytest.approx(0.1 * 1.01)
    assert adapt_coefficient(0.1, 0.0, 5000) == pytest.approx(0.1 * 0.9)
