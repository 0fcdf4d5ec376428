"""How a body asks for its answer to be written, through every door."""

from __future__ import annotations

from typing import NamedTuple


class AnswerOptions(NamedTuple):
    """ids_as_names: log-probabilities name a token as "token_id:5". shows_reasoning: the message has what it thought.

    num_tops: alternatives at each token of a chat, None where no log-probabilities are asked for.
    """

    ids_as_names: bool = False
    shows_reasoning: bool = True
    num_tops: int | None = None


PLAIN = AnswerOptions()


class ReadingForm(NamedTuple):
    """How vectors and scores are written. dimensions: of vectors, None for all. top_n: of a ranking."""

    dimensions: int | None = None
    as_base64: bool = False
    top_n: int | None = None
    shows_documents: bool = True
