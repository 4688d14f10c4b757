"""Judges of an evaluation's answers (`evisrag judge RUN`).

    evisrag judge RUN --config=configs/judge.py:rule
    evisrag judge RUN --config=configs/judge.py:server --config.server.base_url=http://localhost:8000/v1 \
        --config.server.model=NAME
    evisrag judge RUN --config=configs/judge.py:local --model Qwen2.5-VL-7B-Instruct

"binary" is a right/wrong rubric that allows further information, "scale" one from 1 to 5 with a pass from 4.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "rule") -> ConfigDict:
    """The config of a backend: rule, local or server."""
    if arg not in ("rule", "local", "server"):
        raise ValueError(f"judge.py:{arg} is unknown; rule, local or server")
    return ConfigDict(
        {
            "backend": arg,
            "rubric": "binary",
            "f1": 0.0,
            "sufficiency": False,
            "max_tokens": 512,
            "cache": "",
            "model": {"path": "", "dtype": "auto", "budget": ""},
            "shapes": {
                "prompts": (8,),
                "pages": ((0, 0, 0),),
                "lengths": (1024, 4096),
                "responses": (512,),
            },
            "server": {
                "base_url": "",
                "model": "",
                "key_env": "OPENAI_API_KEY",
                "timeout": 60.0,
                "attempts": 4,
                "deadline": 300.0,
                "concurrency": 8,
                "price_in": 0.0,
                "price_out": 0.0,
                "max_cost": 0.0,
            },
        }
    )
