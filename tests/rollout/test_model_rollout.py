"""The engine on a real (tiny, random) Qwen2.5-VL against re-forwarding and against transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models.qwen25vl import model as qwen
from evisrag_jax.pages.patches import reading_order_patches, stack_pages
from evisrag_jax.prompts.chat import batch_prompts
from evisrag_jax.rollout import generate
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.training.page_cache import CachedPage

PROGRAMS = tuple(
    getattr(generate, name)
    for name in (
        "prepare",
        "encode",
        "empty_pool",
        "prefill",
        "empty_slots",
        "admit",
        "shrink",
        "decode",
        "results",
    )
)
GREEDY = SamplingConfig(temperature=0.0, max_tokens=32)
forward = jax.jit(qwen.prefill, static_argnums=1)
head = jax.jit(qwen.logits, static_argnums=1)
encode = jax.jit(qwen.encode_images, static_argnums=1)


def full_forward(params, config, request, ids, length=160):
    """Logits [len(ids) + 1, V] of each response token, from one uncached pass over prompt and response."""
    prompt = batch_prompts([request.prompt], length=length, tokens_per_image=9)
    n, t = len(request.prompt.ids), len(ids)
    prompt.tokens[0, n : n + t] = ids
    prompt.positions[0, :, n : n + t] = request.prompt.next_position + np.arange(t)
    prompt.lengths[0] = n + t
    images = stack_pages([request.pages], images=2, windows=4, tokens=9)
    if not request.pages:
        images = images._replace(
            patches=np.zeros((1, 2, 4, 16, 588), np.float32),
            mask=np.zeros((1, 2, 4, 16), bool),
            rowcol=np.zeros((1, 2, 4, 16, 2), np.int32),
        )
    features = encode(params, config, images)
    hidden, _ = forward(params, config, jax.tree.map(jnp.asarray, prompt), features)
    return np.asarray(head(params, config, hidden))[0, n - 1 : n + t]


def scores(params, config, request, completion, temperature=1.0):
    """log softmax(logits / T) of the completion's ids, from the uncached pass, in numpy."""
    logits = full_forward(params, config, request, completion.ids)[:-1] / temperature
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(completion.length), completion.ids]


def allowed(engine, logits):
    """Logits without the ids that the engine never samples."""
    return np.where(np.asarray(engine._banned), -np.inf, logits)


def ids(completions):
    return [[c.ids.tolist() for c in group] for group in completions]


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine()


@pytest.fixture(scope="module")
def greedy(engine, requests):
    return engine.generate(requests, GREEDY)


def test_b22_cached_greedy_decode_equals_re_forwarding_every_step(
    engine, greedy, requests, params, config
):
    """32 tokens; each is the argmax of an uncached pass over everything before it."""
    for request, (completion,) in zip(requests, greedy, strict=True):
        logits = allowed(engine, full_forward(params, config, request, completion.ids))
        expected = logits[: completion.length].argmax(-1)
        np.testing.assert_array_equal(completion.ids, expected)
        assert completion.length == 32 or completion.finish == "stop"
    assert len({tuple(c.ids.tolist()) for (c,) in greedy}) == 4, "the pages and texts must matter"


def test_b22_a_second_prompt_on_the_same_program_starts_afresh(make_engine, requests):
    """P1 (pages, negative offset) then P2 (text): P2's tokens are those of a new program, nothing recompiles."""
    settings = SamplingConfig(temperature=0.0, max_tokens=16)
    engine = make_engine(prompts=1, response=16)
    engine.generate(requests[:1], settings, step=1)
    size = [program._cache_size() for program in PROGRAMS]
    second = engine.generate(requests[2:3], settings, step=2)
    assert [program._cache_size() for program in PROGRAMS] == size
    for program in PROGRAMS:
        program.clear_cache()
    assert ids(make_engine(prompts=1, response=16).generate(requests[2:3], settings)) == ids(second)


def test_b23_padding_on_the_right_changes_nothing(make_engine, requests, params, config):
    """Last-token logits within 1e-4 and 16 greedy tokens equal, unpadded and with 7 and 50 pads."""
    request, settings = requests[0], SamplingConfig(temperature=0.0, max_tokens=16)
    size = len(request.prompt.ids)
    images = stack_pages([request.pages], images=2, windows=4, tokens=9)
    features = encode(params, config, images)
    logits, tokens = [], []
    for pads in (0, 7, 50):
        arrays = batch_prompts([request.prompt], length=size + pads, tokens_per_image=9)
        arrays = jax.tree.map(jnp.asarray, arrays)
        hidden, _ = forward(params, config, arrays, features)
        last = qwen.last_hidden(hidden, arrays.lengths)
        logits.append(np.asarray(head(params, config, last)))
        engine = make_engine(prompts=1, length=size + pads, response=16)
        tokens.append(ids(engine.generate([request], settings)))
    assert max(np.abs(a - logits[0]).max() for a in logits[1:]) < 1e-4
    assert tokens[0] == tokens[1] == tokens[2]


def test_b23_a_prompt_padded_on_the_left_is_refused_by_name(engine, ask, special):
    good = ask("padded", "hi").prompt
    n = len(good.ids) + 2
    bad = dataclasses.replace(
        good,
        ids=np.concatenate([np.full(2, special.endoftext, np.int32), good.ids]),
        positions=np.zeros((3, n), np.int32),
        image_slot=np.full(n, -1, np.int32),
        image_token=np.zeros(n, np.int32),
    )
    with pytest.raises(ValueError, match="padded.*left"):
        engine.generate([dataclasses.replace(ask("padded", "hi"), prompt=bad)], GREEDY)


def test_b17_rows_with_two_and_one_images_do_not_mix(engine, requests, ask, page, params, config):
    """Batched log-probs equal single-row ones within 1e-4; another image in row B changes row B only."""
    a, b = requests[0], requests[1]
    other = ask("one", "which?", [page(99)])
    settings = SamplingConfig(max_tokens=8)
    both = engine.generate([a, b], settings, group=2)
    alone = [engine.generate([r], settings, group=2)[0] for r in (a, b)]
    assert ids(both) == ids(alone)
    for group, single in zip(both, alone, strict=True):
        for x, y in zip(group, single, strict=True):
            np.testing.assert_allclose(x.logp, y.logp, atol=1e-4)
    swapped = engine.generate([a, other], settings, group=2)
    assert ids(swapped)[0] == ids(both)[0]
    np.testing.assert_array_equal(swapped[0][0].logp, both[0][0].logp)
    assert np.abs(swapped[1][0].logp[0] - both[1][0].logp[0]) > 1e-3
    # Group order: sample g of request r is scored by r's own pages (A1 A2 A1 A2, B1 B1).
    for request, group in zip((a, b), both, strict=True):
        assert group[0].ids.tolist() != group[1].ids.tolist()
        for completion in group:
            expected = scores(params, config, request, completion)
            np.testing.assert_allclose(completion.logp, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_b51_on_policy_ratio_is_one(engine, requests, params, config, temperature):
    """max |ratio - 1| < 1e-4 between sampled log-probs and a full forward divided by T (float32, CPU).

    top_p, top_k and a penalty change what is drawn, not what is reported.
    """
    settings = [
        SamplingConfig(temperature=temperature, max_tokens=12),
        SamplingConfig(temperature=temperature, max_tokens=12, top_p=0.7),
        SamplingConfig(temperature=temperature, max_tokens=12, top_k=9),
        SamplingConfig(temperature=temperature, max_tokens=12, repetition_penalty=1.3),
    ]
    out = engine.generate(requests, settings, group=2, seed=3)
    worst = 0.0
    for request, group in zip(requests, out, strict=True):
        for completion in group:
            new = scores(params, config, request, completion, temperature)
            worst = max(worst, float(np.abs(np.exp(new - completion.logp) - 1).max()))
    assert worst < 1e-4


def test_samples_do_not_depend_on_batch_place_or_group_size(engine, make_engine, requests):
    """Equal ids for equal (seed, step, id, sample) whatever P, G, the order and the mesh; logp within 1e-5."""
    from evisrag_jax.runtime.mesh import make_mesh, replicated

    settings = SamplingConfig(max_tokens=12, top_p=0.95)
    base = engine.generate(requests, settings, group=2, seed=11, step=4)
    turned = engine.generate(requests[::-1], settings, group=2, seed=11, step=4)[::-1]
    wide = make_engine(prompts=2, length=120).generate(requests, settings, group=3, seed=11, step=4)
    mesh = make_mesh(data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])
    spread = make_engine(params=jax.device_put(engine.params, replicated(mesh)), mesh=mesh)
    spread = spread.generate(requests, settings, group=2, seed=11, step=4)
    assert ids(turned) == ids(base) == ids(spread)
    assert [group[:2] for group in ids(wide)] == ids(base)
    for other in (turned, wide, spread):
        for group, base_group in zip(other, base, strict=True):
            for x, y in zip(group, base_group, strict=False):
                np.testing.assert_allclose(x.logp, y.logp, atol=1e-5)
    assert ids(engine.generate(requests, settings, group=2, seed=11, step=5)) != ids(base)
    assert ids(engine.generate(requests, settings, group=2, seed=12, step=4)) != ids(base)


def test_nothing_recompiles_across_steps_and_no_transfer_is_implicit(engine, requests):
    """A table of one bucket is one program a function, whatever the settings, seed, step and number of requests."""
    engine.generate(requests, SamplingConfig(max_tokens=4), group=2)
    sizes = [program._cache_size() for program in PROGRAMS]
    with jax.transfer_guard("disallow"):
        for step in range(3):
            settings = SamplingConfig(
                temperature=0.5 * step, top_p=0.9, max_tokens=4 + step, repetition_penalty=1.1
            )
            engine.generate(requests[: step + 1], settings, group=2, seed=step, step=step)
    assert [program._cache_size() for program in PROGRAMS] == sizes


@pytest.mark.parametrize("slots", [2, 3, 8, 16])
def test_the_schedule_changes_no_token(engine, make_engine, requests, slots):
    """2, 3, 8 and 16 slots over one resident prompt or four, in order or shuffled, with responses of
    many lengths: the same ids as with a slot for each, and log-probs within 1e-5."""
    settings = [SamplingConfig(max_tokens=n, top_p=0.95) for n in (12, 3, 7, 12)]
    base = engine.generate(requests, settings, group=4, seed=5, step=2)
    assert len({c.length for group in base for c in group}) > 2
    few = make_engine(slots=slots, prompts=1 if slots < 8 else 4)
    order = [2, 0, 3, 1]
    seen = []
    shuffled = few.generate(
        [requests[i] for i in order],
        [settings[i] for i in order],
        group=4,
        seed=5,
        step=2,
        on_group=lambda i, done: seen.append((i, done)),
    )
    assert sorted(i for i, _ in seen) == [0, 1, 2, 3], "each group once"
    assert all(done == shuffled[i] for i, done in seen)
    for i, got in zip(order, shuffled, strict=True):
        for x, y in zip(got, base[i], strict=True):
            assert x.ids.tolist() == y.ids.tolist() and x.finish == y.finish
            np.testing.assert_allclose(x.logp, y.logp, atol=1e-5)


def test_given_features_take_the_place_of_the_tower(engine, requests, params, config):
    """Features computed beforehand: the same tokens, the tower's program is not run, and no patches are
    read; nor for a text prompt by itself."""
    given = []
    for request in requests:
        features = []
        for page in request.pages:
            images = stack_pages([[page]], images=1, windows=4, tokens=9)
            found = np.asarray(encode(params, config, images))[0]
            features.append(found[: len(page.merged_index)])
        light = tuple(CachedPage(page, lambda: pytest.fail("read")) for page in request.pages)
        given.append(dataclasses.replace(request, pages=light, features=tuple(features)))
    base = engine.generate(requests, GREEDY)
    assert engine.times["encode"] > 0
    assert ids(engine.generate(given, GREEDY)) == ids(base)
    assert engine.times["encode"] == 0
    text = next(i for i, request in enumerate(given) if not request.pages)
    assert ids(engine.generate([given[text]], GREEDY)) == ids([base[text]])
    assert engine.times["encode"] == 0
    with pytest.raises(ValueError, match="its features have"):
        engine.generate([dataclasses.replace(given[0], features=given[0].features[:-1])], GREEDY)


def test_a_bfloat16_model_runs(make_engine, requests, params):
    half = qwen.cast_params(params, jnp.bfloat16)
    engine = make_engine(params=half, images=0, windows=0, tokens=0, prompts=1, response=16)
    ((out,),) = engine.generate(requests[2:3], SamplingConfig(max_tokens=6))
    assert out.finish != "error" and np.isfinite(out.logp).all() and out.logp.dtype == np.float32


def test_params_can_be_replaced(engine, make_engine, requests, greedy, params):
    other = jax.device_put(jax.tree.map(lambda a: a * np.float32(1.01), jax.device_get(params)))
    assert ids(engine.generate(requests, GREEDY)) == ids(greedy)
    size = generate.decode._cache_size()
    assert ids(engine.generate(requests, GREEDY, params=other)) != ids(greedy)
    assert ids(engine.generate(requests, GREEDY)) == ids(greedy)
    changed = make_engine()
    changed.set_params(other)
    assert ids(changed.generate(requests, GREEDY)) != ids(greedy)
    assert generate.decode._cache_size() == size


def test_greedy_text_equals_transformers_token_for_token(
    engine, greedy, requests, params, config, tmp_path
):
    """32 greedy tokens of torch's Qwen2.5-VL from the exported folder, also with a repetition penalty."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2_5_VLForConditionalGeneration

    from evisrag_jax.models.qwen25vl.weights import save_params

    save_params(params, config, tmp_path, dtype=np.float32)
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    banned = np.flatnonzero(np.asarray(engine._banned)).tolist()
    penalty = 1.2
    settings = SamplingConfig(temperature=0.0, max_tokens=32, repetition_penalty=penalty)
    penalised = engine.generate(requests, settings)
    assert ids(penalised) != ids(greedy)
    for request, (plain,), (held,) in zip(requests, greedy, penalised, strict=True):
        tokens = torch.from_numpy(request.prompt.ids.astype(np.int64))[None]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs["mm_token_type_ids"] = torch.from_numpy(
            (request.prompt.image_slot >= 0).astype(np.int64)
        )[None]
        if request.pages:
            frames = [reading_order_patches(p).reshape(-1, 3, 1, 196) for p in request.pages]
            pixels = np.concatenate([np.repeat(f, 2, axis=2).reshape(len(f), -1) for f in frames])
            inputs["pixel_values"] = torch.from_numpy(pixels)
            inputs["image_grid_thw"] = torch.tensor([[1, *p.grid] for p in request.pages])
        for completion, factor in ((plain, 1.0), (held, penalty)):
            out = reference.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=32,
                suppress_tokens=banned,
                repetition_penalty=factor,
                eos_token_id=list(engine.stop_ids),
                pad_token_id=engine.stop_ids[1],
            )
            assert completion.ids.tolist() == out[0, tokens.shape[1] :].tolist()
