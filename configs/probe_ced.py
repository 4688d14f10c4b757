"""The CED probe. `probe_ced.py:mini` asks generated mini-world questions of a bundled model and scores the
evidence lines it writes; `probe_ced.py:natural` takes single pictures with boxes and scores answers.

    evisrag probe ced --config=configs/probe_ced.py:mini --out runs/ced
    evisrag probe ced --config=configs/probe_ced.py:natural --model CHECKPOINT --data boxed.jsonl --out runs/ced
"""

import dataclasses

from ml_collections import ConfigDict

from evisrag_jax.rewards.ced.config import CedConfig


def get_config(arg: str = "mini") -> ConfigDict:
    """The config of one argument: mini or natural."""
    if arg not in ("mini", "natural"):
        raise ValueError(f"probe_ced.py:{arg} is unknown; mini or natural")
    mini = arg == "mini"
    ced = dataclasses.asdict(CedConfig())
    return ConfigDict(
        {
            "model": {"path": "mini" if mini else "", "dtype": "auto", "budget": ""},
            "data": {
                "path": "",
                "image_root": "",
                "limit": 0,
                "split": "test",
                "questions": 200,
                "seed": 0,
            },
            "method": {
                "name": "evidence_cot",
                "template": "mini" if mini else "",
                "max_pages": 0,
                "images_first": False,
                "system": "",
                "exif_transpose": True,
                "seed": 0,
                "sampling": {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": 0,
                    "repetition_penalty": 1.0,
                    "max_tokens": 64 if mini else 512,
                },
            },
            # One shape: 140 x 112 px pages, or one picture of up to 1,280 merged tokens.
            "prompts": 16 if mini else 1,
            "pages": 3 if mini else 1,
            "windows": 6 if mini else 128,
            "tokens": 20 if mini else 1280,
            "prompt_length": 96 if mini else 2048,
            "group": 6,
            "scope": "records" if mini else "answer",
            "blindfold": True,
            "perturb": True,
            "pictures": 3,
            "ced": ced,
        }
    )
