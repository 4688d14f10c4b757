"""The start-up check: agreement, a wrong kernel, one that fails, and what they leave behind."""

import logging

import jax
import jax.numpy as jnp
import pytest

from evisrag_jax.models import attention, attention_check


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No earlier result, and the default put back afterwards."""
    monkeypatch.setattr(attention, "_default", None)
    attention_check.check_attention.cache_clear()
    yield
    attention_check.check_attention.cache_clear()


@pytest.fixture
def fused(monkeypatch):
    """A GPU whose fused kernel is what the test puts in; XLA's attention in the beginning."""
    plain = jax.nn.dot_product_attention
    kernel = {"run": lambda q, k, v, **masks: plain(q, k, v, implementation="xla", **masks)}

    def call(q, k, v, *, implementation, **masks):
        assert implementation == "cudnn"
        return kernel["run"](q, k, v, **masks)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    return kernel


def fallbacks(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_cpu_agrees_and_pays_nothing_at_start_up(monkeypatch, caplog):
    monkeypatch.setattr(attention_check, "_errors", lambda *_: pytest.fail("compared"))
    assert attention_check.start_up_check() is None
    monkeypatch.undo()
    result = attention_check.check_attention()
    assert result.ok and result.used == "blocked" and result.error <= 1e-5
    assert "agrees with xla" in result.line() and not fallbacks(caplog)
    assert attention.default_implementation() == "blocked"


def test_a_right_kernel_is_kept_and_checked_once(fused, monkeypatch, caplog):
    result = attention_check.start_up_check()
    assert result.ok and result.used == "cudnn" and 0 < result.error <= 0.02
    monkeypatch.setattr(attention_check, "_errors", lambda *_: pytest.fail("compared again"))
    assert attention_check.start_up_check() is result
    assert attention.default_implementation() == "cudnn" and not fallbacks(caplog)


def wrong_output(run):
    return lambda q, k, v, **masks: 1.2 * run(q, k, v, **masks)


def wrong_gradient(run):
    """A kernel that drops part of its backward pass."""

    def kernel(q, k, v, **masks):
        return run(q, jax.lax.stop_gradient(k), v, **masks)

    return kernel


def not_a_number(run):
    return lambda q, k, v, **masks: run(q, k, v, **masks) * jnp.nan


def without_lengths(run):
    return lambda q, k, v, is_causal=False, **_: run(q, k, v, is_causal=is_causal)


def failing(_):
    def kernel(*_, **__):
        raise RuntimeError("cuDNN is not detected.\nmore of it")

    return kernel


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (wrong_output, " is off by 2.0e-01"),
        (wrong_gradient, ": k is off by 1.0e+00"),
        (not_a_number, "is off by inf"),
        (without_lengths, "image: "),
        (failing, "RuntimeError: cuDNN is not detected."),
    ],
)
def test_a_wrong_kernel_falls_back_with_one_line(fused, caplog, broken, reason):
    fused["run"] = broken(fused["run"])
    result = attention_check.start_up_check()
    assert not result.ok and (result.fast, result.used) == ("cudnn", "xla")
    (line,) = fallbacks(caplog)
    assert reason in line and line.endswith("; falling back to xla") and "\n" not in line
    assert attention.default_implementation() == "xla"
    assert attention_check.start_up_check() is None  # xla needs no check


def test_nothing_to_compare_where_xla_is_the_default(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    result = attention_check.check_attention()
    assert result.ok and result.error is None and result.line() == "xla attention on tpu"
