"""Scores of pairs: how well a document answers a query, as one number, from one reading of both.

A `Scorer` makes of a pair the token ids that the model reads, and of what the model gives for them the score. A
cross-encoder (`CrossEncoderScorer`) reads both texts through its tokenizer's own form for pairs and gives a logit; a
model that generates (`logit_scorer.py`) reads them in a prompt, and its logits of two tokens are compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.tasks.task import ONE_TOKEN, EngineRequest
from ferrum_jax.text.tokenizer import Tokenizer, require_tokenizer

Pair = Sequence[str] | Mapping[str, Any]  # two texts, a query and a document; or an object that has them


class Scorer(Protocol):
    """How pairs become scores of one model."""

    def request(self, pair: Pair, *, truncate: bool, instruction: str | None = None) -> EngineRequest:
        """A pair as the model will see it. Raises ValueError for one that it cannot.

        instruction: what makes a document fit a query, for models that are told; None is the model's own.
        """
        ...

    def score(self, state: np.ndarray) -> float:
        """The score of what the model gave for the pair."""
        ...


class CrossEncoderScorer:
    """activation: "sigmoid" or "identity"."""

    def __init__(self, tokenizer: Tokenizer | None, *, activation: str, max_tokens: int) -> None:
        self._tokenizer, self._activation, self._max_tokens = tokenizer, activation, max_tokens

    def request(self, pair: Pair, *, truncate: bool, instruction: str | None = None) -> EngineRequest:
        if instruction is not None:
            raise ValueError(f"instruction is {instruction!r}; a cross-encoder is told nothing beside the pair")
        query, document = both_of(pair)
        tokenizer = require_tokenizer(self._tokenizer, "the model")
        ids, second = tokenizer.encode_pair(query, document, max_tokens=self._max_tokens if truncate else None)
        require_length(len(ids), self._max_tokens)
        return EngineRequest(ids, ONE_TOKEN, RequestOptions(embeds=True, pooling="cls", second=second))

    def score(self, state: np.ndarray) -> float:  # [1]
        logit = float(state[0])
        return sigmoid(logit) if self._activation == "sigmoid" else logit


def sigmoid(logit: float) -> float:
    """In [0, 1], whatever the logit."""
    return float(0.5 * (1 + np.tanh(0.5 * logit)))


class PairParts(NamedTuple):
    """A pair taken apart. ranks: one of a ranking, whose texts may have prompts of the checkpoint before them.

    query_counts: the tokens of a query that is read by itself are told with this pair, and not with one before it.
    """

    both: Any
    truncate: bool
    instruction: str | None
    cache_salt: str = ""
    ranks: bool = False
    query_counts: bool = True


def pair_parts(pair: Any, truncate: bool, instruction: str | None) -> PairParts:
    """The parts of a pair. truncate, instruction: of the call. Raises ValueError for fields that are not known."""
    if not isinstance(pair, Mapping):
        return PairParts(pair, truncate, instruction)
    own = {"truncate": truncate, "instruction": instruction, **pair}
    both = [own.pop("query", None), own.pop("document", None)]
    unknown = sorted(set(own) - set(PairParts._fields))
    if unknown:
        raise ValueError(f"the pair has {unknown}; known are query, document, instruction, truncate, cache_salt")
    return PairParts(both, **own)


def paired(queries: Any, documents: Any) -> list[tuple[str, str]]:
    """Pairs in vLLM's form: one query beside each document, or as many queries. Raises ValueError for other counts."""
    left, right = ([texts] if isinstance(texts, str) else list(texts) for texts in (queries, documents))
    if len(left) not in (1, len(right)):
        raise ValueError(f"{len(left)} queries and {len(right)} documents are given; give one query, or one for each")
    return list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))


def both_of(pair: Any) -> tuple[str, str]:
    """The two texts of a pair. Raises ValueError for what is none."""
    texts = [text for text in pair if isinstance(text, str)] if isinstance(pair, list | tuple) else []
    if len(texts) != 2 or len(pair) != 2:
        raise ValueError(f"the pair is {pair!r}; it must be two texts, a query and a document")
    return texts[0], texts[1]


def require_length(num_tokens: int, max_tokens: int) -> None:
    if not 1 <= num_tokens <= max_tokens:
        raise ValueError(
            f"the pair has {num_tokens} tokens; it must have 1 to {max_tokens}: shorten it, or have it cut with "
            "truncate=True"
        )
