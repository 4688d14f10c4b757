"""The tiny model, its tokenizer and requests (tests/rollout/tiny.py)."""

from tests.rollout.tiny import *  # noqa: F403
