"""The attention probe: the share of a response's attention to its pages that falls on the evidence, and what
it goes together with. The settings are those of configs/probe_ced.py but for what is perturbed.

    evisrag probe attention --config=configs/probe_attention.py:mini --out runs/attention
    evisrag probe attention --config=configs/probe_attention.py:natural --model CHECKPOINT --data boxed.jsonl --out DIR
"""

import importlib.util
from pathlib import Path

from ml_collections import ConfigDict


def get_config(arg: str = "mini") -> ConfigDict:
    """The config of one argument: mini or natural."""
    path = Path(__file__).with_name("probe_ced.py")
    spec = importlib.util.spec_from_file_location("probe_ced", path)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    config = other.get_config(arg)
    for name in ("blindfold", "perturb", "pictures"):
        del config[name]
    config.row = "own"
    config.layers = ()
    config.sections = ("observe", "evidence", "think", "answer")
    return config
