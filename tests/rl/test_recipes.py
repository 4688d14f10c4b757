"""Each recipe's loss and gradient against torch, written from its equations; identities between them.

The model is left out: log-probs are the parameters, so that gradients are those of the log-probs.
Tolerance: 1e-5 relative to the largest entry (float32 against float64).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.rewards.evisrag import RewardConfig
from evisrag_jax.rl import update
from evisrag_jax.rl.config import RLConfig, RLConfigError
from evisrag_jax.rl.filter import FilterConfig
from evisrag_jax.rl.losses import PolicyLossConfig
from evisrag_jax.rl.masked import MaskedConfig, dependency, focus
from evisrag_jax.rl.passes import UpdateConfig
from evisrag_jax.rl.recipes import RECIPES, preset
from evisrag_jax.rl.update import RLBatch, rl_gradient
from evisrag_jax.training.forward import GroupBatch, TokenScores
from evisrag_jax.training.state import TrainState
from tests.rl import tiny
from tests.rl import torch_recipes as reference

P, G, T = 3, 4, 9
LENGTHS = np.array([[9, 4, 1, 6], [5, 8, 9, 2], [7, 3, 9, 0]])
TOLERANCE = 1e-5


def arrays(seed=0, channels=4, width=T):
    """Log-probs with ratios on both sides of the clip, rewards with a constant group, three sections."""
    rng = np.random.default_rng(seed)
    shape = (P, G, width)
    lengths = np.minimum(LENGTHS, width)
    t, n = np.arange(width), lengths[..., None]
    whole = t < n
    seen, derived = whole & (t < n // 2), whole & (t >= n // 2) & (t < n - 1)
    rewards = rng.integers(0, 3, (P, G, channels)) / 2.0
    rewards[1] = rewards[1, :1]  # nothing to learn there
    logp = -rng.uniform(0.05, 2.5, shape)
    return {
        "logp": logp,
        "old": logp + rng.normal(0, 0.3, shape),
        "sampled": logp + rng.normal(0, 0.3, shape),
        "ref": logp + rng.normal(0, 0.3, shape),
        "masked": logp - rng.exponential(0.7, shape),
        "entropy": rng.uniform(0, 2, shape),
        "rewards": rewards,
        "masks": np.stack([seen, derived, whole, whole], 2)[:, :, :channels],
        "valid": lengths > 0,
        "lengths": lengths,
    }


@pytest.fixture
def gradient(monkeypatch):
    """(arrays, rl) → loss, gradients by name, metrics of `rl_gradient` with the model left out."""

    def score(trainable, frozen, groups, model, settings):
        hidden = groups.images is not None
        return TokenScores(trainable["masked" if hidden else "logp"], trainable["entropy"])

    monkeypatch.setattr(update, "score", score)
    monkeypatch.setattr(update, "gradient_norms", lambda grads: {})
    monkeypatch.setattr(update, "blackened", lambda groups, *_: groups._replace(images=jnp.ones(P)))

    def run(data, rl, **changes):
        f = {k: jnp.asarray(v, jnp.float32) for k, v in data.items() if v.dtype == float}
        groups = GroupBatch(
            None, None, jnp.zeros(data["logp"].shape, jnp.int32), jnp.asarray(data["lengths"])
        )
        fields = {
            "groups": groups,
            "sampled": f["sampled"],
            "old": f["old"],
            "rewards": f["rewards"],
            "masks": jnp.asarray(data["masks"]),
            "valid": jnp.asarray(data["valid"]),
            "trained": jnp.asarray(data["valid"]),
            "stale": jnp.zeros(P, bool),
            "ref": f["ref"] if rl.loss.kl_coef else None,
            "masked": f["masked"],
        }
        trainable = {name: f[name] for name in ("logp", "masked", "entropy")}
        state = TrainState(jnp.zeros((), jnp.int32), trainable, {}, None)
        settings = UpdateConfig(rl)
        grads, metrics = rl_gradient(
            state, RLBatch(**(fields | changes)), tiny.tiny_config(), settings
        )
        return float(metrics["loss/total"]), {k: np.asarray(g) for k, g in grads.items()}, metrics

    return run


def tensors(data):
    case = {k: torch.tensor(np.asarray(v, float)) for k, v in data.items()}
    for name in ("logp", "masked", "entropy"):
        case[name].requires_grad_()
    return case


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(1.0, np.abs(want).max()))


def three(rl: RLConfig) -> bool:
    return len(rl.reward.channels) == 3


COMPARED = ("paper", "strict", "grpo", "dapo", "dr_grpo", "gspo", "rloo", "papo", "vppo")


@pytest.mark.parametrize("recipe", COMPARED)
def test_loss_and_gradient_equal_torch(gradient, recipe):
    rl = preset(recipe, prompts=P, group=G, max_tokens=T)
    data = arrays(channels=len(rl.reward.channels))
    got, grads, _ = gradient(data, rl)
    case = tensors(data)
    want = reference.loss(case, recipe)
    want.backward()
    close(got, want.item())
    for name, grad in grads.items():
        theirs = case[name].grad
        close(grad, np.zeros(grad.shape) if theirs is None else theirs.numpy())
    assert np.abs(grads["logp"]).max() > 1e-3


def test_every_recipe_is_compared_somewhere():
    """code: tests/rl/test_policy_loss_golden.py; the others: rewards and rows of their own, GRPO's loss."""
    own = ("stepgrpo_r1vl", "stepgrpo_router", "perception_r1", "vlm_r1")
    assert set(RECIPES) == {*COMPARED, "code", *own}
    for name in own:
        rl = preset(name)
        assert rl.loss == preset("grpo").loss and rl.estimator == "grpo"


def same(gradient, data, one, other):
    """Two settings give the same loss and gradient."""
    a, grads, _ = gradient(data, one)
    b, theirs, _ = gradient(data, other)
    assert a == pytest.approx(b, abs=1e-6)
    np.testing.assert_allclose(grads["logp"], theirs["logp"], atol=1e-6)
    assert np.abs(grads["logp"]).max() > 1e-3


SIZES = {"prompts": P, "group": G, "max_tokens": T}


def test_one_channel_on_every_token_is_dapo(gradient):
    """RS-GRPO with one channel and full scopes, whether the scope is the response or scopes are off."""
    data = arrays(channels=3)
    reward = RewardConfig(unpaid=("perception", "format"))
    paper = RLConfig(reward=reward, **SIZES)
    dapo = RLConfig(reward=reward, estimator="grpo", **SIZES)
    same(gradient, data, dataclasses.replace(paper, scoped=False), dapo)
    data["masks"][:, :, 1], data["masks"][:, :, 0] = data["masks"][:, :, 2], False
    same(gradient, data, paper, dapo)


def test_scopes_off_is_the_mean_of_the_channels(gradient):
    paper = RLConfig(scoped=False, **SIZES)
    same(gradient, arrays(channels=3), paper, RLConfig(estimator="grpo", **SIZES))


def test_papo_without_its_terms_is_its_base(gradient):
    base = preset("dapo", filter=FilterConfig(), **SIZES)
    papo = preset("papo", masked=MaskedConfig(share=0.6), loss=PolicyLossConfig(), **SIZES)
    assert not papo.masked.active
    same(gradient, arrays(), papo, base)


@pytest.mark.parametrize("ratio", ["sequence", "sequence_token"])
def test_gspo_of_one_token_is_grpo(gradient, ratio):
    data = arrays(width=1, channels=3)
    clip = {"clip_low": 0.2, "clip_high": 0.2, "average": "sequence"}
    sizes = SIZES | {"max_tokens": 1}
    gspo = RLConfig(estimator="grpo", loss=PolicyLossConfig(ratio=ratio, **clip), **sizes)
    same(gradient, data, gspo, RLConfig(estimator="grpo", loss=PolicyLossConfig(**clip), **sizes))


def test_gspo_token_has_the_sequence_value_and_token_gradients(gradient):
    """On its own advantage each token of GSPO-token gets GSPO's gradient: s A / n, clipped alike."""
    data = arrays(channels=3)
    sequence, token = (
        RLConfig(estimator="grpo", loss=PolicyLossConfig(ratio=r, average="sequence"), **SIZES)
        for r in ("sequence", "sequence_token")
    )
    same(gradient, data, sequence, token)


def test_stepgrpo_with_one_step_is_grpo(gradient):
    """A row that is paid its own step's channel is GRPO with that channel alone."""
    data = arrays(channels=3)
    rewards = data["rewards"].copy()
    data["rewards"] = rewards * np.array([0.0, 1.0, 0.0])
    step = dataclasses.replace(preset("stepgrpo_router"), prompts=4, group=G, max_tokens=T)
    step_loss, step_grads, _ = gradient(data, step)
    data["rewards"] = rewards
    unpaid = RewardConfig(unpaid=("perception", "format"))
    grpo = preset("grpo", reward=unpaid, **SIZES)
    loss, grads, _ = gradient(data, grpo)
    assert loss == pytest.approx(step_loss, abs=1e-6)
    np.testing.assert_allclose(grads["logp"], step_grads["logp"], atol=1e-6)


def test_vppo_keeps_the_tokens_that_see_most():
    """Exactly ⌈0.4 n⌉ of each response, the earlier of equals; factors of mean 1, from 0.9."""
    data = arrays()
    response = jnp.asarray(np.arange(T) < data["lengths"][..., None])
    v = np.asarray(dependency(jnp.asarray(data["old"]), jnp.asarray(data["masked"])))
    assert (v >= 0).all()
    config = MaskedConfig(share=0.5, top=0.4, factor_low=0.9)
    ones = jnp.ones((P, G, 1, T)) * response[:, :, None]
    values, masks = focus(ones, response[:, :, None], jnp.asarray(v), response, config)
    count = np.asarray(masks)[:, :, 0].sum(-1)
    np.testing.assert_array_equal(count, np.ceil(np.round(0.4 * data["lengths"], 6)))
    factors = np.asarray(values).max(-1)[:, :, 0][data["lengths"] > 0]
    assert factors.mean() == pytest.approx(1.0, abs=1e-5) and factors.min() == pytest.approx(0.9)
    equal = jnp.zeros((P, G, T))
    values, masks = focus(ones, response[:, :, None], equal, response, config)
    np.testing.assert_array_equal(
        np.asarray(masks)[0, 0, 0], np.arange(T) < 4, err_msg="the earlier ones of equals"
    )
    assert np.asarray(values)[0, 0, 0, 0] == 1.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_taken_from_each_channel(gradient, kind):
    """Each channel's reward less the sum over its own tokens; of the sum of channels, once."""
    data = arrays(channels=3)
    loss = PolicyLossConfig(kl_coef=0.2, kl=kind, kl_placement="reward")
    mask = reference.tokens(tensors(data))
    kinds = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
    kl = reference.reference.kl(torch.tensor(data["old"]), torch.tensor(data["ref"]), kinds[kind])
    for estimator in ("paper", "grpo"):
        got, grads, _ = gradient(data, RLConfig(estimator=estimator, loss=loss, **SIZES))
        paid = dict(data)
        if estimator == "paper":
            own = (kl * mask)[:, :, None] * torch.tensor(data["masks"] * 1.0)
            paid["rewards"] = data["rewards"] - 0.2 * own.sum(-1).numpy()
        else:
            paid["rewards"] = data["rewards"].copy()
            paid["rewards"][..., 2] -= 0.2 * (kl * mask).sum(-1).numpy()
        want, theirs, _ = gradient(paid, RLConfig(estimator=estimator, **SIZES))
        assert got == pytest.approx(want, abs=1e-5)
        np.testing.assert_allclose(grads["logp"], theirs["logp"], atol=1e-5)


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_entropy_bonus(gradient, kind):
    """loss - 0.5 · mean entropy: of the distribution, or -logp of the sampled tokens."""
    data = arrays(channels=3)
    plain, base, _ = gradient(data, RLConfig(**SIZES))
    loss = PolicyLossConfig(entropy_coef=0.5, entropy=kind)
    got, grads, _ = gradient(data, RLConfig(loss=loss, **SIZES))
    mask = np.arange(T) < data["lengths"][..., None]
    values = data["entropy"] if kind == "exact" else -data["logp"]
    assert got == pytest.approx(plain - 0.5 * values[mask].mean(), abs=1e-5)
    share = 0.5 * mask / mask.sum()
    name, sign = ("entropy", -1) if kind == "exact" else ("logp", 1)
    np.testing.assert_allclose(grads[name] - base[name], sign * share, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sampler_correction_is_truncated(gradient, level):
    """Advantages times min(p_trainer / p_sampler, cap), over a token or over the response."""
    data = arrays(channels=3)
    loss = PolicyLossConfig(correction=level, correction_cap=1.5)
    _, grads, _ = gradient(data, RLConfig(estimator="grpo", loss=loss, **SIZES))
    _, base, _ = gradient(data, RLConfig(estimator="grpo", **SIZES))
    mask = np.arange(T) < data["lengths"][..., None]
    d = (data["old"] - data["sampled"]) * mask
    if level == "sequence":
        d = np.broadcast_to(d.sum(-1, keepdims=True), d.shape)
    weights = np.minimum(np.exp(d), 1.5)
    np.testing.assert_allclose(grads["logp"], base["logp"] * weights * mask, atol=1e-6)
    assert (weights[mask] == 1.5).any() and (weights[mask] < 1.5).any()


def test_stale_rows_come_from_the_sampler(gradient):
    """Surplus of an earlier step: its ratio is to the policy that sampled it, without a correction."""
    data = arrays(channels=3)
    loss = PolicyLossConfig(correction="token")
    stale = jnp.asarray([False, False, True])
    rl = RLConfig(estimator="grpo", loss=loss, **SIZES)
    _, grads, metrics = gradient(data, rl, stale=stale)
    other = dict(data, old=data["old"].copy(), sampled=data["sampled"].copy())
    other["old"][2] = data["sampled"][2]
    _, want, _ = gradient(other, rl)
    np.testing.assert_allclose(grads["logp"], want["logp"], atol=1e-6)
    mask = np.arange(T) < data["lengths"][..., None]
    gap = np.abs(data["old"] - data["sampled"])[:2][mask[:2]].mean()
    assert float(metrics["rollout/logp_gap_mean"]) == pytest.approx(gap, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "rloo", "scale": False}, "rloo never divides"),
        ({"estimator": "grpo", "scoped": False}, "scoped=False is a switch of estimator='paper'"),
        ({"estimator": "grpo", "scope_match": "token_ids"}, "has no scopes"),
        ({"loss": PolicyLossConfig.code(kl_coef=0.1)}, "kl_placement='channels' needs estimator"),
        (
            {"loss": PolicyLossConfig(channel_divisor="nonzero_count", entropy_coef=0.1)},
            "known after its last slice",
        ),
        ({"filter": FilterConfig("both", metric="accuracy")}, "filter.metric='accuracy'"),
        ({"step_prompts": "gold"}, "step_prompts needs an even number"),
        (
            {"step_prompts": "gold", "estimator": "grpo", "filter": FilterConfig("both")},
            "would part a record's two groups",
        ),
        ({"reward": RewardConfig(kind="r1vl")}, "estimator='paper' works on the channels"),
    ],
)
def test_contradictory_switches_are_refused(changes, message):
    with pytest.raises(RLConfigError, match=message):
        RLConfig(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": 0.1}, "coef needs pages with black patches, but share=0"),
        ({"share": 1.5}, "share=1.5; a share"),
        ({"share": 0.5, "coef": -1.0}, "coef=-1.0; not negative"),
        ({"share": 0.5, "coef": 0.1, "entropy_coef": 0.1}, "has no gradient without gradient=True"),
        ({"share": 0.5, "top": 0.4, "gradient": True}, "no term of the masked pass"),
    ],
)
def test_masked_settings_that_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MaskedConfig(**options)


def test_unknown_recipe():
    with pytest.raises(RLConfigError, match="recipe 'ppo'; one of paper, code, strict, grpo"):
        preset("ppo")
