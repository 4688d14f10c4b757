"""Settings that every training run has: where the model and the records come from, and the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from evisrag_jax.runtime.precision import parse_dtype


@dataclass(frozen=True)
class ModelSource:
    """Where the run starts: a Hugging Face folder, the format parameters are kept in, and the one
    products are computed in ("auto": float32 on a CPU, bfloat16 elsewhere)."""

    path: str = ""
    param_dtype: str = "float32"
    compute_dtype: str = "auto"

    def __post_init__(self) -> None:
        parse_dtype(self.param_dtype, field="model.param_dtype")
        if self.compute_dtype != "auto":
            parse_dtype(self.compute_dtype, field="model.compute_dtype")


@dataclass(frozen=True)
class PromptSource:
    """Records and how they become prompts.

    path: a data file or page-corpus folder.  validation: held-out records, "" for none.
    image_root: folder that image paths are relative to, "" for the file's own.  template: a named
    template or a file.  system: replaces the chat layout's default system line where not "".
    images_first: pages before the text.  budget: a named pixel budget, "" for the model folder's.
    exif_transpose: turn photos upright.  threads, ahead: preparation ahead of the step, in records
    (at least a batch).  cache_mb: prepared pages kept in memory, in MiB.  feature_cache_mb: features of a
    frozen vision tower kept in memory, in MiB.  feature_cache_dir: a folder that keeps them for other
    runs, "" for none.
    """

    path: str = ""
    validation: str = ""
    image_root: str = ""
    template: str = "evidence_cot"
    system: str = ""
    images_first: bool = False
    budget: str = ""
    exif_transpose: bool = True
    threads: int = 2
    ahead: int = 16
    cache_mb: int = 1024
    feature_cache_mb: int = 4096
    feature_cache_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("threads", "cache_mb", "feature_cache_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.{name}={getattr(self, name)} must not be negative")


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis of the mesh; one of them may be -1 and takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
