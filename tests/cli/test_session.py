"""What the commands share: model, method, buckets around a question, data sets."""

import dataclasses

import pytest

from evisrag_jax.cli.session import (
    Answering,
    Model,
    SessionError,
    Shapes,
    make_engine,
    make_method,
    open_model,
    read_set,
    snug_buckets,
)
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.data.sources import read_records
from evisrag_jax.pages.plan import BUDGETS
from evisrag_jax.rollout.requests import measure
from evisrag_jax.rollout.sampling import SamplingConfig

MINI = Answering(template="mini", sampling=SamplingConfig(temperature=0.0, max_tokens=64))


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return read_records(write_dataset(tmp_path_factory.mktemp("data"), 1, "test"))[0]


@pytest.fixture(scope="module")
def pretrained(tiny_model):
    return open_model(Model(str(tiny_model)))


def test_model_dtype_and_budget(tiny_model, pretrained):
    """On a CPU "auto" is float32; the folder's own budget unless another is named."""
    assert str(pretrained.params["text"]["embed"]["embedding"].dtype) == "float32"
    assert (pretrained.budget.min_pixels, pretrained.budget.max_pixels) == (784, 50176)
    other = open_model(Model(str(tiny_model), dtype="bfloat16", budget="grpo"))
    assert str(other.params["text"]["embed"]["embedding"].dtype) == "bfloat16"
    assert other.budget == BUDGETS["grpo"]


def test_method_takes_every_setting(pretrained):
    answering = dataclasses.replace(
        MINI, max_pages=2, images_first=True, system="s", exif_transpose=False, seed=3
    )
    method = make_method(answering, pretrained, on_error="record")
    assert method.template.name == "mini" and method.budget == pretrained.budget
    assert (method.max_pages, method.images_first, method.system) == (2, True, "s")
    assert (method.exif_transpose, method.seed, method.on_error) == (False, 3, "record")
    assert method.sampling.max_tokens == 64
    assert make_method(MINI, pretrained).max_pages is None
    assert make_method(MINI, pretrained).system is None


@pytest.mark.parametrize(
    "changes", [{}, {"max_pages": 1}, {"images_first": True}, {"system": "You are a page . " * 30}]
)
def test_snug_bucket_holds_its_question(record, pretrained, changes):
    """The request that the method makes fits, with less than one step to spare."""
    answering = dataclasses.replace(MINI, **changes)
    table = snug_buckets(record, answering, pretrained)
    (bucket,) = table.buckets
    engine = make_engine(pretrained, table)
    request = make_method(answering, pretrained).request(record, engine)
    need = measure(request, answering.sampling)
    assert bucket.lacks(need) is None
    assert bucket.images == need.images and bucket.tokens == need.tokens == 20
    assert bucket.windows == need.windows == 6 and bucket.length - need.length < 32


def test_snug_bucket_of_a_question_without_pages(record, pretrained):
    (bucket,) = snug_buckets(
        dataclasses.replace(record, images=(), evidence=()), MINI, pretrained
    ).buckets
    assert (bucket.images, bucket.windows, bucket.tokens) == (0, 0, 0)


def test_settings_are_refused_by_name(tiny_model, tmp_path):
    for make, message in (
        (lambda: Answering(name="cot"), "method.name='cot'; one of evidence_cot"),
        (lambda: Shapes((1,), (), (96,), (64,)), "shapes.pages is empty"),
        (lambda: open_model(Model("")), "model.path: a model folder is needed"),
        (lambda: open_model(Model("nowhere")), "model.path: nowhere: no such model folder"),
        (lambda: open_model(Model(str(tiny_model), "fp16")), "model.path: .*float16 is refused"),
        (lambda: read_set(tmp_path / "no.jsonl"), "data.path: .*no.jsonl"),
    ):
        with pytest.raises(SessionError, match=message) as caught:
            make()
        assert caught.value.exit_code == 2


def test_refused_rows_are_said_and_an_empty_set_is_an_error(record, tmp_path, capsys):
    path = write_dataset(tmp_path, 2, "test")
    lines = path.read_text().splitlines()
    path.write_text('{"id": "odd"}\n' + "\n".join(lines) + "\n")
    records, refused = read_set(path)
    assert len(records) == 2 and len(refused) == 1 and "odd" in refused[0]
    assert capsys.readouterr().err == f"skipped: {refused[0]}\n"
    path.write_text('{"id": "odd"}\n')
    with pytest.raises(SessionError, match=r"no usable question \(1 rows are refused\)"):
        read_set(path)
