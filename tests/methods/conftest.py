"""The tiny model and tokenizer of the rollout tests (tests/rollout/tiny.py)."""

from tests.rollout.tiny import *  # noqa: F403
