"""The dtype policy: in which number format parameters are kept and products are computed.

float32 and bfloat16 only. float16 is refused: Qwen2.5-VL's activations exceed its largest value
(65,504), logits become inf or NaN, and argmax over NaN is id 0, which decodes to an endless "!".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
_ALIASES = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16"}
_ALIASES |= {"fp16": "float16", "half": "float16"}


class PrecisionError(ValueError):
    """A dtype that this project does not compute in."""


def parse_dtype(name: Any, *, field: str = "dtype") -> np.dtype:
    """Turn "float32", "bfloat16", a short form or a dtype into a numpy dtype.

    Args:
        name: the user's word, or a dtype.
        field: what it is for; named in the error.
    Raises:
        PrecisionError: float16, with the reason; any other format, with the choices.
    """
    if isinstance(name, str):
        word = _ALIASES.get(name.strip().lower(), name.strip().lower())
    else:
        try:
            word = np.dtype(name).name
        except TypeError:
            word = str(name)
    if word == "float16":
        raise PrecisionError(
            f"{field}: float16 is refused: Qwen2.5-VL's activations overflow it (largest value "
            "65,504) and generation ends in an endless '!'; use bfloat16 or float32"
        )
    if word not in _DTYPES:
        raise PrecisionError(f"{field}: unknown dtype {name!r}; use one of {', '.join(_DTYPES)}")
    return np.dtype(_DTYPES[word])


@dataclasses.dataclass(frozen=True)
class Precision:
    """Number formats of a run.

    param: format in which parameters are kept and updated.
    compute: format of activations and of the operands of products. Rotary angles, norms, softmax
        and losses are float32 whatever this says.
    """

    param: str = "float32"
    compute: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "param", parse_dtype(self.param, field="precision.param").name)
        object.__setattr__(
            self, "compute", parse_dtype(self.compute, field="precision.compute").name
        )

    @property
    def param_dtype(self) -> np.dtype:
        return parse_dtype(self.param)

    @property
    def compute_dtype(self) -> np.dtype:
        return parse_dtype(self.compute)


def default_precision(backend: str | None = None) -> Precision:
    """float32 throughout on the CPU, where bfloat16 products are slower; else bfloat16 products.

    Args:
        backend: "cpu", "gpu" or "tpu"; the one jax runs on when None.
    """
    backend = backend or jax.default_backend()
    return Precision("float32", "float32" if backend == "cpu" else "bfloat16")


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Cast the floating leaves of a tree; integer, bool and key leaves stay as they are."""
    target = parse_dtype(dtype)

    def cast(leaf: Any) -> Any:
        return leaf.astype(target) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
