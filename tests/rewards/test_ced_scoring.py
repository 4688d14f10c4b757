"""Scores under interventions: against torch with rows replaced in its decoder's inputs, and plain forwards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.pages.patches import make_patches
from evisrag_jax.pages.regions import prompt_tokens
from evisrag_jax.rewards.ced.audit import audit_groups
from evisrag_jax.rewards.ced.config import CedConfig, RegionConfig
from evisrag_jax.rewards.ced.controls import draw_controls
from evisrag_jax.rewards.ced.neutralise import NOTHING, Region, make_regions, neutralise
from evisrag_jax.rewards.ced.reward import gate, margin, support
from evisrag_jax.rewards.ced.scoring import intervention_logps
from evisrag_jax.training.forward import GroupBatch
from tests.models.tiny import (
    BUDGET,
    SPECIAL,
    Row,
    Shape,
    append_responses,
    largest,
    make_batch,
    make_pair,
    make_row,
    torch_inputs,
)

G, T = 3, 5
SHAPE = Shape(length=56, images=2, windows=2, tokens=12)
LENGTHS = np.array([[5, 3, 1], [5, 5, 2]])
LOGP = 2e-5  # against torch, nats
SHARED = 1e-5  # cached prefixes against full forwards, nats


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ced")
    return make_pair(folder, depth=2, full=(1,), tied=True, layers=2, width=32, seed=7)


@pytest.fixture(scope="module")
def rows(pair):
    return [make_row(pair, 71, (84, 112), (56, 84)), make_row(pair, 72, (84, 84))]


def evidence_of(rows):
    """A box on each page of the first prompt, one at the border of the second's."""
    first, second, third = (np.zeros(shape, bool) for shape in ((3, 4), (2, 3), (3, 3)))
    first[0:2, 1] = second[1, 2] = third[2, 0:2] = True
    return [(first, second), (third,)]


def regions_of(grids, config):
    """Nothing taken out, then the evidence, then its controls, whose rings spare it."""
    rows = [[NOTHING, Region(own[0]), *(Region(c, own[0]) for c in own[1:])] for own in grids]
    return make_regions(rows, SHAPE.images, SHAPE.tokens, config)


@pytest.fixture(scope="module")
def case(pair, rows):
    """(batch, regions, grids a prompt, config)."""
    prompt, images = make_batch(pair, rows, SHAPE)
    tokens = np.random.default_rng(73).integers(0, SPECIAL.endoftext, (2, G, T))
    batch = GroupBatch(prompt, images, jnp.asarray(tokens), jnp.asarray(LENGTHS))
    config = RegionConfig(controls=2, ring=1)
    grids = []
    for row, own in zip(rows, evidence_of(rows), strict=True):
        controls = draw_controls(own, row.prompt.name, config)
        grids.append([own, *controls.regions])
    return batch, regions_of(grids, config), grids, config


def scored(pair, batch, regions, **kinds):
    salts = np.arange(2, dtype=np.uint32)
    return np.asarray(intervention_logps(pair.params, pair.config, batch, regions, salts, **kinds))


def torch_logp(pair, row: Row, response, grids, regions, neutraliser):
    """log p of a response by a full torch forward whose image embeddings are replaced on their way into
    the decoder."""
    size = len(row.prompt.ids)

    def replace(module, args, kwargs):
        states = kwargs["inputs_embeds"].clone()
        for n in range(len(row.pages)):
            own = [g if i == n else np.zeros_like(g) for i, g in enumerate(grids)]
            places = prompt_tokens(own, row.prompt.image_slot, row.prompt.image_token)
            ring = regions[n][: grids[n].size].reshape(grids[n].shape)
            near = [ring if i == n else np.zeros_like(g) for i, g in enumerate(grids)]
            around = prompt_tokens(near, row.prompt.image_slot, row.prompt.image_token)
            if places.any():
                new = 0.0 if neutraliser == "zero" else states[0, :size][around].mean(0)
                states[0, :size][places] = new
        return args, kwargs | {"inputs_embeds": states}

    hook = pair.torch.model.language_model.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        with torch.no_grad():
            logits = pair.torch(**torch_inputs(row, response)).logits[0, size - 1 : -1]
    finally:
        hook.remove()
    logp = torch.log_softmax(logits, -1)
    return logp.gather(-1, torch.from_numpy(np.asarray(response, np.int64))[:, None])[:, 0]


@pytest.mark.parametrize("neutraliser", ["mean", "zero"])
def test_interventions_equal_torch(pair, rows, case, neutraliser):
    batch, regions, grids, _ = case
    ours = scored(pair, batch, regions, neutraliser=neutraliser)
    assert ours.shape == (4, 2, G, T)
    moved = 0.0
    for p, row in enumerate(rows):
        for v in range(4):
            own = grids[p][v - 1] if v else [np.zeros_like(g) for g in grids[p][0]]
            source = regions.source[p, v]
            for g in range(G):
                response = np.asarray(batch.tokens[p, g])
                wanted = torch_logp(pair, row, response, own, source, neutraliser)
                assert largest(ours[v, p, g], wanted) <= LOGP
                moved = max(moved, float(np.abs(ours[v, p, g] - ours[0, p, g]).max()))
    assert moved > 0.01  # the regions matter


@functools.partial(jax.jit, static_argnames="config")
def full_logp(params, config, prompt, features):
    hidden, _ = model.prefill(params, config, prompt, features)
    return jax.nn.log_softmax(model.logits(params, config, hidden), -1)


def test_cached_prefixes_equal_full_forwards(pair, case):
    """K + 2 prefills with short extensions against a whole forward of each prompt and response."""
    batch, regions, _, _ = case
    ours = scored(pair, batch, regions)
    features = model.encode_images(pair.params, pair.config, batch.images)
    wide = features.reshape(2, SHAPE.images, SHAPE.tokens, -1)
    for v in range(4):
        new = wide
        if v:
            new = jnp.stack(
                [
                    neutralise(wide[p], *(jnp.asarray(a[p, v]) for a in regions), "mean")
                    for p in range(2)
                ]
            )
        new = jnp.repeat(new.reshape(features.shape), G, 0)
        whole = append_responses(batch.prompt, batch.tokens)
        logp = full_logp(pair.params, pair.config, whole, new)
        for row in range(2 * G):
            p, g = divmod(row, G)
            size = int(batch.prompt.lengths[p])
            response = batch.tokens[p, g]
            wanted = logp[row, size - 1 + np.arange(T), response]
            assert largest(ours[v, p, g], wanted) <= SHARED


def test_features_in_place_of_images_and_pixels(pair, case):
    """Held features give the same numbers; pixels hidden before the tower need the pages."""
    batch, regions, _, _ = case
    features = model.encode_images(pair.params, pair.config, batch.images)
    held = batch._replace(images=None, features=features)
    assert largest(scored(pair, held, regions), scored(pair, batch, regions)) <= SHARED
    hidden = scored(pair, batch, regions, neutraliser="pixel")
    plain = scored(pair, batch, regions)
    assert largest(hidden[0], plain[0]) <= SHARED
    assert np.abs(hidden[1] - plain[0]).max() > 0.01 and np.abs(hidden[1] - plain[1]).max() > 0.01
    with pytest.raises(ValueError, match="needs a batch that holds images"):
        scored(pair, held, regions, neutraliser="pixel")


def test_a_group_is_scored_alike_however_it_is_batched(pair, case):
    """Padding rows and empty regions change no other row."""
    batch, regions, _, _ = case
    both = scored(pair, batch, regions)
    none = make_regions([[NOTHING], []], SHAPE.images, SHAPE.tokens, RegionConfig())
    assert largest(scored(pair, batch, none), both[:1]) <= SHARED


def test_blindfold(pair, rows, case):
    """On a uniform picture no region is special: all drops are rounding, m = 0, g = 0.5, nothing NaN."""
    batch, _, _, _ = case
    blank = []
    for row in rows:
        pictures = tuple(Image.new("RGB", one.size, (90, 120, 60)) for one in row.pictures)
        pages = tuple(make_patches(one, pair.layout, BUDGET) for one in pictures)
        blank.append(dataclasses.replace(row, pictures=pictures, pages=pages))
    config = CedConfig()
    _, images = make_batch(pair, blank, SHAPE)
    features = np.asarray(model.encode_images(pair.params, pair.config, images))
    real = features.reshape(2, SHAPE.images, SHAPE.tokens, -1)[0, 0]
    assert np.abs(real - real.mean(0)).max() <= 1e-5  # the tower says the same of every token
    ids = [row.prompt.name for row in rows]
    found = audit_groups(
        pair.params,
        pair.config,
        batch._replace(images=images),
        {"evidence": evidence_of(rows)},
        ids,
        np.arange(T) < LENGTHS[..., None],
        config,
        images=SHAPE.images,
    )["evidence"]
    assert found.audited.all() and np.isfinite(found.support).all()
    assert found.m.tolist() == [[0.0] * G] * 2
    assert gate(found.m, config).tolist() == [[0.5] * G] * 2


def test_audits_are_drops_of_support(pair, rows, case):
    """Drops and margins from the scores above; several proposals at once change no number; an empty
    region, an empty span and a padding row are not audited."""
    batch, regions, _, options = case
    config = CedConfig(region=options, sigma_floor=0.05)
    span = np.arange(T) < LENGTHS[..., None]
    span[0, 2] = False
    evidence = evidence_of(rows)
    empty = [evidence[0], tuple(np.zeros_like(grid) for grid in evidence[1])]
    ids = [row.prompt.name for row in rows]

    def audit(**proposals):
        args = (pair.params, pair.config, batch, proposals, ids, span, config)
        return audit_groups(*args, images=SHAPE.images)

    alone, both = audit(a=evidence)["a"], audit(b=empty, a=evidence)
    held = np.stack([support(one, span) for one in scored(pair, batch, regions)])
    live = span.any(-1)
    assert largest(alone.support, held[0]) <= SHARED
    assert largest(alone.evidence, np.where(live, held[0] - held[1], 0)) <= SHARED
    controls = np.moveaxis(np.where(live, held[0] - held[2:], 0), 0, -1)
    assert largest(alone.controls, controls) <= SHARED
    assert largest(alone.m, margin(alone.evidence, alone.controls, config)) == 0
    assert (alone.audited == live).all() and alone.m[0, 2] == 0
    assert largest(both["a"].m, alone.m) <= 1e-3
    assert not both["b"].audited[1].any() and (both["b"].m[1] == 0).all()
    assert largest(both["b"].m[0], alone.m[0]) <= 1e-3
