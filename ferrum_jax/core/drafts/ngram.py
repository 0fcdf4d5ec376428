"""NgramDrafts: a request goes on as it did when its last few tokens stood in it before.

The last n tokens are looked for earlier in the request's own text, prompt and generated tokens alike, with n from
prompt_lookup_max down to prompt_lookup_min; the first n that is found decides. What followed the most recent earlier
occurrence is the draft. Where the text ends before the draft is long enough, the draft goes round: the tokens from that
occurrence to the end of the text are repeated. Confidences are 1: nothing is known about how good a match is. Texts
are not shared. A request takes 8 to 20 bytes per token for each n, and 5 KB, until it is forgotten.
Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ferrum_jax.core.drafts.drafts import NO_DRAFT, Draft
from ferrum_jax.core.drafts.own_grams import OwnGrams
from ferrum_jax.core.request import Request


class NgramDrafts:
    """Drafts from the longest earlier occurrence of a request's last tokens in its own text."""

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        """The least and the most last tokens that are looked for."""
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {prompt_lookup_min} and prompt_lookup_max {prompt_lookup_max}; "
                "the least is 1 or more, and not above the most"
            )
        self._lengths = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._texts: dict[int, OwnGrams] = {}  # by request id

    def propose(self, request: Request, most: int) -> Draft:
        """The `most` tokens that followed the last tokens' latest earlier occurrence, or no draft without one."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = OwnGrams(self._lengths, request.token_ids)
        text.take_in()
        newest = text.newest()
        for level in reversed(range(len(newest))):
            found = text.earlier(level, newest[level], 1)
            if found:
                token_ids = going_round(request.token_ids, found[0], max(most, 0)).tolist()
                return Draft(token_ids=token_ids, confidences=[1.0] * len(token_ids))
        return NO_DRAFT

    def forget(self, request: Request) -> None:
        """Drops what is kept of a request."""
        self._texts.pop(request.id, None)

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, salt: bytes) -> None:
        """Does nothing: a request's draft comes from its own text."""

    @property
    def bytes(self) -> int:
        return sum(text.bytes for text in self._texts.values())


def going_round(tokens: array[int], start: int, most: int) -> array[int]:
    """`most` tokens from a start on; behind the last one those from the start follow again."""
    run = tokens[start : start + most]
    return run if len(run) == most else (run * -(-most // len(run)))[:most]
