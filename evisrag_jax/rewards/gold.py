"""Gold text: what the reward channels compare a response with, made from a record and checked.

<evidence>
[1]: the gold evidence of page 1
[2]: no relevant information
</evidence>
<answer>one right answer</answer>
<answer>another one</answer>
"""

from collections.abc import Mapping, Sequence

from evisrag_jax.prompts.sections import INSUFFICIENT, NO_EVIDENCE, TAGS

TAG_LITERALS = tuple(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/"))


class GoldError(ValueError):
    """A gold answer or gold text that cannot be scored; names the record and the reason."""


def check_gold(gold: object, *, name: str = "") -> str:
    """Return a usable tagged gold text; raise GoldError with the record's name and the reason."""
    where = f"{name}: " if name else ""
    if not isinstance(gold, str):
        kind = "None" if gold is None else f"{type(gold).__name__} {gold!r}"
        raise GoldError(f"{where}the gold text must be a string, got {kind}")
    for tag in ("evidence", "answer"):
        if f"<{tag}>" not in gold:
            raise GoldError(f"{where}the gold text has no <{tag}>: {gold[:80]!r}")
    return gold


def gold_text(record: object) -> str:
    """The tagged gold text of a record (an object or a mapping with the fields below).

    answers        list of strings; each becomes an `<answer>` block, any of which is right
    evidence       list, one entry a page: a string, or None for no relevant information
    is_sufficient  False: the answer is "insufficient to answer", whatever `answers` holds

    A record without evidence lines is refused: the evidence channel has nothing to compare with.
    Raises GoldError, naming the record's `id`, for a bare string (whose characters would be taken
    one by one), a number, None, an empty list or an empty string.
    """
    get = record.get if isinstance(record, Mapping) else lambda key: getattr(record, key, None)
    name = f"record {get('id')!r}"
    sufficient = get("is_sufficient")
    if not isinstance(sufficient, bool):
        raise GoldError(f"{name}: is_sufficient must be true or false, got {sufficient!r}")
    answers = _strings(get("answers"), name, "answers") if sufficient else [INSUFFICIENT]
    pages = _strings(get("evidence"), name, "evidence", optional=True)
    lines = [f"[{i}]: {page or NO_EVIDENCE}" for i, page in enumerate(pages, start=1)]
    blocks = [f"<answer>{answer}</answer>" for answer in answers]
    return "\n".join(["<evidence>", *lines, "</evidence>", *blocks])


def _strings(value: object, name: str, field: str, *, optional: bool = False) -> list[str | None]:
    """A non-empty list of single-line strings without tags (or None where `optional`)."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        kind = "string" if isinstance(value, str) else type(value).__name__
        raise GoldError(
            f"{name}: {field} must be a non-empty list of strings, got {kind} {value!r}"
        )
    out: list[str | None] = []
    for index, entry in enumerate(value):
        if entry is None and optional:
            out.append(None)
            continue
        if not isinstance(entry, str) or not entry.strip():
            wanted = "text or null" if optional else "text"
            raise GoldError(f"{name}: {field}[{index}] must be {wanted}, got {entry!r}")
        if any(literal in entry for literal in TAG_LITERALS):
            raise GoldError(f"{name}: {field}[{index}] holds a section tag: {entry[:80]!r}")
        out.append(" ".join(entry.split()))
    return out
