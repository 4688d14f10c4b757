"""Instruction templates: the text of the user turn around the question.

A template is a UTF-8 text file in which ``{question}`` stands for the question, and in the later calls of
a method with several ``{notes}`` for what earlier ones wrote; every other brace is literal. Named
templates ship with the package: ``evidence_cot`` asks for the four tagged sections (EVisRAG section 9),
``mini`` is the bare question that the mini model is trained on, ``boxes`` and ``boxes_think`` ask for the
places on the pages that answer it, and the others are those of ``evisrag_jax.methods``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

PLACEHOLDER = "{question}"
NOTES = "{notes}"
NAMES = (
    *("evidence_cot", "evidence_cot_one_shot", "generic_cot", "direct", "mini"),
    *("cocot", "ccot", "ddcot", "ccot_graph", "ccot_answer"),
    *("boxes", "boxes_think"),
    *("ddcot_split", "ddcot_look", "ddcot_join"),
)


@dataclass(frozen=True)
class Template:
    """A named instruction text with ``{question}`` or ``{notes}``; ValueError if it has neither."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if PLACEHOLDER not in self.text and NOTES not in self.text:
            raise ValueError(f"template {self.name!r} has no {PLACEHOLDER}")

    def render(self, question: str, notes: str = "") -> str:
        """The user's text: question and notes put in, in one pass; braces inside them stay."""
        values = {PLACEHOLDER: question, NOTES: notes}
        return re.sub(r"\{question\}|\{notes\}", lambda found: values[found[0]], self.text)


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
