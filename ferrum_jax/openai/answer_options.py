"""AnswerOptions: how a body asks for its answer to be written, in both doors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ferrum_jax.openai.parameters import flag


class AnswerOptions(NamedTuple):
    """ids_as_names: log-probabilities name a token as "token_id:5". shows_reasoning: the message has what it thought.

    num_tops: alternatives at each token of a chat, None where no log-probabilities are asked for.
    """

    ids_as_names: bool = False
    shows_reasoning: bool = True
    num_tops: int | None = None


PLAIN = AnswerOptions()


def answer_options(body: Mapping[str, Any], num_tops: int | None) -> AnswerOptions:
    """Raises ValueError for a field that is no flag."""
    return AnswerOptions(
        ids_as_names=flag(body, "return_tokens_as_token_ids") is True,
        shows_reasoning=flag(body, "include_reasoning") is not False,
        num_tops=num_tops,
    )
