"""config.json in all its variants (B36, B33), and what is refused by name."""

import json

import pytest

from evisrag_jax.models.qwen25vl.config import ConfigError, from_hf, load_config, to_hf

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128000,
    "hidden_act": "silu",
}
VISION = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
SECTION = {"mrope_section": [16, 24, 24]}
ROTARY = {
    "published": {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", **SECTION}},
    "renamed_type": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default", "type": "default", **SECTION},
    },
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **SECTION}},
}
OUTER = {"model_type": "qwen2_5_vl", "vision_config": VISION, "tie_word_embeddings": True}


def published(**changes):
    return OUTER | TEXT | ROTARY["published"] | changes


@pytest.mark.parametrize("kind", [*ROTARY, "nested"])
def test_b36_rotary_settings(kind):
    """Four ways to write the same rotary settings."""
    if kind == "nested":
        raw = OUTER | {"text_config": TEXT | ROTARY["rope_parameters"]}
    else:
        raw = OUTER | TEXT | ROTARY[kind]
    config = from_hf(raw)
    assert config == from_hf(published())
    assert config.text.mrope_section == (16, 24, 24)
    assert config.text.theta == 1e6
    assert config.text.head_dim == 128
    assert config.vision.full_attention == (7, 15, 23, 31)
    assert config.vision.head_dim == 80
    assert (config.text.eps, config.vision.eps) == (1e-6, 1e-6)


def test_b36_transformers_own_file(untied, tied):
    """What transformers writes today: nested, rope_parameters, vision settings under new names."""
    for pair, full in ((untied, (2, 4)), (tied, (1, 3))):
        raw = json.loads((pair.folder / "config.json").read_text())
        assert "text_config" in raw and "rope_parameters" in raw["text_config"]
        config = load_config(pair.folder)
        assert config.text.mrope_section == (1, 1, 2)
        assert config.text.eps == 1e-5 and config.vision.eps == 1e-6
        assert config.vision.full_attention == full
        assert config.text.tied == (pair is tied)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "mrope_section"),
        ({"rope_scaling": None}, "mrope_section"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}, "add up to 64"),
        ({"rope_scaling": {"type": "yarn", **SECTION}}, "yarn"),
        ({"rope_theta": None}, "rope_theta"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "qwen2_vl"}, "qwen2_vl"),
        ({"vision_config": None}, "vision_config"),
        ({"vision_config": VISION | {"depth": None}}, "depth is missing"),
        ({"vision_config": VISION | {"hidden_act": "gelu"}}, "vision_config: hidden_act"),
        ({"vision_config": VISION | {"fullatt_block_indexes": [7, 32]}}, r"\[32\]"),
        ({"vision_config": VISION | {"window_size": 100}}, "window_size 100"),
        ({"num_key_value_heads": 3}, "16 query heads"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ],
)
def test_refused_by_file_and_field(change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published(**change)))
    with pytest.raises(ConfigError, match=words) as error:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_config(tmp_path)


def test_b25_layer_indexes_written_as_strings():
    """No layer would be a full one if they stayed strings."""
    vision = VISION | {"fullatt_block_indexes": ["7", "15", "23", "31"]}
    assert from_hf(published(vision_config=vision)) == from_hf(published())


def test_b33_the_outer_tie_wins():
    nested = {"text_config": TEXT | ROTARY["published"] | {"tie_word_embeddings": True}}
    assert not from_hf(OUTER | nested | {"tie_word_embeddings": False}).text.tied
    untold = {k: v for k, v in OUTER.items() if k != "tie_word_embeddings"}
    assert from_hf(untold | nested).text.tied
    assert not from_hf(untold | TEXT | ROTARY["published"]).text.tied


def test_round_trip():
    config = from_hf(published(image_token_id=7))
    assert from_hf(to_hf(config)) == config
    assert to_hf(config, "float32")["torch_dtype"] == "float32"


def test_llama_text_only():
    """Equal rotary axes, no bias, no tower; written back as Llama."""
    raw = TEXT | {"model_type": "llama", "rope_theta": 1e5, "tie_word_embeddings": True}
    config = from_hf(raw)
    assert config.vision is None
    assert config.text.mrope_section == (64, 0, 0)
    assert not config.text.qkv_bias
    assert from_hf(to_hf(config)) == config
    with pytest.raises(ConfigError, match="mlp_bias"):
        from_hf(raw | {"mlp_bias": True})
    with pytest.raises(ConfigError, match="llama3"):
        from_hf(raw | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
