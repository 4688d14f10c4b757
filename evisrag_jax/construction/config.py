"""Settings of a construction, beside those of its teacher and its SFT model."""

from __future__ import annotations

from dataclasses import dataclass, field

from evisrag_jax.construction.contexts import ContextConfig
from evisrag_jax.construction.difficulty import DifficultyConfig
from evisrag_jax.construction.splits import SplitConfig


@dataclass(frozen=True)
class FilterConfig:
    """samples: responses that the teacher gives a context.  keep: how many of the right ones become SFT
    records, the first ones that differ; the first also gives a GRPO record its evidence."""

    samples: int = 8
    keep: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1 or not 1 <= self.keep <= self.samples:
            raise ValueError(
                f"filters.samples={self.samples}, filters.keep={self.keep}: keep from 1 to samples"
            )


@dataclass(frozen=True)
class InspectionConfig:
    """Rows of the sheet for a manual inspection, and the seed of their draw."""

    sufficient: int = 75
    insufficient: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sufficient < 0 or self.insufficient < 0:
            raise ValueError(
                f"inspection: {self.sufficient} and {self.insufficient} rows; none is 0"
            )


@dataclass(frozen=True)
class ConstructionConfig:
    """limit: only the first questions, 0 for all.  chunk: contexts whose pages and prompts are held at a
    time."""

    limit: int = 0
    chunk: int = 64
    contexts: ContextConfig = field(default_factory=ContextConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    inspection: InspectionConfig = field(default_factory=InspectionConfig)

    def __post_init__(self) -> None:
        if self.limit < 0 or self.chunk < 1:
            raise ValueError(f"limit={self.limit} or chunk={self.chunk} is too small")
