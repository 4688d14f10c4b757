"""The start model's lessons and its skill table: weights of answer tokens, shares of lazy responses,
rows of the widened table, scores of hand-made responses, sampling from the model's own distribution."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import evisrag_jax
from evisrag_jax.models.qwen25vl.weights import load_params
from evisrag_jax.prompts.tokenizer import load_tokenizer
from experiments.evidence_rl import sft, skills, start, tokenizer
from experiments.evidence_rl.questions import question, respond
from experiments.mini import sft as mini
from experiments.mini.skills import greedy_tokens


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    return mini.Layout(load_tokenizer(tokenizer.build(tmp_path_factory.mktemp("tokenizer"))))


def test_answer_tokens_weigh_more(layout):
    q = question(0, "even", 0, "counting", "scene")
    batch = sft.picture_batch(layout, [(q, respond(q, False, np.random.default_rng(0)))])
    weights, ids = batch["trained"][0, 0], batch["response"][0, 0]
    heavy = layout.tok.convert_ids_to_tokens(ids[weights == sft.ANSWER_WEIGHT].tolist())
    assert heavy == ["\u2581" + q.answer]
    assert set(np.unique(weights)) == {1.0, sft.ANSWER_WEIGHT}
    assert (
        batch["response_lengths"][0, 0] == 11
    )  # evidence, 4 words, tag, newline, 3 of answer, end


def test_lessons_have_their_share_of_lazy_responses(layout):
    """30 % of 4 x 64 within four standard deviations; none where none is asked for."""
    usual = layout.tok.convert_tokens_to_ids("\u2581usual")
    for share in (0.0, 0.3):
        make = sft.lessons(layout, 0, "train", share, 0)
        lazy = np.mean([(make(step)["response"] == usual).any(-1).mean() for step in range(4)])
        assert abs(lazy - share) <= 4 * np.sqrt(share * (1 - share) / 256)
    texts = sft.lessons(layout, 0, "train", 0.3, 3)(sft.TEXT_EVERY - 1)
    assert texts["pixels"].shape[:2] == (sft.TEXTS, 0)


def test_scores_of_hand_made_responses():
    q = question(0, "shifted", 0, "counting", "scene")
    form = "<evidence> {}</evidence>\n<answer> {}</answer>"
    texts = [
        form.format(q.cues[0], q.answer),
        form.format(f"usual {q.subject}", q.usual),
        form.format(f"{q.subject} 9 9", q.answer),
        "<answer> 1",
    ]
    got = skills.scores([q], [texts])
    assert got == {
        "accuracy": 0.5,
        "accuracy_grounded": 1.0,
        "accuracy_lazy": 0.0,
        "cue": 0.5,
        "format": 0.75,
        "lazy": 0.25,
        "usual": 0.25,
    }


def test_the_widened_model_keeps_its_rows():
    wide, config = start.widened(0)
    assets = Path(evisrag_jax.__file__).parent / "assets"
    old, _ = load_params(assets / "mini-sft", jnp.float32)
    table, rows = (np.asarray(p["text"]["embed"]["embedding"]) for p in (wide, old))
    assert len(table) == len(rows) + len(tokenizer.WORDS) == config.text.vocab
    np.testing.assert_array_equal(table[: len(rows)], rows)
    new = table[len(rows) :]
    assert abs(new.std() / rows.std() - 1) < 0.1 and not np.isclose(new[0], new[1]).any()


def test_greedy_responses_are_the_likeliest_and_samples_differ_and_repeat(layout):
    """Scored with the teacher's forward pass, each greedy token is the likeliest behind those before."""
    params, config = start.widened(0)
    asked = [question(1, "test", i) for i in range(3)]
    (first,), *_ = texts = skills.responses(params, config, layout, asked, greedy=True)
    assert first
    # A response that was cut at the room's end has no place left for an end token.
    rows = [(q, " ".join(text.split(" ")[:5])) for q, (text,) in zip(asked, texts, strict=True)]
    batch = sft.picture_batch(layout, rows)
    chosen = np.asarray(greedy_tokens(params, config, batch))
    for ids, got, n in zip(
        batch["response"][:, 0], chosen, batch["response_lengths"][:, 0], strict=True
    ):
        assert (ids[: n - 1] == got[: n - 1]).all()  # the last is the end token, or was cut

    draws = [
        skills.responses(params, config, layout, asked, greedy=False, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(row) == skills.SAMPLES for row in draws[0])
