"""Qwen2.5-VL configurations as frozen dataclasses, read from and written to config.json.

Every published variant is read: flat or nested under `text_config`, `rope_scaling` or
`rope_parameters`, `type: mrope` or `default`. A text-only Llama-shaped config (no vision tower) is
read too: its rotary axes are equal, so it is the same decoder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A config.json that cannot be this architecture; the message names the file and the field."""


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. `full_attention` lists the layers that attend over the whole image."""

    depth: int
    width: int
    mlp: int
    heads: int
    out_width: int
    full_attention: tuple[int, ...]
    patch: int = 14
    merge: int = 2
    temporal_patch: int = 2
    channels: int = 3
    window: int = 112
    theta: float = 10000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def slots(self) -> int:
        """Patches a window (S)."""
        return (self.window // self.patch) ** 2


@dataclass(frozen=True)
class TextConfig:
    """The decoder. `mrope_section` counts the rotary frequencies of time, row and column."""

    vocab: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    mrope_section: tuple[int, int, int]
    tied: bool
    eps: float = 1e-6
    qkv_bias: bool = True
    max_positions: int = 32768


@dataclass(frozen=True)
class Qwen25VLConfig:
    """A whole model; hashable, so it is a static argument of jitted functions."""

    text: TextConfig
    vision: VisionConfig | None
    image_token: int = 151655
    video_token: int = 151656
    vision_start: int = 151652
    vision_end: int = 151653


def load_config(folder: str | Path) -> Qwen25VLConfig:
    """Reads `folder`/config.json; ConfigError names what is missing or not this architecture."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a model folder holds config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    return from_hf(raw, name=str(path))


def from_hf(raw: dict[str, Any], name: str = "config.json") -> Qwen25VLConfig:
    """The config of a Hugging Face dictionary. Outer values win over those of `text_config`.

    `name` is what a ConfigError calls the file.
    """
    kind = raw.get("model_type")
    if kind not in ("qwen2_5_vl", "llama"):
        raise ConfigError(f"{name}: model_type {kind!r} is not qwen2_5_vl (or llama for text only)")
    text = {**raw.get("text_config", {}), **{k: v for k, v in raw.items() if k != "text_config"}}
    vision = raw.get("vision_config") if kind == "qwen2_5_vl" else None
    if kind == "qwen2_5_vl" and vision is None:
        raise ConfigError(f"{name}: no vision_config")
    return Qwen25VLConfig(
        text=_text(text, name, needs_mrope=vision is not None),
        vision=None if vision is None else _vision(vision, name),
        image_token=raw.get("image_token_id", 151655),
        video_token=raw.get("video_token_id", 151656),
        vision_start=raw.get("vision_start_token_id", 151652),
        vision_end=raw.get("vision_end_token_id", 151653),
    )


def _get(raw: dict[str, Any], key: str, name: str) -> Any:
    if raw.get(key) is None:
        raise ConfigError(f"{name}: {key} is missing")
    return raw[key]


def _text(raw: dict[str, Any], name: str, *, needs_mrope: bool) -> TextConfig:
    heads = _get(raw, "num_attention_heads", name)
    width = _get(raw, "hidden_size", name)
    head_dim = raw.get("head_dim") or width // heads
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("mrope", "default"):
        raise ConfigError(f"{name}: rotary type {kind!r} is not supported (mrope or default)")
    section = rope.get("mrope_section")
    if section is None:
        if needs_mrope:
            raise ConfigError(
                f"{name}: mrope_section is missing; a vision model needs 3-axis rotary"
            )
        section = (head_dim // 2, 0, 0)
    if len(section) != 3 or sum(section) != head_dim // 2:
        raise ConfigError(f"{name}: mrope_section {section} does not add up to {head_dim // 2}")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{name}: rope_theta is missing")
    for option in ("use_sliding_window", "mlp_bias"):
        if raw.get(option):
            raise ConfigError(f"{name}: {option} is not supported")
    _check_activation(raw, name)
    kv_heads = _get(raw, "num_key_value_heads", name)
    if heads % kv_heads:
        raise ConfigError(
            f"{name}: {heads} query heads do not divide by {kv_heads} key-value heads"
        )
    return TextConfig(
        vocab=_get(raw, "vocab_size", name),
        width=width,
        mlp=_get(raw, "intermediate_size", name),
        layers=_get(raw, "num_hidden_layers", name),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        theta=float(theta),
        mrope_section=tuple(section),
        tied=bool(raw.get("tie_word_embeddings", False)),
        eps=_get(raw, "rms_norm_eps", name),
        qkv_bias=needs_mrope or bool(raw.get("attention_bias", False)),
        max_positions=raw.get("max_position_embeddings", 32768),
    )


def _check_activation(raw: dict[str, Any], name: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{name}: hidden_act {raw['hidden_act']!r} is not supported (silu)")


def _vision(raw: dict[str, Any], name: str) -> VisionConfig:
    name = f"{name}: vision_config"
    _check_activation(raw, name)
    config = VisionConfig(
        depth=_get(raw, "depth", name),
        width=_get(raw, "hidden_size", name),
        mlp=_get(raw, "intermediate_size", name),
        heads=_get(raw, "num_heads", name),
        out_width=_get(raw, "out_hidden_size", name),
        full_attention=tuple(sorted(int(i) for i in _get(raw, "fullatt_block_indexes", name))),
        patch=raw.get("patch_size", raw.get("spatial_patch_size", 14)),
        merge=raw.get("spatial_merge_size", 2),
        temporal_patch=raw.get("temporal_patch_size", 2),
        channels=raw.get("in_channels", raw.get("in_chans", 3)),
        window=raw.get("window_size", 112),
        theta=float((raw.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
    )
    outside = [i for i in config.full_attention if not 0 <= i < config.depth]
    if outside:
        raise ConfigError(f"{name}: fullatt_block_indexes {outside} of {config.depth} layers")
    if config.window % (config.patch * config.merge):
        raise ConfigError(
            f"{name}: window_size {config.window} is no multiple of patch_size*spatial_merge_size"
        )
    return config


def to_hf(config: Qwen25VLConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The config.json dictionary in the published (flat) form; `dtype` is that of the weights."""
    text, vision = config.text, config.vision
    raw: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": text.width,
        "intermediate_size": text.mlp,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "num_key_value_heads": text.kv_heads,
        "vocab_size": text.vocab,
        "rms_norm_eps": text.eps,
        "rope_theta": text.theta,
        "max_position_embeddings": text.max_positions,
        "tie_word_embeddings": text.tied,
        "torch_dtype": dtype,
    }
    if vision is None:
        return raw | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": text.head_dim,
            "attention_bias": text.qkv_bias,
        }
    if text.head_dim * text.heads != text.width:
        raise ConfigError("Qwen2.5-VL files derive head_dim as hidden_size / num_attention_heads")
    rotary = {}
    if vision.theta != VisionConfig.theta:  # no published file has the field
        rotary = {"rope_parameters": {"rope_type": "axial", "rope_theta": vision.theta}}
    return raw | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": list(text.mrope_section)},
        "use_sliding_window": False,
        "image_token_id": config.image_token,
        "video_token_id": config.video_token,
        "vision_start_token_id": config.vision_start,
        "vision_end_token_id": config.vision_end,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": vision.depth,
            "hidden_size": vision.width,
            "intermediate_size": vision.mlp,
            "num_heads": vision.heads,
            "out_hidden_size": vision.out_width,
            "fullatt_block_indexes": list(vision.full_attention),
            "patch_size": vision.patch,
            "spatial_merge_size": vision.merge,
            "temporal_patch_size": vision.temporal_patch,
            "in_chans": vision.channels,
            "window_size": vision.window,
            "hidden_act": "silu",
            "tokens_per_second": 2,
            **rotary,
        },
    }
