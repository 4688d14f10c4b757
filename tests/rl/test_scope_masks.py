"""Scopes: released masks by token ids, right masks by characters, and which tags were found."""

from itertools import accumulate

import numpy as np
import pytest

from evisrag_jax.rl.scopes import encode_tags, found_rates, scope_masks


def cut(text):
    """Token texts from one string with bars between them."""
    return text.split("|")


# R of B38 in Qwen2.5's own tokens: 35, without an end token.
PIECES = cut(
    "<|observe|>|o|</|observe|>\n|<|e|vidence|>\n|[|1|]:| |5|\n|</|e|vidence|>\n|<th|ink|>The| x"
    "|</|think|>\n|<|answer|>|5|</|answer|>"
)
IDS = [
    *(27, 48033, 29, 78, 522, 48033, 397, 27, 68, 27480, 397, 58, 16, 5669, 220, 20, 198, 522),
    *(68, 27480, 397, 13708, 766, 16357, 856, 522, 26865, 397, 27, 9217, 29, 20, 522, 9217, 29),
]
ALONE = {
    "<observe>": [27, 48033, 29],
    "<evidence>": [27, 68, 27480, 29],
    "<think>": [13708, 766, 29],
    "<answer>": [27, 9217, 29],
}


def offsets_of(pieces):
    """Character spans of token texts; a special token has an empty one."""
    ends = list(accumulate(len(piece) for piece in pieces))
    return np.asarray([[end - len(piece), end] for piece, end in zip(pieces, ends, strict=True)])


def spans(masks):
    """Masks as inclusive (first, last); each must be one run."""
    out = []
    for mask in masks:
        index = np.flatnonzero(mask)
        assert len(index) == 0 or len(index) == index[-1] - index[0] + 1
        out.append((int(index[0]), int(index[-1])) if len(index) else None)
    return out


def by_chars(pieces, length=None, **options):
    length = len(pieces) if length is None else length
    return scope_masks("".join(pieces), offsets_of(pieces), [0] * len(pieces), length, **options)


def test_golden_token_id_scopes(golden, bits):
    """Every released case, silent fallbacks included, padding cut at the response's length."""
    data = golden("scope_masks")
    tags = {tag: data["tag_ids"][tag] for tag in ALONE}
    assert tags == ALONE
    for case in data["cases"]:
        ids, length = case["response_ids"], case["response_length"]
        assert case["response_mask"] == "1" * length + "0" * (len(ids) - length)
        got, _ = scope_masks(
            case["decoded"],
            np.zeros((length, 2), np.int64),
            ids,
            length,
            mode="code",
            match="token_ids",
            tag_ids=tags,
        )
        np.testing.assert_array_equal(got, bits(case["reward_masks"]), err_msg=case["name"])


def test_golden_texts_by_characters(golden):
    """The same responses by characters, against a search over the pieces' own start positions:
    a tag's first token is the last one that begins at or before its "<"."""
    for case in golden("scope_masks")["cases"]:
        pieces = ["" if piece == "<special>" else piece for piece in case["pieces"]]
        text, length, total = case["decoded"], case["response_length"], len(pieces)
        starts = np.cumsum([0, *map(len, pieces)])[:-1]
        got, found = scope_masks(
            text, offsets_of(pieces)[:length], case["response_ids"], length, mode="code"
        )

        def token_of(tag, default, starts=starts, pieces=pieces, text=text):
            place = text.find(tag)
            full = [t for t in range(len(pieces)) if pieces[t] and starts[t] <= place]
            return default if place < 0 else full[-1]

        think = token_of("<think>", 0), token_of("<think>", total)
        edges = [
            (think[0], total),
            (0, think[1]),
            (0, total),
            (0, total),
            (0, token_of("<evidence>", total)),
            (think[0], token_of("<answer>", total)),
        ]
        want = [[start <= t < min(end, length) for t in range(total)] for start, end in edges]
        np.testing.assert_array_equal(got, want, err_msg=case["name"])
        assert found == {tag[1:-1]: tag in text for tag in ALONE}


def test_b38_scopes_by_characters_and_by_token_ids():
    """B38: think-to-end 21..34, start-to-think 0..20, think-to-answer 21..27, start-to-evidence
    0..6 by characters; the search by ids finds <observe> and <answer> only."""
    got, found = by_chars(PIECES, mode="code")
    assert spans(got) == [(21, 34), (0, 20), (0, 34), (0, 34), (0, 6), (21, 27)]
    assert all(found.values())
    args = "".join(PIECES), offsets_of(PIECES), IDS, 35
    got, found = scope_masks(*args, mode="code", match="token_ids", tag_ids=ALONE)
    assert spans(got) == [(0, 34), (0, 34), (0, 34), (0, 34), (0, 34), (0, 27)]
    assert found == {"observe": True, "evidence": False, "think": False, "answer": True}
    rates = found_rates([found, dict.fromkeys(found, True)])
    assert rates["scope/found_think"] == 0.5 and rates["scope/found_answer"] == 1.0
    assert set(found_rates([])) == set(rates)


def test_b38_paper_sections():
    """Perception: observe 0..6 and evidence 7..20 with the newlines their last tokens carry;
    derivation: think 21..27 and answer 28..34; format: all, with the end token."""
    pieces = [*PIECES, ""]
    got, _ = by_chars(pieces, mode="paper")
    assert spans(got) == [(0, 20), (21, 34), (0, 35)]
    by_ids, found = scope_masks(
        "".join(pieces), offsets_of(pieces), [*IDS, 151645], 36, match="token_ids", tag_ids=ALONE
    )
    assert spans(by_ids) == [(0, 27), (28, 35), (0, 35)]  # think is hidden: observe runs up to it
    assert not found["think"]


def test_straddling_token_belongs_to_the_tag_it_opens():
    """The token "><" closes one section and opens the next: code scopes share no token."""
    pieces = cut("<|observe|>|o|</|observe|><|e|vidence|>x|</|e|vidence|><|think|>t|</|think|>")
    got, _ = by_chars(pieces, mode="code")
    assert spans(got)[:2] == [(13, 18), (0, 12)] and spans(got)[4] == (0, 5)
    paper, _ = by_chars(pieces, mode="paper")
    assert spans(paper) == [(0, 13), (13, 18), (0, 18)]  # overlap; advantages give 13 to the later


def test_missing_and_misplaced_tags():
    """Code scopes stay open on the side of a missing tag; paper sections are empty. A tag out of
    order gives an empty span. Tokens outside sections belong to format alone."""
    plain, found = by_chars(["just", " text", ""], mode="code")
    assert spans(plain) == [(0, 2)] * 6 and not any(found.values())
    plain, _ = by_chars(["just", " text", ""], mode="paper")
    assert spans(plain) == [None, None, (0, 2)]
    swapped, _ = by_chars(["<answer>", "a", "</answer>", "<think>", "t", "</think>"], mode="code")
    assert spans(swapped)[5] is None and spans(swapped)[0] == (3, 5)
    cut, _ = by_chars(["hm ", "<think>", "so", " 5"], mode="paper")
    assert spans(cut) == [None, (1, 3), (0, 3)]


def test_length_cuts_every_mask():
    """Nothing after the response's end reaches a mask, whatever the row holds."""
    pieces = ["<think>", "t", "</think>", "", "<answer>", "x"]
    for mode in ("code", "paper"):
        got, _ = scope_masks("<think>t</think>", offsets_of(pieces[:4]), [0] * 6, 4, mode=mode)
        assert got.shape[1] == 6 and not got[:, 4:].any() and got[:, 3].any()
        none, _ = by_chars(pieces, 0, mode=mode)
        assert not none.any()


def test_bad_arguments_are_refused():
    args = "", np.zeros((2, 2), np.int64), [1, 2]
    for options, message in (
        ({"mode": "strict"}, "mode='strict'"),
        ({"match": "regex"}, "match='regex'"),
        ({"match": "token_ids"}, "needs tag_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            scope_masks(*args, 2, **options)
    with pytest.raises(ValueError, match="length=3, but 2 ids"):
        scope_masks(*args, 3)
    assert encode_tags(lambda text: [len(text)])["<evidence>"] == [10]
