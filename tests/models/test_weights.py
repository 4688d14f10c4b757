"""Hugging Face folders in and out: key layouts, shards, every error by name, round trips."""

import dataclasses
import json
import shutil
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from evisrag_jax.models.qwen25vl import model, weights
from evisrag_jax.models.qwen25vl.config import load_config
from evisrag_jax.models.qwen25vl.weights import WeightsError, load_params, save_params
from tests.models.tiny import each_tensor, make_batch, make_row, relative, torch_logits

LAYOUTS = {
    # published: visual.*, model.layers.*, lm_head
    "a": (("model.visual.", "visual."), ("model.language_model.", "model.")),
    # newer exports: model.visual.*, model.language_model.*, lm_head
    "b": (),
    # the head under either prefix
    "c1": (("lm_head.", "model.lm_head."),),
    "c2": (("lm_head.", "model.language_model.lm_head."),),
    "c3": (
        ("model.visual.", "visual."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ),
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def torch_tensors(pair):
    """The torch model's tensors under its own module names (layout b)."""
    names = pair.torch.named_parameters()
    return {name: np.ascontiguousarray(p.detach().numpy()) for name, p in names}


def renamed(tensors, pairs):
    out = {}
    for name, value in tensors.items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        out[name] = value
    return out


def write(folder, pair, tensors, shards=1):
    """A folder with these tensors in one file or in several with an index."""
    shutil.copy(pair.folder / "config.json", folder)
    if shards == 1:
        save_file(tensors, folder / weights.SINGLE)
        return folder
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / weights.INDEX).write_text(json.dumps(index))
    return folder


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (name, a), (_, b) in zip(each_tensor(ours), each_tensor(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_b32_key_layouts(untied, tmp_path, layout, shards):
    """All layouts, single and sharded, give bitwise the same parameters."""
    tensors = renamed(torch_tensors(untied), LAYOUTS[layout])
    params, config = load_params(write(tmp_path, untied, tensors, shards))
    assert config == untied.config
    assert_same(params, untied.params)


def test_b32_every_parameter_is_filled(pair, tmp_path):
    """Each tensor holds its own number: no parameter keeps another value, none is mixed."""
    tensors = torch_tensors(pair)
    marked = {n: np.full_like(a, i + 1) for i, (n, a) in enumerate(sorted(tensors.items()))}
    params, config = load_params(write(tmp_path, pair, marked))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        lambda s: s.shape, model.param_shapes(config)
    )
    values = []
    for name, leaf in each_tensor(params):
        assert len(np.unique(leaf)) == 1, name
        values.append(float(leaf.reshape(-1)[0]))
    assert sorted(values) == [i + 1 for i in range(len(tensors))]


def test_loaded_dtype(untied):
    params, _ = load_params(untied.folder, jnp.bfloat16)
    assert_same(params, model.cast_params(untied.params, jnp.bfloat16))


def test_b32_missing_and_unknown_tensors(untied, tmp_path):
    tensors = torch_tensors(untied)
    lost = "model.visual.blocks.3.attn.qkv.bias"
    del tensors[lost]
    tensors["model.visual.blocks.9.extra"] = np.zeros(3, np.float32)
    with pytest.raises(WeightsError) as error:
        load_params(write(tmp_path, untied, tensors))
    message = str(error.value)
    assert str(tmp_path / weights.SINGLE) in message
    assert "missing tensors: visual.blocks.3.attn.qkv.bias;" in message
    assert "unknown tensors: model.visual.blocks.9.extra" in message


def test_b32_inv_freq_is_tolerated(untied, tmp_path):
    tensors = torch_tensors(untied)
    tensors["model.language_model.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    assert_same(load_params(write(tmp_path, untied, tensors))[0], untied.params)


def test_the_same_tensor_twice(untied, tmp_path):
    tensors = torch_tensors(untied)
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"]
    with pytest.raises(WeightsError, match="are the same tensor") as error:
        load_params(write(tmp_path, untied, tensors))
    assert "model.norm.weight" in str(error.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda a: a.T, r"shape \(48, 80\), expected \(80, 48\)"),
        (lambda a: a[:-1], r"shape \(79, 48\), expected \(80, 48\)"),
        (lambda a: a.reshape(-1), "shape"),
        (lambda a: a.astype(np.int8), "is int8"),
    ],
)
def test_misshapen_tensors(untied, tmp_path, value, words):
    """Also where the number of elements fits."""
    tensors = torch_tensors(untied)
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.ascontiguousarray(value(tensors[name]))
    with pytest.raises(WeightsError, match=words) as error:
        load_params(write(tmp_path, untied, tensors))
    assert name in str(error.value) and weights.SINGLE in str(error.value)


def test_missing_shard(untied, tmp_path):
    write(tmp_path, untied, torch_tensors(untied), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00003.safetensors") as error:
        load_params(tmp_path)
    assert weights.INDEX in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 0.5])
@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_file(untied, tmp_path, shards, keep):
    """Empty, cut in the header's length, cut in the data."""
    write(tmp_path, untied, torch_tensors(untied), shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(WeightsError, match="not a readable safetensors file") as error:
        load_params(tmp_path)
    assert str(file) in str(error.value)


def test_index_that_disagrees(untied, tmp_path):
    """A tensor listed but not held, and one held but not listed."""
    write(tmp_path, untied, torch_tensors(untied), shards=2)
    path = tmp_path / weights.INDEX
    index = json.loads(path.read_text())
    moved = "model.language_model.norm.weight"
    for change in ({moved: None}, {"ghost.weight": "model-00001-of-00002.safetensors"}):
        listed = {k: v for k, v in (index["weight_map"] | change).items() if v}
        path.write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(WeightsError, match=next(iter(change))):
            load_params(tmp_path)
    path.write_text("[]")
    with pytest.raises(WeightsError, match="not a list of shards"):
        load_params(tmp_path)


def test_no_weights(untied, tmp_path):
    shutil.copy(untied.folder / "config.json", tmp_path)
    with pytest.raises(WeightsError, match="neither"):
        load_params(tmp_path)


def test_b33_tied_folders(tied, tmp_path):
    """No head; an equal head too many; another head; and logits = h E^T exactly."""
    tensors = torch_tensors(tied)
    assert not any("lm_head" in name for name in tensors)
    embedding = tensors["model.language_model.embed_tokens.weight"]
    params, _ = load_params(write(tmp_path, tied, tensors | {HEAD: embedding.copy()}))
    assert_same(params, tied.params)
    assert "head" not in params["text"]
    with pytest.raises(WeightsError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_params(write(tmp_path, tied, tensors | {HEAD: embedding + 1}))
    hidden = jax.random.normal(jax.random.key(0), (5, tied.config.text.width))
    logits = model.logits(tied.params, tied.config, hidden)
    np.testing.assert_array_equal(logits, hidden @ params["text"]["embed"]["embedding"].T)


def test_b33_untied_without_head(untied, tmp_path):
    tensors = torch_tensors(untied)
    del tensors["lm_head.weight"]
    with pytest.raises(WeightsError, match="missing tensors: lm_head.weight"):
        load_params(write(tmp_path, untied, tensors))


def test_b33_tied_gradient(tied):
    """The embedding's gradient is the sum of its input and its output part (those of an untied
    model with the same numbers, 1e-5), and agrees with central differences along three drawn
    directions (1e-3; the float32 loss is near 30 and the step 0.003)."""
    prompt, _ = make_batch(tied, [make_row(tied, 61, text=8)])
    apart = dataclasses.replace(tied.config, text=dataclasses.replace(tied.config.text, tied=False))

    def loss(table, head=None):
        text = tied.params["text"] | {"embed": {"embedding": table}}
        if head is not None:
            text |= {"head": {"kernel": head}}
        params, config = tied.params | {"text": text}, tied.config if head is None else apart
        hidden, _ = model.prefill(params, config, prompt)
        logp = jax.nn.log_softmax(model.logits(params, config, hidden[:, :7]))
        return -jnp.take_along_axis(logp, prompt.tokens[:, 1:8, None], -1).sum()

    table = tied.params["text"]["embed"]["embedding"]
    grad = jax.jit(jax.grad(loss))(table)
    inputs, outputs = jax.jit(jax.grad(loss, argnums=(0, 1)))(table, table.T)
    assert min(np.linalg.norm(inputs), np.linalg.norm(outputs)) > 0.1 * np.linalg.norm(grad)
    assert relative(grad, inputs + outputs.T) <= 1e-5
    value = jax.jit(loss)
    for key in jax.random.split(jax.random.key(4), 3):
        step = 0.003 * jax.random.normal(key, table.shape)
        numeric = float(value(table + step)) - float(value(table - step))
        assert 2 * float(jnp.vdot(grad, step)) == pytest.approx(numeric, rel=1e-3)


def make_source(pair, folder):
    """A bf16 folder in the published layout with the side files of a real one."""
    save_params(pair.params, pair.config, folder)
    for name in weights.SIDE_FILES:
        if name != "config.json":
            (folder / name).write_text(f'{{ "of":   "{name}" }}\r\n', newline="")
    return folder


@pytest.mark.parametrize("shard_bytes", [5 * 2**30, 40_000])
def test_b35_export(pair, tmp_path, shard_bytes):
    """In and out without training: same keys, shapes and bits in bf16, side files byte for byte,
    index total right, and no head in a tied export."""
    source, out = make_source(pair, tmp_path / "in"), tmp_path / "out"
    params, config = load_params(source)
    save_params(params, config, out, source=source, max_shard_bytes=shard_bytes)
    files = sorted(out.glob("*.safetensors"))
    theirs = load_file(source / weights.SINGLE)
    ours = {name: value for file in files for name, value in load_file(file).items()}
    assert ours.keys() == theirs.keys()
    assert (HEAD in ours) != config.text.tied and EMBEDDING in ours
    for name, value in ours.items():
        assert value.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value.view(np.uint16), theirs[name].view(np.uint16))
    if shard_bytes < 2**30:
        index = json.loads((out / weights.INDEX).read_text())
        assert len(files) > 3
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in ours.values())
        assert {out / name for name in index["weight_map"].values()} == set(files)
        for shard in map(load_file, files):  # the convolution alone is larger than a shard
            assert len(shard) == 1 or sum(a.nbytes for a in shard.values()) <= shard_bytes
    else:
        assert [file.name for file in files] == [weights.SINGLE]
    for name in weights.SIDE_FILES:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert_same(load_params(out)[0], params)


def test_b35_export_replaces_older_files(untied, tmp_path):
    """Shards of an earlier export do not stay beside a single file, nor the other way round."""
    for shard_bytes in (40_000, 5 * 2**30, 60_000):
        params = jax.tree.map(lambda a, n=shard_bytes: a + n % 7, untied.params)
        save_params(params, untied.config, tmp_path, max_shard_bytes=shard_bytes, dtype=np.float32)
        assert_same(load_params(tmp_path)[0], params)
    assert not (tmp_path / weights.SINGLE).exists()


def test_b35_export_from_another_models_folder(untied, tied, tmp_path):
    with pytest.raises(WeightsError, match="another model"):
        save_params(untied.params, untied.config, tmp_path, source=tied.folder)


def test_b35_transformers_loads_the_export(pair, rows, batch, tmp_path):
    """In float32 the exported folder gives the torch model's logits bit for bit; config.json is
    ours, in the published flat form, and transformers finds nothing missing."""
    save_params(pair.params, pair.config, tmp_path, dtype=np.float32, max_shard_bytes=100_000)
    assert load_config(tmp_path) == pair.config
    loaded, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True, dtype="auto"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, a), (_, b) in zip(
        loaded.named_parameters(), pair.torch.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert loaded.model.visual.fullatt_block_indexes == list(pair.config.vision.full_attention)
    other = type(pair)(loaded.eval(), tmp_path, pair.params, pair.config)
    with torch.no_grad():
        assert torch.equal(torch_logits(other, rows[0]), torch_logits(pair, rows[0]))


def test_bf16_export_runs_in_transformers(untied, tmp_path):
    save_params(untied.params, untied.config, tmp_path)
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    header = (tmp_path / weights.SINGLE).read_bytes()
    size = struct.unpack("<Q", header[:8])[0]
    assert json.loads(header[8 : 8 + size])["__metadata__"] == {"format": "pt"}
