"""Drafts: where the tokens come from that the engine verifies several of in one step.

A draft changes how fast a request goes on and never what it says: the engine draws each token itself and keeps those
that it would have drawn. Equal calls in equal order give equal drafts in every process.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from ferrum_jax.core.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Tokens that may follow those of a request."""

    token_ids: Sequence[int]  # the next one first
    confidences: Sequence[float]  # for each, how likely it comes if those before it came; above 0, at most 1


NO_DRAFT = Draft(token_ids=(), confidences=())


class Drafts(Protocol):
    """A source of drafts; it reads the tokens of requests and keeps its own book about them."""

    def propose(self, request: Request, most: int) -> Draft:
        """Up to `most` tokens after those that the request has now."""
        ...

    def forget(self, request: Request) -> None:
        """Takes note that a request has ended; its tokens serve other requests if the source shares texts."""
        ...

    def learn(self, token_ids: Sequence[int], num_prompt_tokens: int, salt: bytes) -> None:
        """Takes in a finished text from elsewhere, such as a job's journal: prompt, then generated tokens."""
        ...

    @property
    def bytes(self) -> int:
        """The host memory that it takes."""
        ...
