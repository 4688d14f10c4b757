"""OneCall: from records on disk to predictions, with a scripted engine and with the tiny model."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.data.schema import Record
from evisrag_jax.methods.base import Method, MethodError, Prediction
from evisrag_jax.methods.one_call import OneCall
from evisrag_jax.pages.plan import BUDGETS, PixelBudget
from evisrag_jax.prompts.template import Template
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.requests import Completion
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.training import page_cache
from evisrag_jax.training.page_cache import PageCache

SHORT = SamplingConfig(temperature=0.0, max_tokens=8)
BARE = Template("bare", "{question}")


class Scripted(Engine):
    """An engine that answers with given texts and keeps what it was asked."""

    def __init__(self, real, texts):
        self.tokenizer, self.layout, self.buckets = real.tokenizer, real.layout, real.buckets
        self.texts, self.calls = texts, []

    def generate(self, requests, sampling, *, group=1, seed=0, step=0, params=None):
        self.calls.append((list(requests), sampling, seed))
        return [[completion(self.texts[r.id])] for r in requests]


def completion(text, finish="stop"):
    n = len(text)
    offsets = np.stack([np.arange(n), np.arange(1, n + 1)], 1).astype(np.int32)
    ids, logp = np.zeros(n, np.int32), np.zeros(n, np.float32)
    return Completion(ids, logp, text, offsets, finish, n)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three page files: 56x84, 84x84 and one that is no image."""
    path = tmp_path_factory.mktemp("pages")
    for i, (height, width) in enumerate([(56, 84), (84, 84)]):
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path / f"{i}.png")
    (path / "bad.png").write_bytes(b"not a picture")
    return path


def record(folder, name="q", images=("0.png",), question="what?"):
    paths = tuple(str(folder / i) for i in images)
    return Record(name, question, paths, ("42",), True)


def test_answers_come_from_the_answer_section(make_engine, folder):
    texts = {
        "full": "<think>so</think>\n<answer> 42 </answer> tail",
        "cut": "<think>so</think><answer>4",
        "none": "just 42",
    }
    engine = Scripted(make_engine(), texts)
    method = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, seed=5)
    out = method([record(folder, name) for name in texts], engine)
    assert [p.answer for p in out] == ["42", "4", ""]
    assert [p.id for p in out] == list(texts) and [p.text for p in out] == list(texts.values())
    assert isinstance(method, Method) and method.name == "evidence_cot"
    (requests, sampling, seed), *_ = engine.calls
    assert sampling == SHORT and seed == 5


def test_the_prompt_holds_the_question_and_the_pages_in_order(make_engine, folder):
    engine = Scripted(make_engine(), {"q": ""})
    method = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s")
    made = method.request(record(folder, images=("1.png", "0.png")), engine)
    assert made.prompt.grids == ((6, 6), (4, 6))
    assert [p.grid for p in made.pages] == [(6, 6), (4, 6)]
    assert "what?" in made.prompt.text and made.prompt.text.index("what?") < made.prompt.text.index(
        "<|image_pad|>"
    )
    first = dataclasses.replace(method, images_first=True)
    text = first.request(record(folder), engine).prompt.text
    assert text.index("<|image_pad|>") < text.index("what?")
    one = dataclasses.replace(method, max_pages=1)
    assert one.request(record(folder, images=("1.png", "0.png")), engine).prompt.grids == ((6, 6),)
    none = method.request(record(folder, images=()), engine)
    assert none.pages == () and none.prompt.grids == ()


def test_a_template_can_be_loaded_from_a_file(make_engine, folder, tmp_path):
    path = tmp_path / "published.txt"
    path.write_text("Look first. Question: {question}\n", encoding="utf-8")
    method = OneCall(str(path), BUDGETS["mini"], sampling=SHORT, system="s")
    text = method.request(record(folder), Scripted(make_engine(), {})).prompt.text
    assert "Look first. Question: what?\n" in text
    assert "{question}" in OneCall("evidence_cot", BUDGETS["mini"]).template.text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"images": ("bad.png",)}, "bad.png"),
        ({"images": ("missing.png",)}, "missing.png: no such file"),
        ({"question": "x" * 300}, "limit of 100"),
        ({"images": ("0.png",) * 3}, "3 images.*has 2"),
    ],
)
def test_a_bad_record_is_named_or_recorded(make_engine, folder, changes, message):
    """B02: the error names record and file or limit; with on_error="record" the rest is answered."""
    engine = Scripted(make_engine(), {"a": "A", "c": "C"})
    method = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s")
    records = [record(folder, "a"), record(folder, "b", **changes), record(folder, "c")]
    with pytest.raises(MethodError, match=f"record 'b'.*{message}"):
        method(records, engine)
    out = dataclasses.replace(method, on_error="record")(records, engine)
    assert [p.text for p in out] == ["A", "", "C"]
    assert out[1].finish == "error" and out[1].error and out[0].error is None


def test_records_are_answered_in_chunks_and_a_page_is_read_once_a_chunk(
    make_engine, folder, monkeypatch
):
    reads = []
    load = page_cache.load_page
    monkeypatch.setattr(page_cache, "load_page", lambda p, **k: reads.append(p) or load(p, **k))
    names = [f"r{i}" for i in range(5)]
    engine = Scripted(make_engine(), {n: n for n in names})
    method = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s", chunk=2)
    out = method([record(folder, n) for n in names], engine)
    assert [p.text for p in out] == names
    assert [len(requests) for requests, *_ in engine.calls] == [2, 2, 1] and len(reads) == 3


def test_a_shared_cache_outlives_the_call(make_engine, folder, monkeypatch):
    """Validation again and again reads a page once a run, and no longer holds its patches."""
    reads = []
    load = page_cache.load_page
    monkeypatch.setattr(page_cache, "load_page", lambda p, **k: reads.append(p) or load(p, **k))
    engine = Scripted(make_engine(), {"a": "A", "b": "B"})
    method = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s", pages=PageCache())
    for _ in range(2):
        assert [p.text for p in method([record(folder, n) for n in "ab"], engine)] == ["A", "B"]
    assert len(reads) == 1


def test_bad_settings_are_refused():
    budget = PixelBudget("b", 784, 784)
    for bad in ({"on_error": "skip"}, {"max_pages": 0}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            OneCall(BARE, budget, **bad)


def test_the_tiny_model_answers_end_to_end(make_engine, folder):
    method = OneCall(BARE, BUDGETS["mini"], sampling=SHORT, system="s")
    records = [
        record(folder, "a"),
        record(folder, "b", ("1.png", "0.png")),
        record(folder, "c", ()),
    ]
    out = method(records, make_engine())
    assert all(isinstance(p, Prediction) and p.finish in ("stop", "length") for p in out)
    assert out == method(records, make_engine())
