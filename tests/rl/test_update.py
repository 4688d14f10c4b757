"""The RL update on a tiny Qwen2.5-VL: against torch, and what must not change it."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest

from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.pages.patches import reading_order_patches
from evisrag_jax.pages.plan import processor_settings
from evisrag_jax.rl.passes import UpdateConfig, compile_params
from evisrag_jax.rl.update import rl_gradient
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training import forward
from evisrag_jax.training.batching import make_group_batch
from evisrag_jax.training.feature_cache import FeatureCache
from evisrag_jax.training.optimiser import decays, make_optimiser
from evisrag_jax.training.state import flatten, full_params, init_state
from tests.rl import update_case as u

ESTIMATORS = ("paper", "code")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return u.make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def logp(case):
    """Log-probs of the sampled ids before the update, at the sampling temperature."""
    return u.log_probs(case, u.host_batch(case, "paper"), u.rl_config("paper"))


@pytest.fixture(scope="module")
def old(logp):
    """A policy that differs from it, so that ratios lie on both sides of the clip range."""
    noise = np.random.default_rng(5).standard_normal(logp.shape)
    return (logp + 0.3 * noise).astype(np.float32)


@pytest.fixture(scope="module")
def base(case, old):
    """The update of both estimators, whole batch on one device."""
    batches = {name: u.host_batch(case, name, old=old) for name in ESTIMATORS}
    return {name: u.update(case, batches[name], u.rl_config(name)) for name in ESTIMATORS}


@pytest.fixture(scope="module")
def released(case, old):
    """The released divisor: channels that are not silent, counted in every micro-batch of one prompt."""
    rl = u.rl_config("code", scope="micro", micro=1)
    return u.update(case, u.host_batch(case, "code", old=old), rl)


@pytest.fixture(scope="module")
def expected(case, old, tmp_path_factory):
    """Torch: name → (loss, gradients in our layout), from transformers' model, one response at a time
    behind its own copy of the prompt, and the equations of `torch_reference`."""
    torch = pytest.importorskip("torch", reason="the reference is torch (extra: test)")
    from transformers import Qwen2_5_VLForConditionalGeneration

    from tests.rl import torch_reference as reference

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(case.folder, dtype=torch.float32)
    spare = copy.deepcopy(model)
    ids = u.responses()
    rows = []
    for item, group in zip(case.items, ids, strict=True):
        for one in group:
            row = _torch_logp(torch, model, item, one) if one else torch.zeros(0)
            rows.append(torch.nn.functional.pad(row.double(), (0, u.T - len(one))))
    logp = torch.stack(rows).reshape(u.P, u.G, u.T)
    before = reference.tensor(old)
    response = reference.tensor(u.masks("paper")[:, :, 2])

    def losses():
        paper, code = ([reference.tensor(f(n)) for f in (u.rewards, u.masks)] for n in ESTIMATORS)
        values = reference.token_advantages(*paper, u.VALID, "scope")
        one = (values[:, :, None], response[:, :, None])
        yield "paper", reference.batch_loss(logp, before, *one).sum()
        mask = code[1]
        values = reference.channel_advantages(code[0], u.VALID)[..., None] * mask
        channels = reference.batch_loss(logp, before, values, mask, dual=3.0)
        yield "code", channels.sum() / (channels != 0).sum()
        counts = mask.sum((1, 3))
        parts = []
        for p in range(u.P):
            rows = (x[p : p + 1] for x in (logp, before, values, mask))
            sums = reference.batch_loss(*rows, dual=3.0) * counts[p]
            silent = (sums == 0).all()
            parts.append(0 if silent else (sums / counts.sum(0)).sum() / (sums != 0).sum())
        yield "released", sum(parts)

    out = {}
    for name, loss in losses():
        model.zero_grad()
        loss.backward(retain_graph=True)
        folder = tmp_path_factory.mktemp(f"gradients-{name}")
        with torch.no_grad():
            for place, p in zip(spare.parameters(), model.parameters(), strict=True):
                place.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        spare.save_pretrained(folder)
        out[name] = loss.item(), flatten(load_params(folder)[0])
    return out


def _torch_logp(torch, model, item, ids):
    """[T] log softmax(logits / temperature) of one response."""
    prompt = torch.from_numpy(item.prompt.ids.astype(np.int64))
    whole = torch.cat([prompt, torch.tensor(ids)])[None]
    inputs = {"input_ids": whole}
    if item.pages:
        pixels = np.concatenate([reading_order_patches(page) for page in item.pages])
        pixels = np.repeat(pixels.reshape(len(pixels), 3, 1, 196), 2, axis=2)
        inputs["pixel_values"] = torch.from_numpy(pixels.reshape(len(pixels), -1))
        inputs["image_grid_thw"] = torch.tensor([[1, *page.grid] for page in item.pages])
        inputs["mm_token_type_ids"] = (whole == model.config.image_token_id).int()
    logits = model(**inputs).logits[0, len(prompt) - 1 : -1] / u.TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("name", [*ESTIMATORS, "released"])
def test_loss_and_gradient_equal_torch(base, released, expected, name):
    """Loss 1e-5 absolute, every tensor's gradient 1e-4 relative; ratios far from 1, dual clip in "code"."""
    step = released if name == "released" else base[name]
    loss, grads = expected[name]
    assert step.metrics["loss/total"] == pytest.approx(loss, abs=1e-5)
    assert step.metrics["loss/clipfrac_higher"] > 0.05
    trained = {path: grads[path] for path in step.grads}
    assert all(path.startswith("text/") for path in trained)
    errors = u.relative(step.grads, trained)
    assert max(errors.values()) < 1e-4, errors


def test_first_step_is_adamw_in_closed_form(base):
    """p - rate · (g / (|g| + eps) + decay · p), decay on matrices alone; update 2e-4 relative (float32
    parameters near 1); the tower stays bitwise."""
    step = base["paper"]
    decayed = decays(step.before.trainable)
    for path, p in step.before.trainable.items():
        g = step.grads[path]
        want = -1e-3 * (g / (np.abs(g) + u.OPTIM.eps) + 0.1 * decayed[path] * np.float64(p))
        got = np.float64(step.after.trainable[path]) - p
        assert np.linalg.norm(got - want) < 2e-4 * np.linalg.norm(want), path
    jax.tree.map(np.testing.assert_array_equal, step.after.frozen, step.before.frozen)
    assert int(step.after.step) == 1 and step.metrics["lr"] == pytest.approx(1e-3)


# (estimator, micro, mesh of data, fsdp, tensor)
VARIANTS = [
    ("paper", 1, (1, 1, 1)),
    ("paper", 2, (2, 1, 1)),
    ("paper", 4, (4, 1, 1)),
    ("paper", 2, (1, 2, 2)),
    ("code", 1, (1, 1, 1)),
    ("code", 2, (2, 2, 1)),
]


@pytest.mark.parametrize(("name", "micro", "devices"), VARIANTS)
def test_b53_slices_and_devices_change_nothing(case, old, base, name, micro, devices):
    """B53: rows of 10, 20, 30, 40 tokens, micro-batches of 4, 2, 1 prompts, data, fsdp and tensor
    meshes: loss 1e-6, gradients 1e-5 relative."""
    batch = u.host_batch(case, name, old=old)
    step = u.update(case, batch, u.rl_config(name, micro=micro), devices)
    assert step.metrics["loss/total"] == pytest.approx(base[name].metrics["loss/total"], abs=1e-6)
    errors = u.relative(step.grads, base[name].grads)
    assert max(errors.values()) < 1e-5, errors
    same = ("rollout/trained_tokens", "loss/clipfrac_higher", "loss/entropy", "loss/ppo_kl")
    for metric in same:
        assert step.metrics[metric] == pytest.approx(base[name].metrics[metric], rel=1e-4)


def test_b29_padding_prompts_change_nothing_on_eight_devices(case, old, base):
    """B29, B53: four empty rows fill P = 8 on 8 devices; finite, equal to the batch without (1e-5)."""
    batch = u.host_batch(case, "paper", old=old, prompts=8)
    step = u.update(case, batch, u.rl_config("paper", prompts=8), (8, 1, 1))
    assert step.metrics["rollout/trained_tokens"] == u.LENGTHS.sum()
    assert step.metrics["loss/total"] == pytest.approx(
        base["paper"].metrics["loss/total"], abs=1e-6
    )
    errors = u.relative(step.grads, base["paper"].grads)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", ESTIMATORS)
def test_b29_what_a_padding_response_holds_does_not_matter(case, old, base, name):
    """Ids, rewards, log-probs and masks of a response that is not valid: gradients stay bitwise."""
    batch = u.host_batch(case, name, old=old)
    tokens, lengths = batch.groups.tokens.copy(), batch.groups.lengths.copy()
    tokens[0, 2, :25], lengths[0, 2] = 20, 25
    values, masks, before = batch.rewards.copy(), batch.masks.copy(), old.copy()
    values[0, 2], masks[0, 2], before[0, 2] = 99.0, True, -1e4
    groups = batch.groups._replace(tokens=tokens, lengths=lengths)
    other = {"groups": groups, "old": before, "rewards": values, "masks": masks}
    step = u.update(case, batch._replace(**other), u.rl_config(name))
    jax.tree.map(np.testing.assert_array_equal, step.grads, base[name].grads)


def test_b53_released_divisor_depends_on_the_split(base, released):
    """B53: counted a micro-batch it gives another gradient than counted once, by what is documented:
    prompts in which fewer channels speak weigh more. It is an option of its own for that reason."""
    errors = u.relative(released.grads, base["code"].grads)
    assert min(errors.values()) > 1e-2


@pytest.mark.parametrize("why", ["equal rewards", "all cut", "no response"])
def test_b52_nothing_to_train_on_moves_nothing(case, old, base, why):
    """B52: loss and gradient exactly 0, parameters and moments bitwise as before, no NaN; the next
    step equals that step alone, bitwise."""
    batch = u.host_batch(case, "paper", old=old)
    empty = {
        "equal rewards": batch._replace(rewards=np.full_like(batch.rewards, 0.7)),
        "all cut": batch._replace(trained=np.zeros_like(batch.trained)),
        "no response": batch._replace(valid=np.zeros_like(batch.valid)),
    }[why]
    rl = u.rl_config("paper")
    idle = u.update(case, empty, rl)
    assert idle.metrics["loss/total"] == idle.metrics["loss/grad_norm"] == 0.0
    assert idle.metrics["optim/empty"] == 1 and np.isfinite(list(idle.metrics.values())).all()
    parts = ("trainable", "frozen")
    for part in parts:
        jax.tree.map(
            np.testing.assert_array_equal, getattr(idle.after, part), getattr(idle.before, part)
        )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((idle.adam.mu, idle.adam.nu)))
    after = u.update(case, batch, rl, state=idle.after)
    jax.tree.map(
        np.testing.assert_array_equal, after.after.trainable, base["paper"].after.trainable
    )
    jax.tree.map(np.testing.assert_array_equal, after.adam, base["paper"].adam)


def test_b52_a_silent_micro_batch_is_no_nan(released):
    """B52: the second prompt's six channels have no advantage, the first has a channel without tokens."""
    assert np.isfinite(released.metrics["loss/total"]) and released.metrics["loss/total"] != 0
    assert all(np.isfinite(g).all() for g in released.grads.values())


def test_b46_cut_responses_count_in_the_baseline_alone(case, old, base):
    """B46: left out, a response gives the loss no token; the others keep their advantages. Equal to
    the whole batch in which its loss terms are taken away: its tokens have the same log-prob either way,
    so the sum of the two parts, weighted by tokens, is the whole gradient (1e-4)."""
    batch = u.host_batch(case, "paper", old=old)
    cut = u.VALID.copy()
    cut[:, 0] = False
    rl, tokens = u.rl_config("paper"), u.LENGTHS.sum()
    kept = u.update(case, batch._replace(trained=cut), rl)
    rest = u.update(case, batch._replace(trained=u.VALID & ~cut), rl)
    assert kept.metrics["rollout/trained_tokens"] == tokens - u.LENGTHS[:, 0].sum()
    shares = [s.metrics["rollout/trained_tokens"] / tokens for s in (kept, rest)]
    whole = {path: shares[0] * g + shares[1] * rest.grads[path] for path, g in kept.grads.items()}
    errors = u.relative(whole, base["paper"].grads)
    assert max(errors.values()) < 1e-4, errors


def test_several_updates_keep_the_old_policy(case, logp):
    """The first update's ratio is 1 and its gradient that of an update without `old` (1e-5); in the
    second the ratio has moved."""
    rl = u.rl_config("paper")
    batch = u.host_batch(case, "paper", old=logp)
    first = u.update(case, batch, rl)
    assert abs(first.metrics["loss/ppo_kl"]) < 1e-6
    alone = u.update(case, batch._replace(old=None, sampled=logp), rl)
    errors = u.relative(first.grads, alone.grads)
    assert max(errors.values()) < 1e-5, errors
    assert alone.metrics["loss/ppo_kl"] == 0 and alone.metrics["rollout/logp_gap_max"] < 1e-5
    second = u.update(case, batch, rl, state=first.after)
    assert abs(second.metrics["loss/ppo_kl"]) > 1e-4
    gap = "rollout/logp_gap_mean"
    assert second.metrics[gap] == pytest.approx(first.metrics[gap], rel=1e-6), "of old, not of new"


@pytest.fixture(scope="module")
def features(case):
    """A cache with the case's tower."""
    _, layout = processor_settings(case.folder)
    mesh = make_mesh(devices=jax.devices()[:1])
    sizes = [(u.BUCKET.windows, u.BUCKET.tokens)]
    cache = FeatureCache(case.config, layout, sizes, dtype="float32", mesh=mesh, max_bytes=2**20)
    cache.take(case.params)
    return cache


def featured(case, features, **changes):
    ids = u.responses()
    return make_group_batch(case.items, [u.BUCKET], responses=ids, features=features, **changes)


@pytest.mark.parametrize(
    ("name", "micro", "devices", "prompts"),
    [("paper", 0, 1, 5), ("code", 1, 1, 4), ("paper", 4, 4, 4)],
)
def test_cached_features_give_the_update_of_the_pages(
    case, old, base, features, name, micro, devices, prompts
):
    """The tower runs outside of the update: loss 1e-6, every gradient 1e-5 relative to the update with
    the pages, in slices, on four devices, with a text-only prompt and (B29) an empty row."""
    groups = featured(case, features, prompts=prompts)
    assert groups.images is None and not groups.features[3:].any()
    batch = u.host_batch(case, name, old=old, prompts=prompts, groups=groups)
    rl, mesh = u.rl_config(name, micro=micro), (devices, 1, 1)
    want = base[name] if not micro else u.update(case, u.host_batch(case, name, old=old), rl, mesh)
    step = u.update(case, batch, dataclasses.replace(rl, prompts=prompts), mesh)
    assert step.metrics["loss/total"] == pytest.approx(want.metrics["loss/total"], abs=1e-6)
    errors = u.relative(step.grads, want.grads)
    assert max(errors.values()) < 1e-5, errors


def test_b17_a_page_reaches_its_own_prompt_only(case, features):
    """B17: another page in one row changes the log-probs of that row alone, bitwise."""
    items = list(case.items)
    items[1] = dataclasses.replace(items[1], pages=items[0].pages)
    swapped = dataclasses.replace(case, items=items)
    rl = u.rl_config("paper")
    one, two = (
        u.log_probs(c, u.host_batch(c, "paper", groups=featured(c, features)), rl)
        for c in (case, swapped)
    )
    same = [np.array_equal(a, b) for a, b in zip(one, two, strict=True)]
    assert same == [True, False, True, True]


@pytest.mark.parametrize("frozen", [True, False])
def test_the_tower_runs_once_a_prompt_or_not_at_all(case, features, monkeypatch, frozen):
    """A trained tower encodes P prompts, not P x G, and has a gradient (whose sum over the group is
    compared with the repeated path in tests/training); a frozen one with features never runs."""
    calls, real = [], forward.model.encode_images

    def spy(params, config, images, **settings):
        calls.append(images.patches.shape[:2])
        return real(params, config, images, **settings)

    monkeypatch.setattr(forward.model, "encode_images", spy)
    optim = dataclasses.replace(u.OPTIM, freeze="^vision" if frozen else "")
    rl = u.rl_config("paper", optim=optim)
    state = init_state(case.params, optim, make_optimiser(optim))
    groups = featured(case, features if frozen else None)
    batch = u.host_batch(case, "paper", groups=groups)
    run = functools.partial(rl_gradient, model=case.config, settings=u.settings(rl))
    grads, _ = jax.eval_shape(run, state, batch)
    assert calls == ([] if frozen else [(u.P, u.BUCKET.images)])
    assert any(path.startswith("vision/") for path in grads) != frozen


def test_old_log_probs_come_in_slices(case, logp):
    """`micro` prompts at a time give the log-probs of all at once (1e-5)."""
    batch = u.host_batch(case, "paper")
    sliced = u.log_probs(case, batch, u.rl_config("paper", micro=2))
    shown = np.arange(u.T) < u.LENGTHS[..., None]
    np.testing.assert_allclose(sliced[shown], logp[shown], atol=1e-5)


def test_the_sampler_gets_the_trainers_dtype(case):
    """float32 parameters with bfloat16 products: the sampler's are bfloat16 too, or their gap would be
    that of the formats; of one dtype nothing is copied."""
    rl = u.rl_config("paper")
    _, _, shardings = u.program(case.config, rl, (1, 1, 1))
    state = jax.device_put(u.fresh_state(case.params), shardings)
    same = compile_params(UpdateConfig(rl, "float32"), shardings)(state)
    whole = full_params(state.trainable, state.frozen)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (same, whole)), strict=True))
    cast = compile_params(dataclasses.replace(u.settings(rl), compute="bfloat16"), shardings)(state)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(cast)} == {"bfloat16"}
    for path, leaf in flatten(cast).items():
        np.testing.assert_array_equal(leaf, flatten(whole)[path].astype("bfloat16"))
