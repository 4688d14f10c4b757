"""Golden files of the released functions, and random policy-loss inputs."""

import json
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="session")
def golden():
    """golden(name) -> parsed file; "NaN" strings stay strings."""
    return lambda name: json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def bits():
    """Nested lists of bit strings -> boolean array, tokens last."""

    def parse(value):
        if isinstance(value, str):
            return np.array([char == "1" for char in value])
        return np.stack([parse(one) for one in value])

    return parse


@pytest.fixture
def batch():
    """batch(seed) -> float32 log-probs, advantages and masks of P=3, G=4, C=6, T=9 with padding."""

    def make(seed, P=3, G=4, C=6, T=9, spread=0.6):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(2, T + 1, (P, G))
        response = np.arange(T) < lengths[..., None]
        mask = (rng.random((P, G, C, T)) < 0.7) & response[:, :, None]
        old = -rng.exponential(1.0, (P, G, T))
        logp = old + spread * rng.standard_normal((P, G, T))
        rewards = rng.standard_normal((P, G, C))
        arrays = {"logp": logp, "old": old, "rewards": rewards}
        arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
        return {**arrays, "mask": mask, "response": response, "valid": np.ones((P, G), bool)}

    return make
