"""The models that the package ships, through the whole method and through transformers."""

import json

import pytest
from PIL import Image

from evisrag_jax.cli.session import Answering, make_engine, make_method
from evisrag_jax.data.miniworld.files import write_dataset
from evisrag_jax.data.sources import read_records
from evisrag_jax.rollout.buckets import bucket_table
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.training.pretrained import ASSETS, bundled, load_pretrained

QUESTIONS, MAX_TOKENS = 50, 64


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return read_records(write_dataset(tmp_path_factory.mktemp("mini"), QUESTIONS, "test"))


def test_two_models_are_bundled_and_small():
    """A model stays under 8 MB, all of them under 30."""
    assert bundled() == ["mini", "mini-sft"]
    sizes = [sum(f.stat().st_size for f in (ASSETS / name).iterdir()) for name in bundled()]
    assert max(sizes) < 8e6 and sum(sizes) < 30e6


def test_greedy_answers_equal_transformers(records):
    """The same folder and page files through transformers' own tokenizer, template, image processor
    and model: the same 50 responses, character for character (float32)."""
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pretrained = load_pretrained("mini")
    sampling = SamplingConfig(temperature=0.0, max_tokens=MAX_TOKENS)
    method = make_method(Answering(template="mini", sampling=sampling), pretrained)
    buckets = bucket_table(prompts=(25,), pages=((3, 6, 20),), lengths=(96,), responses=(64,))
    predictions = method(list(records), make_engine(pretrained, buckets))

    folder = pretrained.folder
    tok = AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    pad = tok.convert_tokens_to_ids("<|image_pad|>")
    different = []
    for record, prediction in zip(records, predictions, strict=True):
        pages = [Image.open(path) for path in record.images]
        seen = images(pages, return_tensors="pt")
        content = [{"type": "text", "text": record.question}] + [{"type": "image"}] * len(pages)
        text = tok.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        for _, rows, cols in seen["image_grid_thw"].tolist():
            tokens = rows * cols // images.merge_size**2
            text = text.replace("<|image_pad|>", "<|slot|>" * tokens, 1)
        text = text.replace("<|slot|>", "<|image_pad|>")
        ids = torch.tensor([tok(text).input_ids])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == pad).long(),
            **seen,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=settings["eos_token_id"],
            pad_token_id=settings["pad_token_id"],
        )
        theirs = tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        if theirs != prediction.text:
            different.append((record.id, theirs, prediction.text))
    assert not different
