"""Which tokens of a response each reward channel pays: scopes as masks over the sampled ids.

code (six channels)      span                        paper (three channels)   span
accuracy                 first <think>  .. end       perception               observe and evidence
evidence                 start .. first <think>      derivation               think and answer
format, overlong         start .. end                format                   the whole response
isObserve                start .. first <evidence>
isThink                  first <think>  .. <answer>

"end" is the response's last token, the end token included. Two ways to find a tag:

  char_offsets  in the decoded text, mapped to tokens by their offsets (default). A span begins with
                the token that holds its tag's "<" and ends before the one that holds the next
                tag's, so a token such as "><" belongs to the tag that it opens.
  token_ids     as released: the ids of the tag encoded alone, searched in the row. Merged tokens
                hide most tags from it (`prompts.spans`).

In the code table a tag that is not found leaves the span open on that side, silently as released
(start .. / .. end); in the paper table a section that is not found has no tokens. Which tags were
found is returned, to be logged as a rate.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Integer

from evisrag_jax.prompts.sections import TAGS, parse_sections
from evisrag_jax.prompts.spans import char_span_to_tokens, find_ids, token_range
from evisrag_jax.rewards.evisrag import CODE_CHANNELS, PAPER_CHANNELS

MODES = ("code", "paper")
MATCHES = ("char_offsets", "token_ids")

# channel -> (tag it starts at, tag it ends before); None = the response's own edge
_CODE_SPANS: dict[str, tuple[str | None, str | None]] = {
    "accuracy": ("think", None),
    "evidence": (None, "think"),
    "format": (None, None),
    "overlong": (None, None),
    "isObserve": (None, "evidence"),
    "isThink": ("think", "answer"),
}
_PAPER_SECTIONS = {"perception": ("observe", "evidence"), "derivation": ("think", "answer")}


def scope_masks(
    text: str,
    offsets: Integer[np.ndarray, "N 2"],
    ids: Sequence[int] | Integer[np.ndarray, " T"],
    length: int,
    *,
    mode: str = "paper",
    match: str = "char_offsets",
    tag_ids: Mapping[str, Sequence[int]] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[Bool[np.ndarray, "C T"], dict[str, bool]]:
    """Tokens of each channel in one response.

    Args:
      text: the decoded response without special tokens.
      offsets: characters (start, end) of each token in `text`; at least `length` rows.
      ids: the response row; it may be padded, T is its length.
      length: response tokens, the end token included; no mask reaches beyond it.
      mode: "code" (rows in the order of CODE_CHANNELS) or "paper" (PAPER_CHANNELS).
      match: "char_offsets" or "token_ids".
      tag_ids: for token_ids, the ids of "<observe>", "<evidence>", "<think>", "<answer>", each
        encoded alone (`encode_tags`).
      names: channels of the rows in mode "paper"; one that is neither perception nor derivation has the
        whole response. None for the mode's own.

    Returns the masks and, by tag, whether it was found.
    """
    if mode not in MODES or match not in MATCHES:
        raise ValueError(f"mode={mode!r}, match={match!r}; one of {MODES} and one of {MATCHES}")
    if not 0 <= length <= len(ids) or len(offsets) < length:
        raise ValueError(f"length={length}, but {len(ids)} ids and {len(offsets)} offsets")
    names = channels(mode) if names is None else names
    total, response = len(ids), np.arange(len(ids)) < length
    if match == "token_ids":
        if tag_ids is None:
            raise ValueError("match=token_ids needs tag_ids: the ids of each tag encoded alone")
        places = {tag: find_ids(ids, tag_ids[f"<{tag}>"]) for tag in TAGS}
        found = {tag: place >= 0 for tag, place in places.items()}
        places = {tag: place for tag, place in places.items() if place >= 0}
        rows = (
            _code_by_ids(places, total) if mode == "code" else _paper_by_ids(places, total, names)
        )
    else:
        sections = parse_sections(text)
        found = {tag: tag in sections for tag in TAGS}
        rows = np.zeros((len(names), total), bool)
        for row, channel in zip(rows, names, strict=True):
            if mode == "code":
                edges = (sections[t].start if t in sections else None for t in _CODE_SPANS[channel])
                row[:length] = token_range(offsets[:length], *edges)
            elif channel not in _PAPER_SECTIONS:
                row[:length] = True
            else:
                for tag in _PAPER_SECTIONS[channel]:
                    if tag in sections:
                        span = sections[tag].start, sections[tag].end
                        row[:length] |= char_span_to_tokens(offsets[:length], *span)
    return rows & response, found


def channels(mode: str) -> tuple[str, ...]:
    """Channel names of a table, in the order of its mask rows."""
    return CODE_CHANNELS if mode == "code" else PAPER_CHANNELS


def encode_tags(encode: Callable[[str], Sequence[int]]) -> dict[str, list[int]]:
    """`tag_ids` for match "token_ids", from a tokenizer's plain encoding."""
    return {f"<{tag}>": list(encode(f"<{tag}>")) for tag in TAGS}


def found_rates(found: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """Share of responses in which each tag was found, as metrics "scope/found_<tag>"."""
    count = max(len(found), 1)
    return {f"scope/found_{tag}": sum(one[tag] for one in found) / count for tag in TAGS}


def _code_by_ids(places: Mapping[str, int], total: int) -> Bool[np.ndarray, "C T"]:
    index = np.arange(total)
    return np.stack(
        [
            (index >= places.get(start or "", 0)) & (index < places.get(end or "", total))
            for start, end in _CODE_SPANS.values()
        ]
    )


def _paper_by_ids(
    places: Mapping[str, int], total: int, names: Sequence[str]
) -> Bool[np.ndarray, "C T"]:
    """A section runs from its tag to the next found tag, the last one to the end of the row."""
    index, rows = np.arange(total), np.zeros((len(names), total), bool)
    edges = sorted(places.values())
    for row, name in zip(rows, names, strict=True):
        if name not in _PAPER_SECTIONS:
            row[:] = True
            continue
        for start in (places[tag] for tag in _PAPER_SECTIONS[name] if tag in places):
            end = min((edge for edge in edges if edge > start), default=total)
            row |= (index >= start) & (index < end)
    return rows
