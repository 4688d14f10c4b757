"""Adapters against the peft library, merged weights and the chain rule; targets are checked by name."""

import dataclasses
import json
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from evisrag_jax.models.layers import Linear
from evisrag_jax.models.lora import (
    LoraConfig,
    LoraError,
    adapter_axes,
    add_adapters,
    find_targets,
    init_adapters,
    is_adapter,
    linear_layers,
    merge,
    scale_adapters,
)
from evisrag_jax.models.qwen25vl.adapter_files import save_adapter
from evisrag_jax.models.qwen25vl.weights import load_params, save_params
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.state import flatten, nest
from tests.models.tiny import (
    Shape,
    largest,
    loss_weights,
    make_batch,
    make_row,
    relative,
    run,
    text_loss,
    torch_inputs,
)

SHAPE = Shape(length=40, images=2, windows=12, tokens=12)
# Every linear layer of both towers; alpha / r = 3 is no power of two.
EVERY = LoraConfig(rank=4, alpha=12.0, targets=r"^text/layers|^vision/(blocks|merger)")


@pytest.fixture(scope="module")
def rows(tied):
    return [make_row(tied, 21, (56, 56), (84, 112)), make_row(tied, 22, text=6)]


@pytest.fixture(scope="module")
def inputs(tied, rows):
    return make_batch(tied, rows, SHAPE)


@pytest.fixture(scope="module")
def fresh(tied):
    """Parameters with adapters as a run starts with them."""
    mesh = make_mesh(devices=jax.devices()[:1])
    return add_adapters(tied.params, tied.config, EVERY, mesh, seed=3)


@pytest.fixture(scope="module")
def adapted(fresh):
    """The same with B drawn, as after some updates."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if path[-1].key != "lora_b":
            return leaf
        return jnp.asarray(0.05 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, fresh)


@pytest.fixture(scope="module")
def low_rank(tied, adapted, inputs):
    """Logits of the low-rank forward."""
    return run(scale_adapters(adapted, EVERY), tied.config, *inputs)[0]


@pytest.fixture(scope="module")
def gradient(tied, adapted, rows, inputs):
    """Of the low-rank forward's `text_loss` for the adapters, nested."""
    weights = loss_weights(rows, SHAPE.length)
    flat = flatten(adapted)

    def loss(some):
        logits = run(scale_adapters(nest(flat | some), EVERY), tied.config, *inputs)[0]
        return text_loss(logits, inputs[0].tokens, weights)

    some = {path: leaf for path, leaf in flat.items() if is_adapter(path)}
    return nest(jax.jit(jax.grad(loss))(some))


@pytest.fixture(scope="module")
def peft_folder(tied, adapted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(adapted, tied.config, EVERY, folder, base=str(tied.folder))
    return folder


def peft_model(tied, folder, trainable=False):
    """A fresh torch model with the adapter as the real library loads it."""
    peft = pytest.importorskip("peft", reason="the reference of adapters (extra: test)")
    base = type(tied.torch).from_pretrained(tied.folder, dtype=torch.float32).eval()
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=trainable)


def test_fresh_adapters_are_the_base_model_bitwise(tied, fresh, inputs):
    """B = 0; A fills PEFT's interval of 1 / sqrt(inputs), differs by layer and module, and depends on
    the seed alone."""
    base = run(tied.params, tied.config, *inputs)[0]
    np.testing.assert_array_equal(run(scale_adapters(fresh, EVERY), tied.config, *inputs)[0], base)
    q, o = fresh["text"]["layers"]["q"]["lora_a"], fresh["text"]["layers"]["o"]["lora_a"]
    assert q.shape == (3, 32, 4) and o.shape == (3, 4, 8, 4) and q.dtype == jnp.float32
    for a, inputs_ in ((q, 32), (o, 32), (fresh["vision"]["merger"]["fc1"]["lora_a"], 128)):
        assert 0.9 < np.abs(a).max() * inputs_**0.5 <= 1.0
    assert np.any(q[0] != q[1]) and np.any(q != fresh["text"]["layers"]["k"]["lora_a"])
    again = init_adapters(tied.config, EVERY, 3)
    np.testing.assert_array_equal(again["text/layers/q/lora_a"], q)
    assert np.any(init_adapters(tied.config, EVERY, 4)["text/layers/q/lora_a"] != q)


def test_low_rank_forward_equals_merged_weights(tied, adapted, inputs, low_rank):
    """1e-5 relative; merged parameters are a model without adapters."""
    merged = merge(adapted, EVERY)
    assert jax.tree.structure(merged) == jax.tree.structure(tied.params)
    assert relative(low_rank, run(merged, tied.config, *inputs)[0]) <= 1e-5
    assert relative(low_rank, run(tied.params, tied.config, *inputs)[0]) > 1e-2


@pytest.mark.parametrize(("inputs", "features"), [(1, (2, 3)), (2, (5,))])
def test_one_layer_by_the_equations(inputs, features):
    """y = x W + c + (x A) B, dA = xᵀ (dy Bᵀ), dB = (x A)ᵀ dy in float64 numpy; 1e-6 of the largest."""
    rng = np.random.default_rng(0)
    shape = (4, 2)[:inputs]
    n, m, r = int(np.prod(shape)), int(np.prod(features)), 3
    x, dy = rng.normal(size=(7, n)), rng.normal(size=(7, m))
    w, c, a, b = (rng.normal(size=s) for s in ((n, m), (m,), (n, r), (r, m)))
    module = Linear(features, (None,) * (inputs + len(features)), inputs=inputs, use_bias=True)
    params = {
        "kernel": w.reshape(*shape, *features),
        "bias": c.reshape(features),
        "lora_a": a.reshape(*shape, r),
        "lora_b": b.reshape(r, *features),
    }
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}

    def forward(params):
        return module.apply({"params": params}, jnp.asarray(x.reshape(7, *shape), jnp.float32))

    y, back = jax.vjp(forward, params)
    (got,) = back(jnp.asarray(dy.reshape(y.shape), jnp.float32))
    for ours, want in (
        (y, x @ w + c + (x @ a) @ b),
        (got["lora_a"], x.T @ (dy @ b.T)),
        (got["lora_b"], (x @ a).T @ dy),
        (got["kernel"], x.T @ dy),
    ):
        want = want.reshape(ours.shape)
        assert np.abs(ours - want).max() <= 1e-6 * np.abs(want).max()


def test_peft_loads_the_files_and_computes_the_same(tied, rows, peft_folder, low_rank):
    """Every tensor is taken (none missing, none new), and logits agree within 1e-4 absolute."""
    model = peft_model(tied, peft_folder)
    held = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(held) == 2 * sum(len(target.names) for target in linear_layers(tied.config))
    for p, row in enumerate(rows):
        with torch.no_grad():
            expected = model(**torch_inputs(row)).logits[0]
        assert largest(low_rank[p, : len(expected)], expected) <= 1e-4


def test_gradients_equal_pefts(tied, gradient, rows, peft_folder):
    """A and B of every module against torch's autograd through the library, 1e-4 of the largest."""
    weights = loss_weights(rows, SHAPE.length)
    model = peft_model(tied, peft_folder, trainable=True)
    for p, row in enumerate(rows):
        loss = text_loss(model(**torch_inputs(row)).logits[0], row.prompt.ids, weights[p])
        loss.backward()
    ours = _peft_tensors(tied, gradient)
    theirs = {
        name.replace(".default", ""): p.grad.numpy()
        for name, p in model.named_parameters()
        if "lora_" in name
    }
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.abs(ours[name] - value).max() <= 1e-4 * max(np.abs(value).max(), 1e-2), name


def _peft_tensors(tied, tree):
    """Arrays shaped as adapters under peft's names, by the library's convention written out."""
    out = {}
    for target in linear_layers(tied.config):
        node = tree
        for key in target.path.split("/"):
            node = node[key]
        for i, name in enumerate(target.names):
            hf = f"model.{name}" if name.startswith("visual") else f"model.language_{name}"
            a = np.asarray(node["lora_a"]).reshape(len(target.names), target.sizes[0], 4)[i]
            b = np.asarray(node["lora_b"]).reshape(len(target.names), 4, target.sizes[1])[i]
            out[f"base_model.model.{hf}.lora_A.weight"] = a.T
            out[f"base_model.model.{hf}.lora_B.weight"] = b.T
    return out


def test_merged_export_equals_pefts_merge(tied, adapted, peft_folder, tmp_path):
    """merge_and_unload against our float32 export, every tensor 1e-6 absolute."""
    merged = peft_model(tied, peft_folder).merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    save_params(
        merge(adapted, EVERY), tied.config, tmp_path / "ours", source=tied.folder, dtype=np.float32
    )
    theirs, ours = load_params(tmp_path / "theirs")[0], load_params(tmp_path / "ours")[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), ours, theirs)


def test_adapters_of_one_tower_leave_the_other_alone(tied, fresh, tmp_path):
    """ "gate_proj" is a name in both towers: peft must put decoder adapters on the decoder only, and read
    the default targets as its own seven."""
    lora = LoraConfig(rank=4)
    save_adapter(fresh, tied.config, lora, tmp_path, base="b")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 16, "LORA")
    model = peft_model(tied, tmp_path)
    held = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(held) == 7 * 3 and not any("visual" in name for name in held)
    mode = (tmp_path / "adapter_model.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == stat.S_IMODE((tmp_path / "adapter_config.json").stat().st_mode)


def test_bfloat16_base_with_float32_adapters(tied, adapted):
    """Sums are made in float32 and rounded once, also where only the result is bfloat16."""
    half = jax.tree_util.tree_map_with_path(
        lambda path, a: a if "lora" in path[-1].key else a.astype(jnp.bfloat16), adapted
    )
    node = half["text"]["layers"]["o"]
    kernel = np.float64(node["kernel"]).reshape(3, 32, 32)
    a, b = np.float64(node["lora_a"]).reshape(3, 32, 4), np.float64(node["lora_b"])
    want = kernel + 3.0 * (a @ b)
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)):
        got = merge(half, EVERY, dtype)["text"]["layers"]["o"]["kernel"]
        assert got.dtype == dtype and got.shape == node["kernel"].shape
        np.testing.assert_allclose(
            np.float64(got).reshape(want.shape), want, rtol=tolerance, atol=1e-7
        )
    kept = merge(half, EVERY)["text"]["layers"]["o"]["kernel"]
    assert kept.dtype == jnp.bfloat16


def test_adapters_are_sharded_like_their_kernels(tied):
    """Input and output axes as the kernel's, the rank whole."""
    mesh = make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    params = add_adapters(tied.params, tied.config, EVERY, mesh, seed=0)
    layers, blocks = params["text"]["layers"], params["vision"]["blocks"]
    for node, name, spec in (
        (layers["q"], "lora_a", (None, "fsdp")),
        (layers["q"], "lora_b", (None, None, "tensor")),
        (layers["o"], "lora_a", (None, "tensor")),
        (layers["o"], "lora_b", (None, None, "fsdp")),
        (layers["mlp"]["down"], "lora_a", (None, "tensor")),
        (blocks["qkv"], "lora_b", (None, None, None, "tensor")),
        (params["vision"]["merger"]["fc1"], "lora_b", (None, "tensor")),
    ):
        assert node[name].sharding.spec == PartitionSpec(*spec)
    assert adapter_axes(tied.config, ["vision/blocks/qkv/lora_b"]) == {
        "vision/blocks/qkv/lora_b": ("layers", None, None, "heads", "head_dim")
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": "nowhere"}, "lora.targets='nowhere' matches no linear layer.*text/layers/q"),
        ({"targets": "^vision"}, "matches vision/patch_embed, which cannot have an adapter"),
        ({"targets": "^text"}, "matches text/embed, text/head, which cannot"),
        ({"rank": 49, "targets": "layers/k$"}, "rank=49 is larger than text/layers/k.*48 x 24"),
        ({"also": "nothing"}, "lora.also='nothing' matches no parameter"),
    ],
)
def test_targets_that_cannot_be_are_refused(untied, fields, message):
    with pytest.raises(LoraError, match=message):
        find_targets(untied.config, LoraConfig(**({"rank": 4} | fields)))


@pytest.mark.parametrize(
    ("field", "value"), [("rank", -1), ("alpha", 0.0), ("alpha", float("nan")), ("targets", "(")]
)
def test_bad_settings_are_refused_by_name(field, value):
    with pytest.raises(LoraError, match=f"lora.{field}"):
        dataclasses.replace(LoraConfig(), **{field: value})


def test_targets_are_chosen_by_path(untied):
    """The default is the decoder's seven; a pattern takes vision, or both."""
    found = [target.path for target in find_targets(untied.config, LoraConfig(rank=2))]
    assert found == [f"text/layers/{n}" for n in ("q", "k", "v", "o")] + [
        f"text/layers/mlp/{n}" for n in ("gate", "up", "down")
    ]
    both = find_targets(untied.config, LoraConfig(rank=2, targets="(layers/q|blocks/qkv)$"))
    assert [(t.path, t.names[1]) for t in both] == [
        ("vision/blocks/qkv", "visual.blocks.1.attn.qkv"),
        ("text/layers/q", "model.layers.1.self_attn.q_proj"),
    ]
