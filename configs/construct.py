"""Training sets from raw questions. `construct.py:mini` makes some from generated pages with the bundled
models, offline; `construct.py:paper` has the paper's settings, a 72B teacher behind an OpenAI-compatible server
and difficulty by an SFT checkpoint; `construct.py:server` is the same without the difficulty filter.

    evisrag construct --config=configs/construct.py:mini --out runs/sets
    evisrag construct --config=configs/construct.py:paper --data corpus --out runs/sets \\
        --config.server.base_url=http://localhost:8000/v1 --config.difficulty_model.path=runs/sft/model
"""

from ml_collections import ConfigDict


def get_config(arg: str = "mini") -> ConfigDict:
    """The config of one argument: mini, server or paper."""
    if arg == "mini":
        return _mini()
    if arg in ("server", "paper"):
        return _paper(difficulty=arg == "paper")
    raise ValueError(f"construct.py:{arg} is unknown; mini, server or paper")


def _config(**fields) -> ConfigDict:
    return ConfigDict(
        {
            "data": {"path": "", "image_root": "", "questions": 150, "seed": 0},
            "teacher": "local",
            "model": {"path": "mini", "dtype": "auto", "budget": ""},
            "shapes": {
                "prompts": (32,),
                "pages": ((3, 6, 20),),
                "lengths": (96,),
                "responses": (64,),
            },
            "prompt": {
                "template": "mini",
                "system": "",
                "images_first": False,
                "exif_transpose": True,
                "seed": 0,
                "sampling": {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": 0,
                    "repetition_penalty": 1.0,
                    "max_tokens": 64,
                },
            },
            "server": {
                "base_url": "",
                "model": "",
                "key_env": "OPENAI_API_KEY",
                "timeout": 300.0,
                "attempts": 6,
                "deadline": 1800.0,
                "concurrency": 16,
                "price_in": 0.0,
                "price_out": 0.0,
                "max_cost": 0.0,
            },
            "difficulty_model": {"path": "mini-sft", "dtype": "auto", "budget": ""},
            "sets": {
                "limit": 0,
                "chunk": 64,
                "contexts": {"ks": (1, 2, 3), "insufficient": -1},
                "filters": {"samples": 2, "keep": 1},
                "split": {"share": 0.8, "link": "gold", "tolerance": 0.05, "seed": 0},
                "difficulty": {
                    "samples": 4,
                    "drop_solved": True,
                    "drop_unsolved": False,
                    "share": 0.75,
                    "gamma": 2.0,
                    "order": "easy_to_hard",
                    "seed": 0,
                },
                "inspection": {"sufficient": 75, "insufficient": 25, "seed": 0},
            },
            **fields,
        }
    )


def _mini() -> ConfigDict:
    """The whole way on two CPU cores: 150 generated questions, contexts of one to three pages."""
    return _config()


def _paper(*, difficulty: bool) -> ConfigDict:
    """Qwen2.5-VL-72B behind a server, eight responses a context of one to five pages (EVisRAG appendix A.2)."""
    config = _config(teacher="server")
    config.model.path = ""
    config.server.model = "Qwen2.5-VL-72B-Instruct"
    config.prompt.template = "evidence_cot"
    config.prompt.sampling.max_tokens = 2048
    config.difficulty_model.path = ""
    config.difficulty_model.budget = "grpo"
    # Shapes of the difficulty filter's rollouts: at most 1,568,000 pixels are 2,000 tokens a page.
    config.shapes = ConfigDict(
        {
            "prompts": (8,),
            "pages": tuple((pages, 200, 2048) for pages in (1, 2, 3, 4, 5)),
            "lengths": (3072, 5120, 7168, 9216, 11264),
            "responses": (2048,),
        }
    )
    config.sets.chunk = 64
    config.sets.contexts.ks = (1, 2, 3, 4, 5)
    config.sets.filters.samples = 8
    config.sets.difficulty.samples = 8 if difficulty else 0
    return config
