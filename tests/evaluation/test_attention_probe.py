"""Attention on evidence boxes against the maps of transformers' model, and against hand-made values.

The maps are those of a full forward of prompt + response (eager attention), unpadded, a response at
a time; ours are sums of a padded batch behind one prefill a prompt.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from evisrag_jax.evaluation.attention_probe import (
    attention_sums,
    compile_sums,
    probe_attention,
    visual_tokens,
)
from evisrag_jax.evaluation.attention_ratios import (
    attention_correlations,
    chosen_layers,
    scope_attention,
    summarise_attention,
)
from evisrag_jax.models.qwen25vl import model
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.forward import GroupBatch
from tests.models.tiny import SPECIAL, Shape, make_batch, make_pair, make_row, torch_inputs

P, G, T = 3, 2, 5
RATIO = 1e-5  # largest absolute difference of rho, lift and of a token's mass
LENGTHS = np.array([[5, 3], [4, 0], [5, 1]])
IDS = ["two pages", "a page", "text"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    made = make_pair(folder, depth=2, full=(1,), tied=True, layers=3, width=32, seed=7)
    made.torch.set_attn_implementation("eager")
    return made


@pytest.fixture(scope="module")
def rows(pair):
    """Two pages of 6 visual tokens, one of 12 behind fewer words, none: prompts of three lengths."""
    return [
        make_row(pair, 81, (56, 84), (84, 56)),
        make_row(pair, 82, (84, 112), text=2),
        make_row(pair, 83, text=6),
    ]


@pytest.fixture(scope="module")
def batch(pair, rows):
    prompt, images = make_batch(pair, rows, Shape(length=40, images=2, windows=1, tokens=12))
    tokens = np.random.default_rng(84).integers(0, SPECIAL.endoftext, (P, G, T))
    return GroupBatch(prompt, images, jnp.asarray(tokens), jnp.asarray(LENGTHS))


@pytest.fixture(scope="module")
def boxes(batch):
    """Four tokens of the first page and two of the second; five of the only one."""
    out = np.zeros((P, 40), bool)
    for p, places in enumerate([(1, 2, 4, 5, 6, 11), (0, 3, 7, 8, 9), ()]):
        out[p, np.flatnonzero(visual_tokens(batch.prompt)[p])[list(places)]] = True
    return out


@pytest.fixture(scope="module")
def scopes():
    """Everything; evidence in the middle; answer at the end, none in a response of one token."""
    real = np.arange(T) < LENGTHS[..., None]
    middle = (np.arange(T) >= 1) & (np.arange(T) < 3)
    return {"all": real, "evidence": real & middle, "answer": real & (np.arange(T) >= 3)}


def probe(pair, batch, boxes, scopes, **named):
    return probe_attention(
        named.pop("params", pair.params), pair.config, batch, boxes, scopes, ids=IDS, **named
    )


@pytest.fixture(scope="module")
def maps(pair, rows, batch):
    """{(p, g): [layers, L + T, L + T]}: means over heads of transformers' maps, in float64."""
    out = {}
    for p, g in np.argwhere(LENGTHS):
        response = np.asarray(batch.tokens[p, g, : LENGTHS[p, g]])
        with torch.no_grad():
            found = pair.torch(**torch_inputs(rows[p], response), output_attentions=True)
        assert len(found.attentions) == 3
        out[p, g] = torch.stack(found.attentions)[:, 0].double().mean(1).numpy()
    return out


@pytest.mark.parametrize("row", ["own", "predicting"])
@pytest.mark.parametrize("layers", [None, (0,), (2, 0)])
def test_ratios_equal_transformers(pair, rows, batch, boxes, scopes, maps, row, layers):
    """rho, lift, rho of every layer and mass of every scope, to 1e-5; every response with a length is
    there, and nothing else."""
    found = probe(pair, batch, boxes, scopes, row=row, layers=layers)
    assert [(one.id, one.response) for one in found] == [
        (IDS[p], g) for p, g in np.argwhere(LENGTHS)
    ]
    mean_over = list(layers or (1, 2))
    for one, (p, g) in zip(found, np.argwhere(LENGTHS), strict=True):
        size = len(rows[p].prompt.ids)
        of_page = rows[p].prompt.ids == SPECIAL.image_pad
        assert (one.visual_tokens, one.box_tokens) == (of_page.sum(), boxes[p].sum())
        for name, mask in scopes.items():
            scope, steps = one.scopes[name], np.flatnonzero(mask[p, g])
            assert scope.tokens == len(steps)
            if not len(steps) or not of_page.any():
                continue
            places = size + steps - (row == "predicting")
            on_prompt = maps[p, g][:, places, :size].sum(1)  # layers, size
            on_boxes = on_prompt[:, boxes[p, :size]].sum(-1)
            on_pages = on_prompt[:, of_page].sum(-1)
            rho = on_boxes[mean_over].mean() / on_pages[mean_over].mean()
            assert scope.rho == pytest.approx(rho, abs=RATIO)
            assert scope.lift == pytest.approx(rho * of_page.sum() / boxes[p].sum(), abs=RATIO)
            assert scope.rho_by_layer == pytest.approx(on_boxes / on_pages, abs=RATIO)
            assert scope.box_mass == pytest.approx(on_boxes / len(steps), abs=RATIO)
            assert scope.visual_mass == pytest.approx(on_pages / len(steps), abs=RATIO)
            assert 0.01 < rho < 0.99 and scope.undefined is None


def test_rows_and_layers_differ(pair, batch, boxes, scopes):
    """The test above can fail: by the row that is read, by layer and by scope, ratios are far apart."""
    own, before = (probe(pair, batch, boxes, scopes, row=row)[0] for row in ("own", "predicting"))
    assert abs(own.scopes["answer"].rho - before.scopes["answer"].rho) > 0.005
    assert np.ptp(own.scopes["all"].rho_by_layer) > 0.005
    assert abs(own.scopes["all"].rho - own.scopes["evidence"].rho) > 0.005


def test_own_rows_of_the_tokens_before_are_the_predicting_rows(pair, batch, boxes, scopes):
    """Row t - 1 read as own is row t read as predicting, to 1e-6: two ways to the same query."""
    later = {"all": np.zeros((P, G, T), bool)}
    sooner = {"all": np.zeros((P, G, T), bool)}
    later["all"][0, 0, 3] = sooner["all"][0, 0, 2] = True
    own = probe(pair, batch, boxes, sooner)[0].scopes["all"]
    before = probe(pair, batch, boxes, later, row="predicting")[0].scopes["all"]
    assert before.box_mass == pytest.approx(own.box_mass, abs=1e-6)


def test_all_visual_tokens_give_one(pair, batch, scopes):
    """B = V: rho and lift are exactly 1, in every layer."""
    for one in probe(pair, batch, visual_tokens(batch.prompt), scopes):
        for scope in one.scopes.values():
            if scope.undefined is None:
                assert scope.rho == scope.lift == 1
                assert set(scope.rho_by_layer) == {1.0}


def test_uniform_attention_has_lift_one(pair, batch, boxes, scopes):
    """Queries of zeros: a token sees all keys alike, so that its mass on V is |V| / (size + t + 1), and lift
    is 1; to 1e-6."""
    layers = dict(pair.params["text"]["layers"])
    layers["q"] = jax.tree.map(jnp.zeros_like, layers["q"])
    params = pair.params | {"text": pair.params["text"] | {"layers": layers}}
    found = probe(pair, batch, boxes, scopes, params=params)
    assert sum(one.scopes["all"].undefined is None for one in found) == 3
    for one in found:
        scope = one.scopes["all"]
        if scope.undefined is None:
            assert scope.lift == pytest.approx(1, abs=1e-6)
            assert scope.rho == pytest.approx(one.box_tokens / one.visual_tokens, abs=1e-6)
            size = int(batch.prompt.lengths[IDS.index(one.id)])
            steps = np.arange(scope.tokens)
            expected = np.mean(one.visual_tokens / (size + steps + 1))
            assert scope.visual_mass == pytest.approx([expected] * 3, abs=1e-6)


def test_other_responses_and_padding_do_not_matter(pair, batch, boxes, scopes):
    """Another response, and whatever stands behind an end, change nothing, bitwise."""
    real = np.arange(T) < LENGTHS[..., None]
    other = np.where(real, batch.tokens, SPECIAL.endoftext)
    other[0, 1] = 3
    a = probe(pair, batch, boxes, scopes)
    b = probe(pair, batch._replace(tokens=jnp.asarray(other)), boxes, scopes)
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, False, True, True, True]


def test_sixteen_bit_parameters(pair, batch, boxes, scopes):
    """bfloat16 parameters: float32 sums near those of float32 (0.1 of lift), and not the same."""
    half = probe(pair, batch, boxes, scopes, params=model.cast_params(pair.params, jnp.bfloat16))
    whole = probe(pair, batch, boxes, scopes)
    for a, b in zip(half, whole, strict=True):
        if b.box_tokens:
            assert a.scopes["all"].lift == pytest.approx(b.scopes["all"].lift, abs=0.1)
            assert a.scopes["all"].lift != b.scopes["all"].lift


def test_over_devices(pair, batch, boxes, scopes):
    """Four prompts (the last a padding row) over two devices: the same to 1e-6; three do not divide."""
    mesh = make_mesh(devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="3 prompts a batch do not divide"):
        probe(pair, batch, boxes, scopes, mesh=mesh)
    longer = jax.tree.map(lambda a: np.concatenate([a, a[:1]]), batch)
    longer.lengths[3] = 0
    masks = {n: np.concatenate([m, np.zeros_like(m[:1])]) for n, m in scopes.items()}
    params = jax.device_put(pair.params, jax.sharding.NamedSharding(mesh, jax.P()))
    found = probe(pair, longer, np.concatenate([boxes, boxes[:1]]), masks, params=params, mesh=mesh)
    for a, b in zip(found, probe(pair, batch, boxes, scopes), strict=True):
        assert a.id == b.id
        for name in scopes:
            assert a.scopes[name].box_mass == pytest.approx(b.scopes[name].box_mass, abs=1e-6)


def test_features_in_place_of_pages(pair, batch, boxes, scopes):
    """A batch with the frozen tower's features: the same to 1e-6."""
    features = model.encode_images(pair.params, pair.config, batch.images)
    given = batch._replace(images=None, features=features)
    a, b = (probe(pair, one, boxes, scopes)[0].scopes["all"] for one in (given, batch))
    assert a.rho == pytest.approx(b.rho, abs=1e-6)


def test_no_map_is_kept(pair):
    """4 layers and 1,024 response tokens behind 4,096 of the prompt, compiled and not run: maps of one layer
    are 4 heads x 1,024 x 5,120 x 4 bytes = 84 MB, of all 335 MB. A block of 512 rows is 42 MB: two
    copies of it and the keys stay under 105 MB."""
    text = dataclasses.replace(pair.config.text, layers=4)
    config = dataclasses.replace(pair.config, text=text, vision=None)
    shape, whole, flag = jax.ShapeDtypeStruct, jnp.int32, jnp.bool_
    prompt = model.PromptInputs(
        shape((1, 4096), whole), shape((1, 3, 4096), whole), shape((1,), whole),
        shape((1, 4096), whole), shape((1,), whole),
    )  # fmt: skip
    groups = GroupBatch(prompt, None, shape((1, 1, 1024), whole), shape((1, 1), whole))
    mesh = make_mesh(devices=jax.devices()[:1])
    sets, scopes = shape((1, 2, 4096), flag), shape((2, 1, 1, 1024), flag)
    params = model.param_shapes(config)
    compiled = compile_sums(config, mesh).lower(params, groups, sets, scopes).compile()
    heads = config.text.heads
    block = heads * 512 * (4096 + 1024) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * block
    out = jax.eval_shape(
        lambda *args: attention_sums(args[0], config, *args[1:]), params, groups, sets, scopes
    )
    assert out.shape == (2, 1, 1, 4, 2) and out.dtype == jnp.float32


def test_undefined_ratios_are_counted(pair, batch, boxes, scopes):
    """No page, no box, no token of the scope: None and its reason; masses stay."""
    boxes = boxes.copy()
    boxes[1] = False
    found = {(o.id, o.response): o for o in probe(pair, batch, boxes, scopes)}
    text, unboxed = found["text", 0].scopes["all"], found["a page", 0].scopes["all"]
    assert (text.undefined, text.rho, text.lift) == ("no_visual_tokens", None, None)
    assert (unboxed.undefined, unboxed.rho_by_layer) == ("no_box_tokens", (None,) * 3)
    assert min(unboxed.visual_mass) > 0 and set(unboxed.box_mass) == {0.0}
    assert found["two pages", 1].scopes["answer"].undefined == "empty_scope"
    summary = summarise_attention(list(found.values()), resamples=20)
    assert summary["all"].responses == 5
    assert summary["all"].undefined == {"no_box_tokens": 1, "no_visual_tokens": 2}
    assert summary["answer"].undefined["empty_scope"] == 1
    assert summary["answer"].rho.mean == found["two pages", 0].scopes["answer"].rho
    both = [found["two pages", g].scopes["all"] for g in range(2)]
    assert summary["all"].lift.mean == pytest.approx(np.mean([s.lift for s in both]))
    assert summary["all"].rho_by_layer[1] == pytest.approx(
        np.mean([s.rho_by_layer[1] for s in both])
    )
    assert summarise_attention([]) == {}


def test_ratios_by_hand():
    """Sums [B, V] of layers over 2 tokens, |V| = 10, |B| = 5: attention is averaged before the ratio is taken,
    so that [1, 4] and [4, 8] give 5 / 12 and not (1 / 4 + 4 / 8) / 2."""
    scope = scope_attention(np.array([[1.0, 4], [3, 4], [0, 0]]), 2, 10, 5, (0, 1))
    assert (scope.rho, scope.lift, scope.rho_by_layer) == (0.5, 1.0, (0.25, 0.75, None))
    assert (scope.box_mass, scope.visual_mass) == ((0.5, 1.5, 0.0), (2.0, 2.0, 0.0))
    unlike = scope_attention(np.array([[1.0, 4], [4, 8]]), 1, 10, 5, (0, 1))
    assert unlike.rho == pytest.approx(5 / 12, abs=1e-15)
    none = scope_attention(np.array([[1.0, 4], [3, 4], [0, 0]]), 2, 10, 5, (2,))
    assert (none.rho, none.undefined) == (None, "no_attention_on_pages")
    assert none.rho_by_layer == (0.25, 0.75, None)


def test_layers():
    assert chosen_layers(36, None) == tuple(range(18, 36)) and chosen_layers(1, None) == (0,)
    assert chosen_layers(3, None) == (1, 2)
    for wrong in ((), (3,), (1, 1), (-1,)):
        with pytest.raises(ValueError, match="from 0 to 2"):
            chosen_layers(3, wrong)


def test_correlations_by_scope_and_outcome(pair, batch, boxes, scopes):
    """Outcomes that rise with rho of a scope: 1 there; left-out responses are counted."""
    found = probe(pair, batch, boxes, scopes)
    rho = [one.scopes["all"].rho for one in found]
    margin = [None if r is None else 2 * r - 1 for r in rho]
    right = [r is not None and r >= max(v for v in rho if v is not None) for r in rho]
    table = attention_correlations(found, {"margin": margin, "correct": right}, resamples=20)
    assert len(table) == 3 * 2 * 2 * 2
    for kind in ("pearson", "spearman"):
        one = table[f"all/rho/margin/{kind}"]
        assert one.value == pytest.approx(1) and (one.kind, one.left_out) == (kind, 2)
        assert 0 < table[f"all/rho/correct/{kind}"].value < 1
    assert table["answer/rho/margin/pearson"].value is None
    with pytest.raises(ValueError, match="1 values of 5"):
        attention_correlations(found, {"margin": [1]})


def test_wrong_masks_are_named(pair, batch, boxes, scopes):
    """Which record, which mask, which limit."""

    def refused(match, batch=batch, boxes=boxes, scopes=scopes, ids=IDS):
        with pytest.raises(ValueError, match=match):
            probe_attention(pair.params, pair.config, batch, boxes, scopes, ids=ids)

    outside = boxes.copy()
    outside[1, 0] = True
    refused("record a page: 1 positions of its boxes are no visual tokens", boxes=outside)
    refused(
        "record two pages, response 1: scope 'late' goes beyond its 3 tokens",
        scopes={"late": np.broadcast_to(np.arange(T) == 4, (P, G, T))},
    )
    refused(r"boxes: bool\(3, 39\), but the batch takes bool\(3, 40\)", boxes=boxes[:, :39])
    refused("scope 'all': bool", scopes={"all": scopes["all"][..., :4]})
    refused("no scope", scopes={})
    refused("2 ids", ids=IDS[:2])
