"""The policy loss and its released combination, against numbers of the released functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.rl.combine import average_loss, combine, metric_means
from evisrag_jax.rl.losses import PolicyLossConfig, batch_policy_loss

TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}  # float32


def inputs(case, bits, micro):
    """Rows [B, ...] as [B / micro, micro, ...]: a micro-batch of the release is a group here."""
    mask = bits(case["reward_masks"])
    adv = np.asarray(case["advantages"], np.float32)[..., None] * mask
    rows = (
        np.asarray(case["log_probs"], np.float32),
        np.asarray(case["old_log_probs"], np.float32),
        adv.astype(np.float32),
        mask,
        bits(case["response_mask"]),
    )
    return [jnp.asarray(x.reshape(-1, micro, *x.shape[1:])) for x in rows]


@functools.partial(jax.jit, static_argnames="cfg")
def run(logp, old, adv, mask, response, cfg, ref=None):
    """Loss, its parts, metrics, and the gradient with respect to the rows."""

    def loss(logp):
        terms = batch_policy_loss(logp, old, adv, mask, cfg, response_mask=response, ref=ref)
        combined = combine(terms.sum, terms.weight, cfg)
        return combined.loss, (combined, terms.metrics)

    (_, (combined, metrics)), grad = jax.value_and_grad(loss, has_aux=True)(logp)
    return combined, metrics, grad.reshape(-1, grad.shape[-1])


def numbers(values):
    """Golden lists with "NaN" strings as arrays."""
    return np.asarray(jax.tree.map(float, values))


def cases(golden, *, ranks=False):
    return [c for c in golden("policy_loss")["cases"] if ("update_2_ranks" in c) == ranks]


def test_golden_whole_batch(golden, bits):
    """Channel losses, the gradient of their sum, and the metrics of every case.

    ppo_kl is asserted as the named deviation: the release pairs every row's log-ratios with every
    row's channel masks; here each response token counts once.
    """
    cfg = PolicyLossConfig(dual_clip=3.0)
    for case in golden("policy_loss")["cases"]:
        want, name = case["whole_batch"], case["name"]
        assert (case["clip_low"], case["clip_high"], case["clip_dual"]) == (0.2, 0.28, 3.0)
        logp, old, adv, mask, response = inputs(case, bits, 8)
        got, metrics, grad = run(logp, old, adv, mask, response, cfg)
        np.testing.assert_allclose(
            got.channels, want["per_channel_loss"], err_msg=name, **TOLERANCE
        )
        golden_grad = numbers(want["grad_of_sum_of_channels_wrt_log_probs"])
        np.testing.assert_allclose(grad, golden_grad, err_msg=name, **TOLERANCE)
        means, released = metric_means(metrics), want["metrics"]
        for mine, theirs in (
            ("entropy", "entropy_loss"),
            ("clipfrac_higher", "pg_clipfrac_higher"),
            ("clipfrac_lower", "pg_clipfrac_lower"),
        ):
            np.testing.assert_allclose(means[mine], released[theirs], err_msg=name, **TOLERANCE)
        drop = -np.clip(np.asarray(logp - old, np.float64)[0], -20, 20)
        mixed = np.einsum("bt,xct->", drop, np.asarray(mask)[0]) / np.asarray(mask).sum()
        np.testing.assert_allclose(released["ppo_kl"], mixed, rtol=1e-4, atol=1e-5)
        right = drop[np.asarray(response)[0]].mean()
        np.testing.assert_allclose(means["ppo_kl"], right, **TOLERANCE)


def test_golden_update_over_micro_batches(golden, bits):
    """The released update: divisor counted in each micro-batch. Its NaN cases (a channel without
    tokens, a micro-batch without advantages) are reproduced under nan_policy="code"; the release
    puts NaN on padding too, here padding never takes part."""
    cfg = PolicyLossConfig.code()
    nan_cases = set()
    for case in cases(golden):
        want, name = case["update"], case["name"]
        *arrays, response = inputs(case, bits, want["micro_batch"])
        got, metrics, grad = run(*arrays, response, cfg)
        micro, golden_grad = numbers(want["micro_losses"]), numbers(want["grad_accumulated"])
        np.testing.assert_allclose(got.micro, micro, err_msg=name, **TOLERANCE)
        tokens = np.asarray(response).reshape(golden_grad.shape)
        used = tokens | ~np.isnan(golden_grad)
        np.testing.assert_allclose(grad[used], golden_grad[used], err_msg=name, **TOLERANCE)
        nan_cases |= {name} if np.isnan(micro).any() else set()
        total, weight = metrics["clipfrac_higher"]
        np.testing.assert_allclose(
            total / weight, numbers(want["metrics"]["actor/pg_clipfrac_higher"]), **TOLERANCE
        )
    assert nan_cases == {"channel_mask_empty_everywhere", "one_sample_all_zero_advantage_micro1"}


def test_golden_nan_cases_are_zero_by_default(golden, bits):
    """B52: where the release gives NaN, the safe policy gives the rest of the batch's update."""
    safe = PolicyLossConfig.code(nan_policy="safe_zero")
    for case in cases(golden):
        want = case["update"]
        micro, golden_grad = numbers(want["micro_losses"]), numbers(want["grad_accumulated"])
        if not np.isnan(micro).any():
            continue
        got, _, grad = run(*inputs(case, bits, want["micro_batch"]), safe)
        assert np.isfinite(grad).all() and np.isfinite(got.loss)
        known = ~np.isnan(micro)
        np.testing.assert_allclose(got.micro[known], micro[known], **TOLERANCE)
        finite = ~np.isnan(golden_grad)
        np.testing.assert_allclose(grad[finite], golden_grad[finite], **TOLERANCE)
        if known.any():  # the micro-batch without any advantage is a no-op
            assert not np.any(got.micro[~known]) and not np.any(grad[~finite])


def test_golden_two_ranks(golden, bits):
    """Two ranks with global token totals: the mean over ranks of the released gradients, which
    carry a factor of the world size, is the gradient of the one global loss."""
    (case,) = cases(golden, ranks=True)
    want = case["update_2_ranks"]
    arrays = inputs(case, bits, want["micro_batch"])
    got, _, grad = run(*arrays, PolicyLossConfig.code())
    np.testing.assert_allclose(grad, numbers(want["fsdp_mean_grad"]), **TOLERANCE)
    ranks = [loss for rank in want["ranks"] for loss in rank["micro_losses"]]
    np.testing.assert_allclose(got.micro * len(want["ranks"]), ranks, **TOLERANCE)
    # one rank at a time, told the totals of both
    code = PolicyLossConfig.code()
    terms = jax.jit(batch_policy_loss, static_argnames="cfg")(*arrays[:4], code)
    half = len(terms.sum) // 2
    for rank, rows in enumerate((slice(0, half), slice(half, None))):
        part = combine(terms.sum[rows], terms.weight[rows], code, totals=terms.weight.sum(0))
        np.testing.assert_allclose(part.micro * 2, want["ranks"][rank]["micro_losses"], **TOLERANCE)


def test_golden_kl_in_every_channel(golden, bits):
    """The released in-loss KL, defined for micro-batches of one row (others raise there)."""
    first, *others = golden("policy_loss_kl")["cases"]
    assert [one["error"] for one in others] == ["RuntimeError"] * 3
    cfg = PolicyLossConfig.code(kl_coef=first["kl_coef"], kl=first["kl_penalty"])
    ref = jnp.asarray(first["ref_log_probs"], jnp.float32)[:, None]
    got, metrics, grad = run(*inputs(first, bits, 1), cfg, ref=ref)
    np.testing.assert_allclose(got.micro, first["micro_losses"], **TOLERANCE)
    np.testing.assert_allclose(grad, first["grad_accumulated"], **TOLERANCE)
    total, weight = metrics["kl"]
    np.testing.assert_allclose(total[-1] / weight[-1], first["last_kl_loss"], **TOLERANCE)


@pytest.mark.parametrize("average", ["token", "seq"])
def test_golden_average_loss(golden, average):
    case = golden("average_loss")
    values, mask = jnp.asarray(case["values"], jnp.float32), jnp.asarray(case["mask"], bool)
    total, weight = average_loss(values, mask, average)
    np.testing.assert_allclose(total / weight, case[average], **TOLERANCE)
    more = [jnp.concatenate([x, x[:1] * False]) for x in (values, mask)]  # a row without tokens
    total, weight = average_loss(*more, average)
    np.testing.assert_allclose(total / weight, case[average], **TOLERANCE)
    with pytest.raises(ValueError, match="average='rows'"):
        average_loss(values, mask, "rows")
