"""The CED probe. `probe_ced.py:mini` asks generated mini-world questions of a bundled model and scores the
evidence lines it writes; `probe_ced.py:natural` takes single pictures with boxes and scores answers.
Model, data and method are those of configs/eval.py but for sampling.

    evisrag probe ced --config=configs/probe_ced.py:mini --out runs/ced
    evisrag probe ced --config=configs/probe_ced.py:natural --model CHECKPOINT --data boxed.jsonl --out runs/ced
"""

import dataclasses

from ml_collections import ConfigDict

from evisrag_jax.cli.config import load_config
from evisrag_jax.rewards.ced.config import CedConfig


def get_config(arg: str = "mini") -> ConfigDict:
    """The config of one argument: mini or natural."""
    if arg not in ("mini", "natural"):
        raise ValueError(f"probe_ced.py:{arg} is unknown; mini or natural")
    mini = arg == "mini"
    config = load_config("configs/eval.py:mini")[0].unlock()
    for name in ("shapes", "mode", "report"):
        del config[name]
    config.method.sampling.temperature = 1.0
    if not mini:
        config.model.path = config.method.template = ""
        config.method.sampling.max_tokens = 512
    # One shape: 140 x 112 px pages, or one picture of up to 1,280 merged tokens.
    config.prompts = 16 if mini else 1
    config.pages = 3 if mini else 1
    config.windows = 6 if mini else 128
    config.tokens = 20 if mini else 1280
    config.prompt_length = 96 if mini else 2048
    config.group = 6
    config.scope = "records" if mini else "answer"
    config.blindfold = True
    config.perturb = True
    config.pictures = 3
    config.ced = ConfigDict(dataclasses.asdict(CedConfig()))
    return config
