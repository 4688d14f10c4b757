"""The tiny model, its pages and batches, shared by the SFT tests."""

import pytest

pytest.importorskip("torch", reason="the reference models are torch (extra: test)")

from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.pages.plan import processor_settings
from evisrag_jax.prompts.template import load_template
from evisrag_jax.prompts.tokenizer import load_tokenizer
from evisrag_jax.training.batching import Limits, own_response, prepare
from evisrag_jax.training.page_cache import PageCache
from tests.sft.tiny import BUCKET, make_model, make_pages, make_record


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny-model")


@pytest.fixture(scope="session")
def reference(folder):
    """The torch model; its folder is written."""
    return make_model(folder)


@pytest.fixture(scope="session")
def loaded(folder, reference):
    """(params, config) as read from the folder."""
    return load_params(folder)


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    return make_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="session")
def make_item(folder, reference):
    """Record, responses → Prepared."""
    tokenizer = load_tokenizer(folder)
    budget, layout = processor_settings(folder)
    cache = PageCache()

    def make(record, targets=own_response):
        return prepare(
            record,
            tokenizer=tokenizer,
            template=load_template("mini"),
            layout=layout,
            budget=budget,
            limits=Limits.of([BUCKET]),
            cache=cache,
            targets=targets,
        )

    return make


@pytest.fixture(scope="session")
def items(make_item, pages):
    """Rows of 10, 20, 30 and 40 response tokens with two, one, no and one page."""
    images = (pages, pages[1:], [], pages[:1])
    return [make_item(make_record(f"r{i}", 10 * (i + 1), images[i], seed=i)) for i in range(4)]
