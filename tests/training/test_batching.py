"""Records to batches: what is refused and by which name, padding that adds nothing, one preparation a page."""

import pickle

import jax
import numpy as np
import pytest
from PIL import Image

from evisrag_jax.data.schema import Record
from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.prompts.chat import PromptTooLong
from evisrag_jax.prompts.template import Template
from evisrag_jax.prompts.tokenizer import SpecialIds, load_tokenizer
from evisrag_jax.runtime.mesh import make_mesh
from evisrag_jax.training.batching import (
    Bucket,
    Limits,
    check_divides,
    choose_bucket,
    empty_batch,
    make_group_batch,
    own_response,
    prepare,
    put_batch,
    trained_tokens,
)
from evisrag_jax.training.page_cache import PageCache
from evisrag_jax.training.refusals import EmptyResponse, ResponseTooLong, TooManyPages
from experiments.mini.tokenizer import build

LAYOUT = VisionLayout(window=56)
BUDGET = PixelBudget("test", 784, 56 * 84)
SMALL = Bucket(
    prompts=2, images=1, windows=4, tokens=8, prompt_length=48, group=2, response_length=8
)
LARGE = Bucket(
    prompts=4, images=2, windows=4, tokens=8, prompt_length=96, group=2, response_length=16
)
TEXT = Bucket(
    prompts=2, images=0, windows=0, tokens=0, prompt_length=40, group=2, response_length=8
)


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return load_tokenizer(build(tmp_path_factory.mktemp("mini")))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    names = []
    for i, size in enumerate([(56, 56), (84, 56)]):
        Image.new("RGB", size, (40 * i, 90, 200)).save(folder / f"{i}.png")
        names.append(str(folder / f"{i}.png"))
    return names


def record(id="r", images=(), response="<answer>42</answer>", question="what is the"):
    return Record(id, question, tuple(images), ("42",), True, response=response)


def make(record, tok, *, buckets=(SMALL, LARGE), cache=None, targets=own_response, **more):
    return prepare(
        record,
        tokenizer=tok,
        template=Template("t", "{question} ?"),
        layout=LAYOUT,
        budget=BUDGET,
        limits=Limits.of(buckets),
        cache=cache or PageCache(),
        targets=targets,
        **more,
    )


def test_response_ends_with_one_end_token(tok, pages):
    """B42: the target is the answer's tokens and exactly one <|im_end|>."""
    item = make(record(images=pages), tok)
    end = SpecialIds.from_tokenizer(tok).im_end
    assert item.response_ids[0][-1] == end and item.response_ids[0].count(end) == 1
    assert tok.decode(item.response_ids[0][:-1]).replace(" ", "") == "<answer>42</answer>"
    assert len(item.pages) == 2 and len(item.prompt.grids) == 2
    assert make(record(), tok, targets=None).response_ids is None


def test_question_never_changes_what_is_trained_on(tok, pages):
    """B42: another question, the same response ids."""
    one, two = (
        make(record(images=pages, question=q), tok) for q in ("what is the", "is the is the what")
    )
    assert one.response_ids == two.response_ids
    assert len(one.prompt.ids) != len(two.prompt.ids)


@pytest.mark.parametrize("response", [None, "", "  \n"])
def test_empty_response_is_refused_by_id(tok, response):
    """B42: nothing to train on is no silent zero mask."""
    with pytest.raises(EmptyResponse, match="record r1: has no response") as caught:
        make(record("r1", response=response), tok)
    assert caught.value.kind == "no_response"


def test_too_long_is_refused_never_cut(tok, pages):
    """B15: prompt and response name the record, the need and the limit; the limit itself passes."""
    needed = len(make(record(images=pages), tok).prompt.ids)
    tight = [Bucket(1, 2, 4, 8, needed, 1, 8), Bucket(1, 2, 4, 8, needed - 1, 1, 8)]
    make(record("fits", pages), tok, buckets=tight[:1])
    with pytest.raises(PromptTooLong, match=f"record over.*{needed} tokens.*{needed - 1}"):
        make(record("over", pages), tok, buckets=tight[1:])
    long = record("long", response="<answer>" + " 42" * 20 + "</answer>")
    with pytest.raises(ResponseTooLong, match="record long.*23 tokens.*limit of 16"):
        make(long, tok)


def test_pages_over_the_limits_are_refused(tok, pages):
    with pytest.raises(TooManyPages, match="record many: needs 3 pages, the limit is 2"):
        make(record("many", [*pages, pages[0]]), tok)
    with pytest.raises(TooManyPages, match="record big: needs 6 tokens a page, the limit is 4"):
        make(record("big", pages), tok, buckets=(Bucket(1, 2, 4, 4, 96, 1, 16),))
    with pytest.raises(PageError, match="missing.png"):
        make(record(images=["missing.png"]), tok)


def test_refusals_survive_pickling():
    for error in (
        EmptyResponse("a"),
        ResponseTooLong("a", 3, 2),
        TooManyPages("a", 3, 2, "windows a page"),
    ):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and str(back) == str(error) and back.kind == error.kind


def test_smallest_bucket_that_holds_all_is_taken(tok, pages):
    text, one, two = (make(record(f"r{n}", pages[:n]), tok) for n in range(3))
    buckets = (LARGE, SMALL, TEXT)
    assert choose_bucket([text, text], buckets) is TEXT
    assert choose_bucket([text, one], buckets) is SMALL
    assert choose_bucket([text, two], buckets) is LARGE
    assert choose_bucket([text] * 3, buckets) is LARGE
    with pytest.raises(ValueError, match="5 prompts for buckets of at most 4"):
        choose_bucket([text] * 5, buckets)
    with pytest.raises(TooManyPages, match="record r2: needs 2 pages, the limit is 1"):
        choose_bucket([two], (SMALL, TEXT))
    with pytest.raises(ValueError, match="no buckets"):
        choose_bucket([text], ())


def test_batch_pads_with_rows_that_weigh_nothing(tok, pages):
    """B18, B29: text rows stand beside image rows; empty rows have one token and no response."""
    text, two = make(record("text"), tok), make(record("two", pages), tok)
    batch = make_group_batch([text, two], (LARGE,), layout=LAYOUT)
    assert batch.tokens.shape == (4, 2, 16) and batch.prompt.tokens.shape == (4, 96)
    lengths = [[len(i.response_ids[0]), 0] for i in (text, two)] + [[0, 0], [0, 0]]
    np.testing.assert_array_equal(batch.lengths, lengths)
    assert trained_tokens(batch) == sum(map(sum, lengths))
    np.testing.assert_array_equal(batch.prompt.lengths[2:], [1, 1])
    np.testing.assert_array_equal(batch.prompt.next_position[2:], [1, 1])
    assert np.all(batch.prompt.image_index[[0, 2, 3]] == -1)
    assert not batch.images.mask[[0, 2, 3]].any() and batch.images.mask[1].any()
    # A text row counts up on all three axes.
    n = batch.prompt.lengths[0]
    np.testing.assert_array_equal(
        batch.prompt.positions[0, :, :n], np.broadcast_to(np.arange(n), (3, n))
    )
    only_text = make_group_batch([text], (TEXT,))
    assert only_text.images is None


def test_empty_batch_has_the_shapes_of_a_full_one(tok, pages):
    for bucket in (LARGE, TEXT):
        item = make(record(images=pages if bucket.images else ()), tok)
        full = make_group_batch([item], (bucket,), layout=LAYOUT)
        empty = empty_batch(bucket, pad_id=item.prompt.pad_id, layout=LAYOUT)
        for a, b in zip(jax.tree.leaves(empty), jax.tree.leaves(full), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(a[1:], b[1:])  # the rows below the one record
        assert trained_tokens(empty) == 0


def test_sampled_ids_go_in_as_they_are(tok):
    """B43: what was sampled is trained on, whatever it would encode to again."""
    item = make(record(), tok, targets=None)
    batch = make_group_batch([item], (TEXT,), responses=[[[29, 28], [5]]])
    np.testing.assert_array_equal(batch.tokens[0, 0, :2], [29, 28])
    np.testing.assert_array_equal(batch.lengths, [[2, 1], [0, 0]])
    with pytest.raises(ValueError, match="record r: has no responses"):
        make_group_batch([item], (TEXT,))


def test_buckets_and_meshes_are_checked():
    with pytest.raises(ValueError, match="bucket.prompts=0"):
        Bucket(0, 1, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="bucket.images=1"):
        Bucket(1, 1, 0, 1, 1, 1, 1)
    mesh = make_mesh(devices=jax.devices()[:4])
    check_divides(8, mesh)
    with pytest.raises(ValueError, match="6 prompts.*4 devices"):
        check_divides(6, mesh)


def test_batch_goes_to_its_devices_under_the_transfer_guard(tok, pages):
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    batch = make_group_batch([make(record(images=pages), tok)], (LARGE,), layout=LAYOUT)
    with jax.transfer_guard("disallow"):
        placed = put_batch(batch, mesh)
    assert placed.tokens.sharding.spec == jax.sharding.PartitionSpec(("data", "fsdp"))
    jax.tree.map(np.testing.assert_array_equal, placed, batch)
