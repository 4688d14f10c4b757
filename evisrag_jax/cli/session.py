"""What `eval`, `ask`, `rl` and `quickstart` share: a model folder, an engine, a method, a data set."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evisrag_jax.data.schema import Record
from evisrag_jax.data.sources import read_records
from evisrag_jax.methods import registry
from evisrag_jax.methods.base import Method
from evisrag_jax.methods.registry import METHODS
from evisrag_jax.pages.decode import load_page
from evisrag_jax.pages.patches import window_layout
from evisrag_jax.pages.plan import plan_resize, resolve_budget
from evisrag_jax.prompts.chat import build_prompt
from evisrag_jax.prompts.template import load_template
from evisrag_jax.rollout.buckets import BucketTable, bucket_table
from evisrag_jax.rollout.engine import Engine
from evisrag_jax.rollout.sampling import SamplingConfig
from evisrag_jax.runtime.precision import default_precision
from evisrag_jax.training.pretrained import Pretrained, load_pretrained


class SessionError(ValueError):
    """Settings of a command that cannot be; the message names the field."""

    exit_code = 2


@contextlib.contextmanager
def setting(name: str) -> Iterator[None]:
    """Errors of the block become one that names the setting it is about."""
    try:
        yield
    except SessionError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise SessionError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Model:
    """path: a Hugging Face folder or the name of a bundled model.  dtype: of parameters and
    products, "auto" for float32 on a CPU and bfloat16 elsewhere.  budget: a named pixel budget in
    place of the folder's."""

    path: str = "mini"
    dtype: str = "auto"
    budget: str = ""


@dataclass(frozen=True)
class Shapes:
    """The static shapes of a rollout: every combination is a bucket.

    prompts: rows of a batch.  pages: (pages a prompt, windows a page, merged tokens a page).
    lengths: prompt tokens.  responses: response tokens.
    """

    prompts: tuple[int, ...]
    pages: tuple[tuple[int, int, int], ...]
    lengths: tuple[int, ...]
    responses: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("prompts", "pages", "lengths", "responses"):
            if not getattr(self, name):
                raise SessionError(f"shapes.{name} is empty: no batch has a size")

    def table(self) -> BucketTable:
        """The bucket table of these sizes."""
        return bucket_table(
            prompts=self.prompts, pages=self.pages, lengths=self.lengths, responses=self.responses
        )


@dataclass(frozen=True)
class Answering:
    """How questions are answered.

    name: the method (`methods.registry`).  template: a named template or a file in place of the method's
    own, so a published prompt can go with published weights; "" for its own.  max_pages: pages shown a
    question, 0 for all.  system: replaces the chat layout's system line where not "".  seed: of sampling
    above temperature 0.
    """

    name: str = "evidence_cot"
    template: str = ""
    max_pages: int = 0
    images_first: bool = False
    system: str = ""
    exif_transpose: bool = True
    seed: int = 0
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(
            temperature=0.0, repetition_penalty=1.05, max_tokens=2048
        )
    )

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise SessionError(f"method.name={self.name!r}; one of {', '.join(METHODS)}")


def open_model(model: Model, mesh: Any = None) -> Pretrained:
    """The model folder in the compute dtype."""
    if not model.path:
        raise SessionError("model.path: a model folder is needed (--model FOLDER)")
    dtype = default_precision().compute if model.dtype == "auto" else model.dtype
    with setting("model.budget"):
        budget = resolve_budget(model.budget) if model.budget else None
    with setting("model.path"):
        return load_pretrained(model.path, dtype=dtype, budget=budget, mesh=mesh)


def make_engine(pretrained: Pretrained, buckets: BucketTable, mesh: Any = None) -> Engine:
    """An engine over an opened model."""
    return Engine(
        pretrained.params,
        pretrained.config,
        pretrained.tokenizer,
        buckets,
        stop_ids=pretrained.stop_ids,
        layout=pretrained.layout,
        mesh=mesh,
    )


def make_method(answering: Answering, pretrained: Pretrained, **changes: Any) -> Method:
    """The configured method; `changes` are further settings of `OneCall`."""
    settings = {
        "template": answering.template,
        "budget": pretrained.budget,
        "sampling": answering.sampling,
        "max_pages": answering.max_pages or None,
        "images_first": answering.images_first,
        "system": answering.system or None,
        "exif_transpose": answering.exif_transpose,
        "seed": answering.seed,
    }
    with setting("method"):
        return registry.make_method(answering.name, **{**settings, **changes})


def snug_buckets(
    record: Record, answering: Answering, pretrained: Pretrained, *, step: int = 256
) -> BucketTable:
    """One bucket around one record, its prompt length rounded up to a multiple of `step` so that
    similar questions share programs (32 for models as small as the mini model)."""
    layout = pretrained.layout
    grids = []
    for path in record.images[: answering.max_pages or None]:
        image = load_page(path, exif_transpose=answering.exif_transpose)
        plan = plan_resize(image.height, image.width, pretrained.budget, layout, name=path)
        grids.append((plan.rows, plan.cols))
    with setting("method.template"):
        own = answering.template or METHODS[answering.name].template
        text = load_template(own).render(record.question)
    prompt = build_prompt(
        pretrained.tokenizer,
        text,
        grids,
        images_first=answering.images_first,
        system=answering.system or None,
        merge=layout.merge,
        name=record.id,
    )
    step = min(step, 32) if pretrained.config.text.width < 256 else step
    windows = [len(window_layout(*grid, layout).mask) for grid in grids]
    tokens = [rows * cols // layout.merge**2 for rows, cols in grids]
    return bucket_table(
        prompts=(1,),
        pages=((len(grids), max(windows, default=0), max(tokens, default=0)),),
        lengths=(-(-len(prompt.ids) // step) * step,),
        responses=(answering.sampling.max_tokens,),
    )


def read_set(path: str | Path, image_root: str = "") -> tuple[list[Record], list[str]]:
    """Records of a data file or page-corpus folder, and one line for each row that is refused, which
    is also said on the terminal. SessionError when no row is left."""
    refused: list[str] = []
    with setting("data.path"):
        records = read_records(
            path, image_root=image_root or None, on_error=lambda error: refused.append(str(error))
        )
    for line in refused:
        print(f"skipped: {line}", file=sys.stderr)
    if not records:
        raise SessionError(f"{path}: holds no usable question ({len(refused)} rows are refused)")
    return list(records), refused
