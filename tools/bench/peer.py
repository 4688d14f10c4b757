"""The torch side: transformers' Qwen2.5-VL on the same folder, every prompt repeated for its group.

No gradient checkpointing, SDPA attention, the tower frozen and without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging

from evisrag_jax.pages.patches import reading_order_patches

from .case import Case, Responses


def load(
    folder: Path, threads: int, *, dtype: torch.dtype = torch.float32
) -> Qwen2_5_VLForConditionalGeneration:
    """The model of a folder with its tower frozen."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    freeze_tower(model)
    return model.eval()


def freeze_tower(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """No parameter of the tower has a gradient, so autograd records nothing there."""
    model.model.visual.requires_grad_(False)


def make_inputs(case: Case, copies: int = 1, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Model inputs of all prompts, each with its pages `copies` times over."""
    rows = [p for p in range(len(case.prompts)) for _ in range(copies)]
    ids = np.stack([case.prompts[p].ids for p in rows]).astype(np.int64)
    marks = np.stack([case.prompts[p].image_slot >= 0 for p in rows]).astype(np.int64)
    pages = [page for p in rows for page in case.pages[p]]
    inputs = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.ones(ids.shape, dtype=torch.int64),
        "mm_token_type_ids": torch.from_numpy(marks),
        "pixel_values": torch.from_numpy(np.concatenate([_pixels(page) for page in pages])),
        "image_grid_thw": torch.tensor([[1, *page.grid] for page in pages]),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def _pixels(page: Any) -> np.ndarray:
    """The published processor's rows: each patch twice, for two temporal frames."""
    frame = reading_order_patches(page)
    area = frame.shape[1] // 3
    frame = frame.reshape(-1, 3, 1, area)
    return np.repeat(frame, 2, axis=2).reshape(len(frame), -1)


@torch.no_grad()
def generate(
    model: Qwen2_5_VLForConditionalGeneration,
    inputs: dict[str, torch.Tensor],
    *,
    tokens: int,
    greedy: bool,
    group: int,
    suppress: Sequence[int],
    stop_ids: Sequence[int],
) -> torch.Tensor:
    """Exactly `tokens` new ids [rows, T]. Greedy search takes `inputs` that are repeated already;
    for sampling transformers repeats them itself."""
    how = {"do_sample": False}
    if not greedy:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        how["num_return_sequences"] = group
    out = model.generate(
        **inputs,
        **how,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        suppress_tokens=list(suppress),
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[1],
    )
    return out[:, inputs["input_ids"].shape[1] :]


class Update:
    """An optimiser step of the clipped policy loss over the G copies of every prompt.

    advantages: [P, G, T], those of our side.
    """

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        case: Case,
        responses: Responses,
        advantages: np.ndarray,
        *,
        learning_rate: float,
        weight_decay: float,
        clip_norm: float,
        clip_low: float,
        clip_high: float,
    ):
        shape = case.shape
        self.model, self.clip_norm = model, clip_norm
        self.clip = clip_low, clip_high
        self.T = shape.response
        self.responses = torch.from_numpy(responses.tokens.reshape(-1, self.T).astype(np.int64))
        self.advantages = torch.from_numpy(np.array(advantages).reshape(-1, self.T))
        # The last token predicts nothing that is trained on, so it is not fed.
        fed = self.responses[:, :-1]
        inputs = make_inputs(case, shape.group)
        self.inputs = inputs | {
            "input_ids": torch.cat([inputs["input_ids"], fed], 1),
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(fed)], 1),
            "mm_token_type_ids": torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(fed)], 1),
        }
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.trained = trained
        self.optimiser = torch.optim.AdamW(groups, lr=learning_rate, fused=True)

    def log_probs(self) -> torch.Tensor:
        """[P·G, T]; logits exist for response positions only."""
        out = self.model(**self.inputs, logits_to_keep=self.T, use_cache=False)
        chosen = out.logits.gather(2, self.responses[..., None])[..., 0]
        return chosen - out.logits.logsumexp(-1)

    def loss(self, old: torch.Tensor | None = None) -> torch.Tensor:
        """The token mean of max(-A r, -A clipped r); `old` [P·G, T] are the log-probs of the policy
        that sampled, None for this one."""
        logp = self.log_probs()
        ratio = (logp - (logp.detach() if old is None else old)).exp()
        bounded = ratio.clamp(1 - self.clip[0], 1 + self.clip[1])
        return torch.maximum(-self.advantages * ratio, -self.advantages * bounded).mean()

    def gradients(self, old: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The loss, and gradients by published tensor name; leaves no gradient behind."""
        loss = self.loss(torch.from_numpy(np.array(old).reshape(-1, self.T)))
        loss.backward()
        grads = {
            _published(name): p.grad.numpy().copy()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        self.optimiser.zero_grad(set_to_none=True)
        return float(loss.detach()), grads

    def __call__(self) -> float:
        """One step."""
        loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, self.clip_norm)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return float(loss.detach())


def _published(name: str) -> str:
    """A module's parameter name as the published files spell it."""
    name = name.replace("model.language_model.", "model.")
    return name.replace("model.visual.", "visual.")
