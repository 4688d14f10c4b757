"""Instruction templates: the text of the user turn around the question.

A template is a UTF-8 text file in which ``{question}`` stands for the question; every other brace
is literal. Named templates ship with the package: ``evidence_cot`` asks for the four tagged
sections (EVisRAG section 9), ``mini`` is the bare question that the mini model is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

PLACEHOLDER = "{question}"
NAMES = ("evidence_cot", "mini")


@dataclass(frozen=True)
class Template:
    """A named instruction text with at least one ``{question}``; ValueError if it has none."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.text:
            raise ValueError(f"template {self.name!r} has no {PLACEHOLDER}")

    def render(self, question: str) -> str:
        """The user's text: every ``{question}`` replaced, the question itself left untouched."""
        return self.text.replace(PLACEHOLDER, question)


def load_template(name_or_path: str | Path) -> Template:
    """A named template, or one read from a file (named by its path).

    Line ends are kept as they are in the file. Raises FileNotFoundError that lists the names if it
    is neither, and ValueError for text that is not UTF-8 or lacks ``{question}``.
    """
    if str(name_or_path) in NAMES:
        source = resources.files("evisrag_jax.prompts") / "templates" / f"{name_or_path}.txt"
    else:
        source = Path(name_or_path)
        if not source.is_file():
            known = ", ".join(NAMES)
            raise FileNotFoundError(f"template {str(source)!r}: no such file, nor one of {known}")
    try:
        text = source.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"template {str(source)!r}: not UTF-8 ({error})") from error
    return Template(str(name_or_path), text)
