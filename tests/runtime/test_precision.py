"""The dtype policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.runtime.precision import (
    Precision,
    PrecisionError,
    cast_floating,
    default_precision,
    parse_dtype,
)


@pytest.mark.parametrize("word", ["float16", "fp16", "half", " F16 ", np.float16, jnp.float16])
def test_b28_float16_is_refused_with_the_reason(word):
    """B28: float16 overflows in Qwen-VL and generation ends in an endless '!'."""
    with pytest.raises(PrecisionError, match=r"model\.dtype: float16 is refused.*65,504.*'!'"):
        parse_dtype(word, field="model.dtype")
    with pytest.raises(PrecisionError, match=r"precision\.compute: float16"):
        Precision(compute="float16")


def test_names_and_dtypes_are_understood():
    assert parse_dtype("bf16") == jnp.bfloat16
    assert parse_dtype(jnp.bfloat16) == jnp.bfloat16
    assert parse_dtype(np.dtype("float32")) == np.float32
    for word in ("float64", "int8", "fast", 3):
        with pytest.raises(PrecisionError, match="use one of float32, bfloat16"):
            parse_dtype(word)
    assert Precision("f32", "bf16") == Precision("float32", "bfloat16")
    assert Precision(compute="bf16").compute_dtype == jnp.bfloat16


def test_default_is_float32_on_the_cpu_only():
    assert default_precision("cpu") == Precision("float32", "float32")
    assert default_precision("gpu") == default_precision("tpu") == Precision("float32", "bfloat16")
    assert default_precision() == default_precision("cpu")


def test_cast_leaves_integers_and_keys_alone():
    tree = {"w": jnp.ones(2), "i": jnp.arange(3), "b": jnp.array(True), "k": jax.random.key(0)}
    cast = cast_floating(tree, "bfloat16")
    assert cast["w"].dtype == jnp.bfloat16
    for name in ("i", "b", "k"):
        assert cast[name] is tree[name]
