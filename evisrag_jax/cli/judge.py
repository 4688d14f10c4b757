"""``evisrag judge RUN``: a rule, a local model or a server judges the answers of an evaluation.

    RUN/predictions.jsonl ─► judge ─► RUN/judge.jsonl, RUN/summary.json (judge/…), a table on the terminal

Verdicts are kept as they come (RUN/judge.sqlite); failures are counted, never scored, and judged again by
the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evisrag_jax.cli.config import ConfigError, parse, to_dataclass
from evisrag_jax.cli.session import Model, Shapes, make_engine, open_model, setting
from evisrag_jax.runtime.remote import ChatClient, ServerConfig

SUMMARY = "judge the answers of an evaluation: rule, local model or server"


@dataclass(frozen=True)
class JudgeConfig:
    """backend: rule, local or server.  rubric: binary or scale, of a model.  f1: of the rule, 0 for
    equality.  sufficiency: the server also rates whether the pages shown suffice, beside the page rule.
    max_tokens: of a reply.  cache: file of verdicts, "" for RUN/judge.sqlite."""

    backend: str = "rule"
    rubric: str = "binary"
    f1: float = 0.0
    sufficiency: bool = False
    max_tokens: int = 512
    cache: str = ""
    model: Model = field(default_factory=Model)
    shapes: Shapes | None = None
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        if self.backend not in ("rule", "local", "server"):
            raise ConfigError(f"backend={self.backend!r}; rule, local or server")
        if self.sufficiency and self.backend != "server":
            raise ConfigError(
                "sufficiency=True needs backend='server', a model that sees the pages"
            )
        if self.backend != "rule" and self.f1:
            raise ConfigError(f"f1={self.f1} is of backend='rule'")


def run(argv: Sequence[str]) -> int:
    """Judges RUN and prints its table; 1 when some verdict is missing."""
    parsed = parse(
        argv, command="judge", summary=SUMMARY, usage="RUN", default_config="judge.py:rule"
    )
    if len(parsed.args) != 1:
        raise ConfigError("judge takes one argument, the folder of an evaluation")
    summary = judge_run(to_dataclass(parsed.config, JudgeConfig), Path(parsed.args[0]))
    from evisrag_jax.evaluation.judging import format_table

    print(format_table(summary["judge/table"]))
    for name, value in summary.items():
        if name != "judge/table":
            shown = f"{value:.4f}" if isinstance(value, float) else value
            print(f"{name:28} {'n/a' if value is None else shown}")
    if summary["judge/n_failed"]:
        print(f"{summary['judge/n_failed']} without a verdict; the same command judges them again")
    return 1 if summary["judge/n_failed"] else 0


def judge_run(config: JudgeConfig, folder: Path) -> dict[str, Any]:
    """Verdicts of every prediction of a run folder; returns and writes the judge's part of its summary."""
    from rich.progress import Progress

    from evisrag_jax.evaluation.judging import judge_items, judge_summary
    from evisrag_jax.rewards.judge import judge_all
    from evisrag_jax.runtime.json_files import read_json, write_json, write_jsonl
    from evisrag_jax.runtime.request_cache import RequestCache

    with setting("RUN"):
        items = judge_items(folder)
    with setting("judge"):
        judge = make_judge(config)
    with (
        RequestCache(config.cache or folder / "judge.sqlite") as cache,
        Progress(transient=True) as bar,
    ):
        task = bar.add_task("judging", total=len(items))
        verdicts = judge_all(judge, items, cache, lambda verdict: bar.advance(task))
    summary = {"judge/name": judge.name, **judge_summary(items, verdicts)}
    if config.sufficiency:
        summary |= _sufficiency(config, folder)
    rows = [asdict(one) | {"judge": judge.name} for one in verdicts]
    write_jsonl(folder / "judge.jsonl", rows)
    path = folder / "summary.json"
    write_json(path, (read_json(path) if path.is_file() else {}) | summary)
    return summary


def make_judge(config: JudgeConfig) -> Any:
    """The configured judge."""
    from evisrag_jax.rewards.judge import ChatJudge, RuleJudge, ServerChat
    from evisrag_jax.rewards.local_chat import LocalChat

    if config.backend == "rule":
        return RuleJudge(config.f1)
    if config.backend == "server":
        client = ChatClient(config.server)
        return ChatJudge(ServerChat(client, config.max_tokens), config.rubric)
    if config.shapes is None:
        raise ConfigError("shapes are needed for backend='local'")
    pretrained = open_model(config.model)
    engine = make_engine(pretrained, config.shapes.table())
    return ChatJudge(LocalChat(engine, config.model.path, config.max_tokens), config.rubric)


def _sufficiency(config: JudgeConfig, folder: Path) -> dict[str, Any]:
    """The rater beside the page rule (the set's is_sufficient), and how far they agree."""
    from evisrag_jax.rewards.judge import ServerChat
    from evisrag_jax.rewards.sufficiency import agreement, rate_sufficiency
    from evisrag_jax.runtime.json_files import read_jsonl
    from evisrag_jax.runtime.request_cache import RequestCache

    rows = list(read_jsonl(folder / "predictions.jsonl"))
    with RequestCache(folder / "sufficiency.sqlite") as cache:
        chat = ServerChat(ChatClient(config.server, cache), config.max_tokens)
        rated = rate_sufficiency(
            chat, [row["question"] for row in rows], [row["images"] for row in rows]
        )
    same = agreement([one for one, _ in rated], [bool(row["is_sufficient"]) for row in rows])
    return {
        "judge/rated_sufficient": sum(one is True for one, _ in rated),
        "judge/rating_failed": sum(one is None for one, _ in rated),
        **{f"judge/page_rule_{name}": value for name, value in same.items()},
    }
