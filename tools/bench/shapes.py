"""The measured shapes as data: a model and the sizes of one prompt's group."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig, TextConfig, VisionConfig

LAYOUT = ("endoftext", "im_start", "im_end")
LAYOUT += ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")


@dataclass(frozen=True)
class Shape:
    """A model and one group.

    page: rows and columns of a page in merged tokens.  prompt: L, pages included.  group: G.
    response: T.  prompts: P.
    """

    name: str
    text: TextConfig
    vision: VisionConfig
    pages: int
    page: tuple[int, int]
    prompt: int
    group: int
    response: int
    prompts: int = 1

    @property
    def page_tokens(self) -> int:
        """Merged tokens a page."""
        return self.page[0] * self.page[1]

    @property
    def config(self) -> Qwen25VLConfig:
        """The model; the eight layout tokens are the last ids of the vocabulary."""
        ids = layout_ids(self.text.vocab)
        return Qwen25VLConfig(
            self.text,
            self.vision,
            image_token=ids["image_pad"],
            video_token=ids["video_pad"],
            vision_start=ids["vision_start"],
            vision_end=ids["vision_end"],
        )

    def sizes(self) -> dict[str, Any]:
        """Everything, as plain data for a report."""
        return dataclasses.asdict(self) | {"page_tokens": self.page_tokens}


def layout_ids(vocab: int) -> dict[str, int]:
    """Ids of the layout tokens by bare name."""
    first = vocab - len(LAYOUT)
    return {name: first + i for i, name in enumerate(LAYOUT)}


def _text(vocab: int, width: int, mlp: int, layers: int, heads: int, kv: int, **more) -> TextConfig:
    head = width // heads
    section = (head // 2 - 2 * (head * 3 // 16), head * 3 // 16, head * 3 // 16)
    settings = {"theta": 1e6, "mrope_section": section, "tied": True, "head_dim": head} | more
    return TextConfig(vocab, width, mlp, layers, heads, kv, max_positions=32_768, **settings)


_RAG = {
    "text": _text(32_000, 512, 1536, 8, 8, 2),
    "vision": VisionConfig(
        depth=8, width=256, mlp=684, heads=4, out_width=512, full_attention=(3, 7)
    ),
}
_QWEN_VISION = VisionConfig(
    depth=32, width=1280, mlp=3420, heads=16, out_width=2048, full_attention=(7, 15, 23, 31)
)

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("rag-cpu", **_RAG, pages=3, page=(16, 16), prompt=900, group=8, response=128),
        Shape("rag-cpu-long", **_RAG, pages=5, page=(18, 25), prompt=2500, group=8, response=128),
        Shape(
            "tiny",
            text=_text(512, 64, 128, 2, 4, 2),
            vision=VisionConfig(
                depth=2, width=32, mlp=64, heads=2, out_width=64, full_attention=(1,)
            ),
            pages=2,
            page=(2, 3),
            prompt=40,
            group=4,
            response=8,
        ),
        Shape(
            "qwen-3b",
            text=_text(151_936, 2048, 11_008, 36, 16, 2),
            vision=_QWEN_VISION,
            pages=5,
            page=(46, 42),
            prompt=10_000,
            group=8,
            response=1024,
        ),
        Shape(
            "qwen-7b",
            text=_text(152_064, 3584, 18_944, 28, 28, 4, tied=False),
            vision=dataclasses.replace(_QWEN_VISION, out_width=3584),
            pages=5,
            page=(46, 42),
            prompt=10_000,
            group=8,
            response=1024,
        ),
    )
}
CPU_SHAPES = ("rag-cpu", "rag-cpu-long", "tiny")
