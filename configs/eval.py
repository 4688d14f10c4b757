"""Evaluation. `eval.py:mini` answers generated mini-world questions with a bundled model anywhere;
`eval.py:3b` and `eval.py:7b` hold the released inference settings for published checkpoints, and
`eval.py:corpus` the shapes of a page corpus (questions.jsonl, corpus.jsonl, five candidate pages a
question of at most 1,950 tokens) with short greedy responses.

    evisrag eval --config=configs/eval.py:mini --model mini --out runs/eval
    evisrag eval --config=configs/eval.py:3b --model Qwen2.5-VL-3B-Instruct --data test.jsonl --out runs/eval
"""

from ml_collections import ConfigDict


def get_config(arg: str = "mini") -> ConfigDict:
    """The config of one argument: mini, or the size of a published checkpoint."""
    if arg == "mini":
        return _mini()
    if arg in ("3b", "7b", "32b", "72b"):
        return _released()
    if arg == "corpus":
        return _corpus()
    raise ValueError(f"eval.py:{arg} is unknown; mini, corpus, 3b, 7b, 32b or 72b")


def _mini() -> ConfigDict:
    return ConfigDict(
        {
            "model": {"path": "mini", "dtype": "auto", "budget": ""},
            "data": {
                "path": "",
                "image_root": "",
                "limit": 0,
                "split": "test",
                "questions": 200,
                "seed": 0,
            },
            # pages: (pages a prompt, windows a page, merged tokens a page); one page is 140 x 112 px.
            "shapes": {
                "prompts": (50,),
                "pages": ((3, 6, 20),),
                "lengths": (96,),
                "responses": (64,),
            },
            "method": {
                "name": "evidence_cot",
                "template": "mini",
                "max_pages": 0,
                "images_first": False,
                "system": "",
                "exif_transpose": True,
                "seed": 0,
                "sampling": {
                    "temperature": 0.0,
                    "top_p": 1.0,
                    "top_k": 0,
                    "repetition_penalty": 1.0,
                    "max_tokens": 64,
                },
            },
            "mode": "strict",
            "report": True,
        }
    )


def _released() -> ConfigDict:
    config = _mini()
    config.model.path = ""
    # The processor's own budget gives a page up to 16,384 merged tokens (12.8 Mpx). A window holds 16
    # of them; a tenth as many windows leaves room for the partly filled ones at the edges. Only shapes
    # that are met are compiled.
    config.shapes = ConfigDict(
        {
            "prompts": (1,),
            "pages": tuple(
                (pages, tokens // 10, tokens)
                for pages in (1, 3, 5)
                for tokens in (1024, 2048, 5120, 16384)
            ),
            "lengths": (4096, 8192, 16384, 28672, 53248, 90112),
            "responses": (2048,),
        }
    )
    config.method.template = ""
    config.method.sampling.repetition_penalty = 1.05
    config.method.sampling.max_tokens = 2048
    return config


def _corpus() -> ConfigDict:
    config = _released()
    config.shapes.pages = ((5, 72, 1024), (5, 104, 1536), (5, 136, 2048))
    config.shapes.lengths = (4096, 6144, 8192, 10752)
    config.shapes.responses = (32,)
    config.method.sampling.max_tokens = 32
    return config
