"""The engine on a stub model whose next token depends on the last one only: endings, failures, bookkeeping."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.models.qwen25vl.text import KV
from evisrag_jax.rollout import generate
from evisrag_jax.rollout.buckets import BucketTable, RequestTooLarge
from evisrag_jax.rollout.engine import Engine, unsampled_ids
from evisrag_jax.rollout.requests import Request, longest_run
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.mesh import make_mesh

VOCAB = 272


class Markov:
    """The functions the rollout needs of a model; logits are params["table"][last token]."""

    @staticmethod
    def prefill(params, config, prompt, features):
        kv = jnp.zeros((1, *prompt.tokens.shape, 1, 1))
        return prompt.tokens[..., None].astype(jnp.float32), KV(kv, kv)

    @staticmethod
    def last_hidden(hidden, lengths):
        return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]

    @staticmethod
    def compute_dtype(params):
        return jnp.float32

    @staticmethod
    def decode_params(params, config, fuse):
        return params

    @staticmethod
    def decode_step(params, config, tokens, positions, count, seats, lengths, prefix, suffix):
        return tokens[..., None].astype(jnp.float32), suffix

    @staticmethod
    def decode_logits(params, hidden):
        return params["table"][hidden[..., 0].astype(jnp.int32)]

    @staticmethod
    def resident_kv(kv):
        return KV(*(tuple(a.transpose(0, 1, 3, 2, 4)) for a in kv))

    @staticmethod
    def empty_kv(config, rows, length, dtype):
        zeros = (jnp.zeros((rows, 1, length, 1), dtype),)
        return KV(zeros, zeros)


@dataclasses.dataclass(frozen=True)
class Text:
    vocab: int = VOCAB
    width: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    text: Text = Text()


def chain(tok, start, *steps):
    """A table that leads from the prompt's last token through `steps`: ids, or "nan"."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    here = tok.backend_tokenizer.token_to_id(start)
    for step in steps:
        if step == "nan":
            table[here] = np.nan
            break
        table[here, step] = 50.0
        here = step
    return {"table": jnp.asarray(table)}


@pytest.fixture(scope="module")
def letter(tok):
    return lambda c: tok.backend_tokenizer.token_to_id(c)


@pytest.fixture
def run(tok, special, bucket, ask):
    """run(table, ...) → completions of text requests; a prompt ends with a newline token."""

    def call(params, sampling=None, names=("r",), stop_ids=None, **options):
        shape = dataclasses.replace(bucket, images=0, windows=0, tokens=0)
        stop_ids = stop_ids or (special.im_end, special.endoftext)
        table = BucketTable((shape,))
        engine = Engine(params, Config(), tok, table, model=Markov, stop_ids=stop_ids)
        sampling = sampling or SamplingConfig(temperature=0.0, max_tokens=8)
        return engine.generate([ask(n, "hi") for n in names], sampling, **options)

    return call


PROGRAMS = tuple(
    getattr(generate, name)
    for name in (
        "prepare",
        "empty_pool",
        "prefill",
        "empty_slots",
        "admit",
        "shrink",
        "decode",
        "results",
    )
)
NEWLINE = "Ċ"  # the byte-level spelling of the chat layout's last token


@pytest.mark.parametrize("end", ["im_end", "endoftext"])
def test_b40_either_end_id_stops_and_is_kept_once(run, tok, special, letter, end):
    stop = getattr(special, end)
    params = chain(tok, NEWLINE, letter("a"), letter("b"), stop, letter("c"))
    ((out,),) = run(params)
    assert out.finish == "stop" and out.ids.tolist() == [letter("a"), letter("b"), stop]
    assert out.length == 3 and len(out.logp) == 3 and out.error is None
    assert out.text == "ab"
    assert out.offsets.tolist() == [[0, 1], [1, 2], [2, 2]]


def test_b40_neither_end_id_runs_to_the_limit(run, tok, letter):
    params = chain(tok, NEWLINE, *[letter(c) for c in "abcdefgh"])
    ((out,),) = run(params, SamplingConfig(temperature=0.0, max_tokens=4))
    assert (out.finish, out.text, out.length) == ("length", "abcd", 4)


def test_b40_a_stop_token_that_is_no_special_token_stays_out_of_the_text(run, tok, letter):
    params = chain(tok, NEWLINE, letter("a"), letter("!"))
    ((out,),) = run(params, stop_ids=(letter("!"), letter("?")))
    assert (out.text, out.finish, out.ids.tolist()[-1]) == ("a", "stop", letter("!"))


def test_b28_nan_logits_mark_the_row_with_the_step_and_emit_nothing(run, tok, letter):
    """NaN at response token 3: three good tokens, finish "error", the token's number in the message."""
    params = chain(tok, NEWLINE, letter("a"), letter("b"), letter("c"), "nan")
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(temperature=temperature, max_tokens=8)
        (group,) = run(params, sampling, group=2)
        for out in group:
            assert (out.finish, out.text, out.length) == ("error", "abc", 3)
            assert "response token 3" in out.error and np.isfinite(out.logp).all()
            assert 0 not in out.ids.tolist()


def test_b28_nan_at_the_first_token(run, tok):
    ((out,),) = run(chain(tok, NEWLINE, "nan"))
    assert (out.finish, out.text, out.length, out.offsets.shape) == ("error", "", 0, (0, 2))


@pytest.mark.parametrize("count, flag", [(19, False), (20, True)])
def test_b28_twenty_equal_tokens_in_a_row_are_degenerate(run, tok, letter, count, flag):
    params = chain(tok, NEWLINE, letter("z"), letter("z"))
    ((out,),) = run(params, SamplingConfig(temperature=0.0, max_tokens=count))
    assert out.degenerate is flag and out.text == "z" * count
    assert longest_run(np.asarray([1, 2, 2, 2, 1], np.int32)) == 3
    assert longest_run(np.zeros(0, np.int32)) == 0


def test_image_marks_padding_and_rows_beyond_the_tokenizer_are_never_sampled(run, tok, special):
    """A flat distribution: 1,200 draws, none of the 12 ids; the default ban equals the list by hand."""
    vision = [special.vision_start, special.vision_end, special.vision_pad]
    vision += [special.image_pad, special.video_pad]
    expected = sorted([*vision, *range(264, VOCAB)])
    assert list(unsampled_ids(tok, VOCAB, (special.im_end, special.endoftext))) == expected
    assert special.endoftext in unsampled_ids(tok, VOCAB, (special.im_end,))
    flat = {"table": jnp.zeros((VOCAB, VOCAB))}
    out = run(flat, SamplingConfig(max_tokens=32), names=[f"r{i}" for i in range(5)], group=8)
    drawn = np.concatenate([c.ids for group in out for c in group])
    assert len(drawn) > 500 and not np.isin(drawn, expected).any()


def test_rows_keep_their_own_settings_and_order(run, tok, letter):
    params = chain(tok, NEWLINE, *[letter(c) for c in "abcdefgh"])
    names = [f"r{i}" for i in range(9)]  # three batches of four
    settings = [SamplingConfig(temperature=0.0, max_tokens=1 + i % 5) for i in range(9)]
    out = run(params, settings, names=names)
    assert [group[0].text for group in out] == ["abcde"[: 1 + i % 5] for i in range(9)]


def test_split_utf8_characters_decode_with_offsets(run, tok, letter):
    """Three byte tokens of one character share its span."""
    alphabet = tok("€", add_special_tokens=False).input_ids
    assert len(alphabet) == 3
    params = chain(tok, NEWLINE, letter("a"), *alphabet)
    ((out,),) = run(params, SamplingConfig(temperature=0.0, max_tokens=4))
    assert out.text == "a€" and out.offsets.tolist() == [[0, 1], [1, 2], [1, 2], [1, 2]]


def test_requests_over_a_limit_are_refused_by_name(make_engine, ask, page):
    engine = make_engine()
    good = ask("good", "hi")
    short, long = SamplingConfig(max_tokens=4), SamplingConfig(max_tokens=99)
    with pytest.raises(RequestTooLarge, match="'wordy'.*prompt tokens"):
        engine.generate([good, ask("wordy", "x" * 200)], short)
    with pytest.raises(RequestTooLarge, match="'three'.*3 images.*2"):
        engine.generate([ask("three", "hi", [page(1, (1, 1))] * 3)], short)
    with pytest.raises(RequestTooLarge, match="'big'.*12 merged tokens"):
        engine.generate([ask("big", "hi", [page(1, (2, 6))])], short)
    with pytest.raises(RequestTooLarge, match="'good'.*99 response tokens.*32"):
        engine.generate([good], long)


def test_pages_must_be_those_of_the_prompt(make_engine, ask, page):
    engine = make_engine()
    made = ask("r", "hi", [page(1)])
    for pages, message in (((), "1 images, but 0 pages"), ((page(2, (3, 3)),), "page 0: a grid")):
        with pytest.raises(ValueError, match=f"'r'.*{message}"):
            engine.generate([Request("r", made.prompt, pages)], SamplingConfig(max_tokens=4))


def test_bad_engine_arguments_are_refused(make_engine, special):
    with pytest.raises(ValueError, match="stop_ids"):
        make_engine(stop_ids=())
    with pytest.raises(ValueError, match="banned"):
        make_engine(banned_ids=[special.im_end])
    with pytest.raises(ValueError, match="2 sampling settings for 0"):
        make_engine().generate([], [SamplingConfig(max_tokens=2)] * 2)
    assert make_engine().generate([], SamplingConfig(max_tokens=2)) == []


def test_warm_up_compiles_every_bucket_so_that_generating_compiles_nothing(tok, bucket, ask):
    shape = dataclasses.replace(bucket, images=0, windows=0, tokens=0)
    table = BucketTable((shape, dataclasses.replace(shape, length=80)))
    engine = Engine(
        chain(tok, NEWLINE), Config(), tok, table, model=Markov, stop_ids=(256, 258), banned_ids=()
    )
    assert engine.warm_up(group=20) == 2
    sizes = [program._cache_size() for program in PROGRAMS]
    requests = [ask(f"r{i}", "hi" if i % 2 else "x" * 30) for i in range(6)]
    settings = [SamplingConfig(max_tokens=4 + 3 * i) for i in range(6)]
    engine.generate(requests, settings, group=20)
    assert [program._cache_size() for program in PROGRAMS] == sizes


def test_a_mesh_splits_caches_over_prompts():
    """Two shards of two prompts and four slots: a device holds its half, never a whole copy."""
    mesh = make_mesh(data=2, fsdp=1, tensor=1, devices=jax.devices()[:2])
    pool = generate.empty_pool(
        Markov, Config(), shards=2, rows=2, length=5, vocab=VOCAB, dtype=jnp.float32, mesh=mesh
    )
    slots = generate.empty_slots(Markov, Config(), pool, slots=4, response=8, mesh=mesh)
    for array in jax.tree.leaves((pool, slots)):
        assert {s.data.shape[0] for s in array.addressable_shards} == {1}


def test_buckets_must_divide_over_the_mesh(make_engine):
    mesh = make_mesh(data=8)
    with pytest.raises(ValueError, match="4 prompts do not divide over 8"):
        make_engine(mesh=mesh)
