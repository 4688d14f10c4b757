"""The attention probe: the share of a response's attention to its pages that falls on the evidence, and what
it goes together with. The settings are those of configs/probe_ced.py but for what is perturbed.

    evisrag probe attention --config=configs/probe_attention.py:mini --out runs/attention
    evisrag probe attention --config=configs/probe_attention.py:natural --model CHECKPOINT --data boxed.jsonl --out DIR
"""

from ml_collections import ConfigDict

from evisrag_jax.cli.config import load_config


def get_config(arg: str = "mini") -> ConfigDict:
    """The config of one argument: mini or natural."""
    config = load_config(f"configs/probe_ced.py:{arg}")[0].unlock()
    for name in ("blindfold", "perturb", "pictures"):
        del config[name]
    config.row = "own"
    config.layers = ()
    config.sections = ("observe", "evidence", "think", "answer")
    return config
