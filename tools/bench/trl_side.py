"""TRL's GRPOTrainer on the same folder, prompts and pages, on the CPU in float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProcessorMixin, TrainerCallback
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOConfig, GRPOTrainer

from .case import BUDGET, Case
from .peer import freeze_tower, load


class PageProcessor(ProcessorMixin):
    """Qwen2_5_VLProcessor's pages and text without its video half, which needs torchvision."""

    return_mm_token_type_ids = True

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **_):
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_) -> str:
        """One mark a merged token."""
        merged = self.image_processor.merge_size**2
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // merged)


def make_processor(case: Case) -> PageProcessor:
    """The processor of the case's tokenizer, with its page budget."""
    pages = Qwen2VLImageProcessorPil(
        min_pixels=BUDGET.min_pixels, max_pixels=BUDGET.max_pixels, patch_size=case.layout.patch
    )
    return PageProcessor(pages, case.tokenizer, chat_template=case.tokenizer.chat_template)


def prompt_ids(case: Case, processor: PageProcessor) -> list[list[int]]:
    """The prompts as TRL lays them out, to compare with ours."""
    rows = []
    for text, pictures in zip(case.texts, case.pictures, strict=True):
        content = [
            *({"type": "image", "image": p} for p in pictures),
            {"type": "text", "text": text},
        ]
        out = processor.apply_chat_template(
            conversation=[[{"role": "user", "content": content}]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
        rows.append([int(i) for i in out["input_ids"][0]])
    return rows


class _Turns(TrainerCallback):
    """Times TRL's steps and gives the other side its turn after each of them."""

    def __init__(self, other: Callable[[], Any]):
        self.other = other
        self.theirs: list[float] = []
        self.ours: list[float] = []

    def on_step_begin(self, *_, **__):
        """The batch of prompts is there; rollout and update follow."""
        self._begin = time.perf_counter()

    def on_step_end(self, *_, **__):
        """The optimiser has stepped."""
        self.theirs.append(time.perf_counter() - self._begin)
        begin = time.perf_counter()
        self.other()
        self.ours.append(time.perf_counter() - begin)


def run(
    case: Case,
    folder: Path,
    *,
    other: Callable[[], Any],
    reward: Callable[[Any], float],
    steps: int,
    threads: int,
    learning_rate: float,
    weight_decay: float,
    scratch: Path,
) -> dict[str, Any]:
    """`trainer.train()` for so many steps, `other()` called after each.

    reward: of one completion's ids.  Returns seconds by side, tokens a step, and TRL's settings.
    """
    shape = case.shape
    model = load(folder, threads)
    freeze_tower(model)
    model.train()
    counts: list[int] = []

    def reward_ids(completion_ids, **_) -> list[float]:
        counts.append(sum(map(len, completion_ids)))
        return [reward(ids) for ids in completion_ids]

    rows = [
        {"prompt": [{"role": "user", "content": text}], "images": list(pictures)}
        for text, pictures in zip(case.texts, case.pictures, strict=True)
    ]
    settings = {
        "per_device_train_batch_size": shape.prompts * shape.group,
        "num_generations": shape.group,
        "max_completion_length": shape.response,
        "temperature": 1.0,
        "max_steps": steps,
        "gradient_checkpointing": False,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "generation_kwargs": {
            "min_new_tokens": shape.response,
            "suppress_tokens": case.never_sampled,
        },
        "shuffle_dataset": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    turns = _Turns(other)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_ids,
        args=GRPOConfig(output_dir=str(scratch), **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=make_processor(case),
        callbacks=[turns],
    )
    trainer.remove_callback(PrinterCallback)
    if threads:
        torch.set_num_threads(threads)  # whatever the trainer's start has done
    trainer.train()
    return {"ours": turns.ours, "trl": turns.theirs, "tokens": counts, "settings": settings}
