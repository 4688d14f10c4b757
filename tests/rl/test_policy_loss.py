"""The policy loss: torch equations, safe zeros (B52), invariance to splits (B53), cut responses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.rl.combine import channel_divisor, channel_totals, combine, metric_means, objective
from evisrag_jax.rl.losses import PolicyLossConfig, batch_policy_loss, policy_loss
from tests.rl import torch_reference as reference

TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}  # float32


terms_of = jax.jit(batch_policy_loss, static_argnames="cfg")
combined = jax.jit(combine, static_argnames="cfg")


def arrays(data):
    """logp, old, token advantages and masks of a random batch."""
    adv = data["rewards"][..., None] * data["mask"]
    return [jnp.asarray(x) for x in (data["logp"], data["old"], adv, data["mask"])]


@functools.partial(jax.jit, static_argnames="cfg")
def loss_and_grad(logp, old, adv, mask, cfg):
    """(combined, terms) and the gradient of the loss with respect to logp, all prompts at once."""

    def loss(logp):
        terms = batch_policy_loss(logp, old, adv, mask, cfg)
        whole = combine(terms.sum, terms.weight, cfg)
        return whole.loss, (whole, terms)

    (_, aux), grad = jax.value_and_grad(loss, has_aux=True)(logp)
    return aux, grad


@functools.partial(jax.jit, static_argnames="cfg")
def part_grad(logp, old, adv, mask, totals, cfg):
    """Sums [C] of one micro-batch, and the gradient of its undivided objective."""

    def part(logp):
        sums = batch_policy_loss(logp, old, adv, mask, cfg).sum.sum(0)
        return objective(sums, totals, cfg), sums

    (_, sums), grad = jax.value_and_grad(part, has_aux=True)(logp)
    return sums, grad


@pytest.mark.parametrize("average", ["token_batch", "token_group"])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_loss_matches_torch(batch, average, dual):
    """Values and gradients against the float64 equations; ratios far outside the clip range."""
    data = batch(1, spread=1.5)
    cfg = PolicyLossConfig(average=average, dual_clip=dual)
    (got, _), grad = loss_and_grad(*arrays(data), cfg)
    logp, old, mask = (reference.tensor(data[key]) for key in ("logp", "old", "mask"))
    logp.requires_grad_()
    adv = reference.tensor(data["rewards"])[..., None].expand(mask.shape)
    want = reference.batch_loss(logp, old, adv, mask, dual=dual, average=average)
    (want_grad,) = torch.autograd.grad(want.sum(), logp)
    np.testing.assert_allclose(got.channels, want.detach().numpy(), **TOLERANCE)
    np.testing.assert_allclose(got.loss, want.sum().item(), **TOLERANCE)
    np.testing.assert_allclose(grad, want_grad.numpy(), **TOLERANCE)


def test_paper_token_advantages_are_one_channel(batch):
    """[G, 1, T] advantages that differ by token, as the paper estimator makes them (eq. 10)."""
    data = batch(2)
    adv = np.random.default_rng(2).standard_normal(data["logp"].shape).astype(np.float32)
    mask = data["response"][:, :, None]
    cfg = PolicyLossConfig.paper()
    inputs = [jnp.asarray(x) for x in (data["logp"], data["old"], adv[:, :, None], mask)]
    (got, _), _ = loss_and_grad(*inputs, cfg)
    tensors = [reference.tensor(x) for x in (data["logp"], data["old"], adv[:, :, None], mask)]
    want = reference.batch_loss(*tensors)
    np.testing.assert_allclose(got.loss, want[0].item(), **TOLERANCE)


@pytest.mark.parametrize(
    "cfg",
    [
        PolicyLossConfig(),
        PolicyLossConfig(channel_divisor="n_channels", dual_clip=3.0),
        PolicyLossConfig(channel_divisor="nonzero_count"),
        PolicyLossConfig(average="token_group", channel_divisor="nonzero_count"),
    ],
    ids=["none", "n_channels", "nonzero_count", "token_group"],
)
def test_b53_micro_batches_do_not_change_the_gradient(cfg):
    """B53: rows of 10, 20, 30, 40 tokens, 6 channels; micro-batches of 4, 2, 1 rows (1e-5)."""
    rng = np.random.default_rng(53)
    response = np.arange(40) < np.asarray([10, 20, 30, 40])[:, None]
    mask = (rng.random((4, 6, 40)) < 0.6) & response[:, None]
    mask[0, 3] = False
    old = -rng.exponential(1.0, (4, 40))
    logp = old + 0.3 * rng.standard_normal((4, 40))
    adv = rng.standard_normal((4, 6, 1)) * mask
    adv[:, 5] = 0.0  # a channel without advantages
    # every row is its own prompt, so that a micro-batch may hold any number of rows
    parts = [np.float32(logp), np.float32(old), np.float32(adv), mask]
    logp, old, adv, mask = (jnp.asarray(x)[:, None] for x in parts)
    (whole, _), want = loss_and_grad(logp, old, adv, mask, cfg)
    totals = channel_totals(mask, cfg)
    for size in (4, 2, 1):
        sums, grads = jnp.zeros(6), []
        for start in range(0, 4, size):
            rows = slice(start, start + size)
            part = [x[rows] for x in (logp, old, adv, mask)]
            part_sums, grad = part_grad(*part, totals, cfg)
            sums, grads = sums + part_sums, [*grads, grad]
        divisor = channel_divisor(sums, cfg)
        got = jnp.concatenate(grads) / divisor
        np.testing.assert_allclose(objective(sums, totals, cfg) / divisor, whole.loss, rtol=1e-5)
        assert jnp.linalg.norm(got - want) <= 1e-5 * jnp.linalg.norm(want)


def test_b53_released_divisor_depends_on_the_split(batch):
    """B53: with the micro divisor, a channel that is silent in one part changes the loss."""
    data = batch(4)
    data["rewards"][0, :, 2:] = 0.0
    cfg = PolicyLossConfig(channel_divisor="nonzero_count", divisor_scope="micro")
    terms = terms_of(*arrays(data), cfg)
    by_prompt = combined(terms.sum, terms.weight, cfg)
    at_once = combined(terms.sum.sum(0)[None], terms.weight.sum(0)[None], cfg)
    assert abs(float(by_prompt.loss - at_once.loss)) > 1e-3
    same = PolicyLossConfig(channel_divisor="nonzero_count")
    np.testing.assert_allclose(
        combined(terms.sum, terms.weight, same).loss,
        combined(terms.sum.sum(0)[None], terms.weight.sum(0)[None], same).loss,
        rtol=1e-5,
    )


@pytest.mark.parametrize("divisor", ["nonzero_count", "n_channels", "none"])
@pytest.mark.parametrize("scope", ["global", "micro"])
def test_b52_nothing_to_train_on_is_exactly_zero(batch, divisor, scope):
    """B52: no advantage anywhere, no token anywhere, or no token in one channel: finite, exact."""
    cfg = PolicyLossConfig(channel_divisor=divisor, divisor_scope=scope)
    logp, old, adv, mask = arrays(batch(5))
    for empty in ((adv * 0, mask), (adv, mask & False)):
        (got, terms), grad = loss_and_grad(logp, old, *empty, cfg)
        assert float(got.loss) == 0.0 and not np.any(grad) and not np.any(got.channels)
        assert all(np.isfinite(value) for value in metric_means(terms.metrics).values())
    silent = mask.at[:, :, 1].set(False)
    (got, _), grad = loss_and_grad(logp, old, adv, silent, cfg)
    assert float(got.channels[1]) == 0.0 and np.isfinite(grad).all()
    rest = np.asarray([0, 2, 3, 4, 5])
    (five, _), grad_five = loss_and_grad(logp, old, adv[:, :, rest], silent[:, :, rest], cfg)
    scale = 5 / 6 if divisor == "n_channels" else 1.0
    np.testing.assert_allclose(grad, grad_five * scale, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(got.loss, five.loss * scale, rtol=1e-5)


def test_b46_cut_responses_leave_numerator_and_denominator(batch):
    """B46, B52: masking a cut row out equals a batch without it; all rows cut give zero."""
    data = batch(6)
    cfg = PolicyLossConfig()
    logp, old, adv, mask = arrays(data)
    cut = mask.at[:, 1].set(False)
    (got, _), grad = loss_and_grad(logp, old, adv, cut, cfg)
    keep = np.asarray([0, 2, 3])
    (want, _), want_grad = loss_and_grad(*(x[:, keep] for x in (logp, old, adv, mask)), cfg)
    np.testing.assert_allclose(got.channels, want.channels, **TOLERANCE)
    np.testing.assert_allclose(grad[:, keep], want_grad, **TOLERANCE)
    assert not np.any(grad[:, 1])


def test_values_at_masked_tokens_do_not_matter(batch):
    """Padding may hold infinities (log of zero) without reaching the loss or its gradient."""
    logp, old, adv, mask = arrays(batch(7))
    used = mask.any(2)
    cfg = PolicyLossConfig(dual_clip=3.0)
    (want, _), want_grad = loss_and_grad(logp, old, adv, mask, cfg)
    dirty = [jnp.where(used, x, -jnp.inf) for x in (logp, old)]
    (got, terms), grad = loss_and_grad(*dirty, adv, mask, cfg)
    np.testing.assert_array_equal(got.channels, want.channels)
    np.testing.assert_array_equal(grad, want_grad)
    assert all(np.isfinite(value) for value in metric_means(terms.metrics).values())


def test_metrics_are_masked_means(batch):
    """ppo_kl counts each response token once, whatever the number of channels; numpy as reference."""
    data = batch(8, spread=1.5)
    cfg = PolicyLossConfig(dual_clip=3.0)
    response = jnp.asarray(data["response"])
    terms = terms_of(*arrays(data), cfg, response_mask=response)
    got = {name: float(value) for name, value in metric_means(terms.metrics).items()}
    d = (data["logp"] - data["old"]).astype(np.float64)
    a = data["rewards"][..., None] * data["mask"]
    over = (a > 0) & (d > np.log(1.28))[:, :, None] | (a < 0) & (d < np.log(0.8))[:, :, None]
    dual = (a < 0) & (d > np.log(3.0))[:, :, None]
    want = {
        "ppo_kl": -d[data["response"]].mean(),
        "entropy": -data["logp"][data["response"]].mean(),
        "clipfrac_higher": over[data["mask"]].mean(),
        "clipfrac_lower": dual[data["mask"]].mean(),
    }
    assert got == pytest.approx(want, abs=2e-6) and got["clipfrac_lower"] > 0
    plain = terms_of(*arrays(data), PolicyLossConfig())
    assert float(metric_means(plain.metrics)["clipfrac_lower"]) == 0.0


@pytest.mark.parametrize("average", ["token_batch", "token_group"])
def test_kl_term_is_added_once(batch, average):
    """loss = policy + coef * mean KL over response tokens; value and gradient against torch."""
    data = batch(9)
    cfg = PolicyLossConfig(kl_coef=0.3, channel_divisor="n_channels", average=average)
    logp, old, adv, mask = arrays(data)
    ref = data["old"] - 0.2
    response = jnp.asarray(data["response"])

    def loss(logp):
        terms = batch_policy_loss(
            logp, old, adv, mask, cfg, response_mask=response, ref=jnp.asarray(ref)
        )
        return combine(terms.sum, terms.weight, cfg, penalty=terms.penalty).loss

    got, grad = jax.jit(jax.value_and_grad(loss))(logp)
    leaf = reference.tensor(data["logp"]).requires_grad_()
    tensors = [reference.tensor(data[key]) for key in ("old", "mask", "response")]
    adv_t = reference.tensor(data["rewards"])[..., None].expand(tensors[1].shape)
    policy = reference.batch_loss(leaf, tensors[0], adv_t, tensors[1], average=average).sum() / 6
    tokens = reference.kl(leaf, reference.tensor(ref), "low_var_kl") * tensors[2]
    if average == "token_batch":
        mean = tokens.sum() / tensors[2].sum()
    else:
        mean = (tokens.sum((1, 2)) / tensors[2].sum((1, 2))).mean()
    want = policy + 0.3 * mean
    (want_grad,) = torch.autograd.grad(want, leaf)
    np.testing.assert_allclose(got, want.item(), **TOLERANCE)
    np.testing.assert_allclose(grad, want_grad.numpy(), **TOLERANCE)


def test_bad_settings_are_refused(batch):
    for options, message in (
        ({"channel_divisor": "count"}, "channel_divisor='count'; one of nonzero_count"),
        ({"divisor_scope": "rank"}, "divisor_scope='rank'"),
        ({"average": "seq"}, "average='seq'"),
        ({"nan_policy": "skip"}, "nan_policy='skip'"),
        ({"kl_placement": "token"}, "kl_placement='token'"),
        ({"ratio": "group"}, "ratio='group'"),
        ({"entropy": "full"}, "entropy='full'"),
        ({"correction": "group"}, "correction='group'"),
        ({"correction_cap": 0.5}, "correction_cap=0.5"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"kl": "k9"}, "unknown KL kind"),
        ({"kl": "full"}, "kl=full"),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyLossConfig(**options)
    one = [x[0] for x in arrays(batch(0))]
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs the reference"):
        policy_loss(*one, PolicyLossConfig(kl_coef=0.1))
