"""Records that no batch can hold: each error names the record, what it needs and the limit.

They are kinds of `PromptTooLong`, which the data stream skips, counts by `kind` and logs.
"""

from __future__ import annotations

from evisrag_jax.prompts.chat import PromptTooLong


class ResponseTooLong(PromptTooLong):
    """A target response over its limit: refused, never cut."""

    kind = "response_too_long"

    def __init__(self, name: str, needed: int, limit: int):
        super().__init__(name, needed, limit)
        self.args = (
            f"record {name or '(unnamed)'}: its response takes {needed} tokens with its end token, "
            f"over the limit of {limit}",
        )


class EmptyResponse(PromptTooLong):
    """A record that gives nothing to train on."""

    kind = "no_response"

    def __init__(self, name: str, needed: int = 0, limit: int = 0):
        super().__init__(name, needed, limit)
        self.args = (f"record {name or '(unnamed)'}: has no response to train on, or an empty one",)


class TooManyPages(PromptTooLong):
    """A record with more pages, or larger ones, than every bucket holds."""

    kind = "too_large"

    def __init__(self, name: str, needed: int, limit: int, what: str = "pages"):
        super().__init__(name, needed, limit)
        self.what = what
        self.args = (f"record {name or '(unnamed)'}: needs {needed} {what}, the limit is {limit}",)

    def __reduce__(self):
        return type(self), (self.name, self.needed, self.limit, self.what)
