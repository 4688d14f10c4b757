"""A tiny Qwen2.5-VL with a byte-level tokenizer, and requests over small pages, for the rollout tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.qwen_vocab import load_tool

NAMES = "endoftext im_start im_end vision_start vision_end vision_pad image_pad video_pad"
LAYOUT = [f"<|{name}|>" for name in NAMES.split()]
VOCAB = 272  # 256 bytes, 8 layout tokens, 8 rows beyond the tokenizer


@pytest.fixture(scope="session")
def tok():
    """One token a byte (id order of the byte alphabet), then the layout tokens 256 … 263."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in LAYOUT])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=load_tool().CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def special(tok):
    from evisrag_jax.prompts.tokenizer import SpecialIds

    return SpecialIds.from_tokenizer(tok)


@pytest.fixture(scope="session")
def config(special):
    from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig

    text = TextConfig(
        vocab=VOCAB,
        width=32,
        mlp=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        theta=1000.0,
        mrope_section=(1, 1, 2),
        tied=False,
    )
    vision = VisionConfig(
        depth=2, width=32, mlp=48, heads=2, out_width=32, full_attention=(1,), window=56
    )
    return Qwen25VLConfig(
        text=text,
        vision=vision,
        image_token=special.image_pad,
        video_token=special.video_pad,
        vision_start=special.vision_start,
        vision_end=special.vision_end,
    )


@pytest.fixture(scope="session")
def params(config):
    """Random weights, ten times wider than at initialisation so that greedy text varies and pages matter."""
    import jax

    from evisrag_jax.models.qwen25vl.model import param_shapes

    rng = np.random.default_rng(7)

    def fill(path, leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        kind = path[-1].key
        return 1 + noise * 0.1 if kind == "scale" else noise * (0.1 if kind == "bias" else 0.2)

    tree = jax.tree_util.tree_map_with_path(fill, param_shapes(config))
    return jax.device_put(jax.tree.map(np.float32, tree))


@pytest.fixture(scope="session")
def layout():
    from evisrag_jax.pages.plan import VisionLayout

    return VisionLayout(window=56)


@pytest.fixture(scope="session")
def page(layout):
    """page(seed, units=(rows, cols)) → a page of noise on that grid of merged units."""
    from evisrag_jax.pages.patches import make_patches
    from evisrag_jax.pages.plan import BUDGETS

    def make(seed, units=(2, 3)):
        pixels = np.random.default_rng(seed).integers(0, 256, (units[0] * 28, units[1] * 28, 3))
        image = Image.fromarray(pixels.astype(np.uint8))
        return make_patches(image, layout, BUDGETS["mini"])

    return make


@pytest.fixture(scope="session")
def ask(tok):
    """ask(id, text, pages) → a request with the tokenizer's chat layout."""
    from evisrag_jax.prompts.chat import build_prompt
    from evisrag_jax.rollout.requests import Request

    def make(name, text, pages=()):
        prompt = build_prompt(tok, text, [p.grid for p in pages], system="s", name=name)
        return Request(name, prompt, tuple(pages))

    return make


@pytest.fixture(scope="session")
def requests(ask, page):
    """Two pages, one page, no page, two equal pages; page grids of two sizes."""
    return [
        ask("two", "what is in them?", [page(1), page(2, (3, 3))]),
        ask("one", "which?", [page(3)]),
        ask("none", "say it", []),
        ask("same", "twice", [page(4), page(4)]),
    ]


@pytest.fixture(scope="session")
def bucket():
    from evisrag_jax.rollout.buckets import Bucket

    return Bucket(prompts=4, images=2, windows=4, tokens=9, length=100, response=32)


@pytest.fixture(scope="session")
def make_engine(params, config, tok, special, layout, bucket):
    """make_engine(**changes of the bucket or of Engine's arguments)."""
    from evisrag_jax.rollout.buckets import BucketTable
    from evisrag_jax.rollout.engine import Engine

    def make(**changes):
        sizes = {f.name for f in dataclasses.fields(bucket)}
        shape = dataclasses.replace(bucket, **{k: v for k, v in changes.items() if k in sizes})
        rest = {k: v for k, v in changes.items() if k not in sizes}
        rest = {"stop_ids": (special.im_end, special.endoftext), "layout": layout} | rest
        first = rest.pop("params", params), rest.pop("config", config), rest.pop("tokenizer", tok)
        return Engine(*first, rest.pop("buckets", BucketTable((shape,))), **rest)

    return make
