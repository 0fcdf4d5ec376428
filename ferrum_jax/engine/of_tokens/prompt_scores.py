"""PromptScores: log-probabilities of a sequence's tokens, as steps give them, and in the forms that users get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ferrum_jax import sampling
from ferrum_jax.asked.sampling import WHOLE_VOCABULARY
from ferrum_jax.outputs import NOT_FINITE, Logprob, SequenceLogprobs


class PromptScores:
    """The results of tokens first .. end - 1 of a sequence; those that are not known yet are NOT_FINITE.

    A result is the words of `score`, or of `score_all` where the whole vocabulary is asked for.
    """

    def __init__(self, token_ids: Sequence[int], *, first: int, num_tops: int) -> None:
        self.token_ids = np.asarray(token_ids, np.int32)
        self.first, self.end = first, len(token_ids)
        self.takes_all = num_tops == WHOLE_VOCABULARY
        self.num_tops = 0 if self.takes_all else num_tops
        self._words: np.ndarray | None = None

    def put(self, position: int, words: np.ndarray) -> None:
        """Keeps the results of tokens from `position` on."""
        if self._words is None:
            self._words = np.zeros((self.end - self.first, words.shape[1]), np.int32)
            self._words[:, 0] = NOT_FINITE
        self._words[position - self.first :][: len(words)] = words

    def entries(self) -> Iterator[dict[int, Logprob] | None]:
        """For each token of the sequence {token id: Logprob}; None where there is none, as for the first."""
        yield from (None for _ in range(self.first))
        if self._words is None:
            yield from (None for _ in range(self.first, self.end))
            return
        results = None if self.takes_all else sampling.unpack(self._words)
        for row, token in enumerate(self._words[:, 0].tolist()):
            if token == NOT_FINITE:
                yield None
            elif results is not None:
                yield results.row(row, self.num_tops)
            else:
                yield _every(token, self._words[row, 1:].view(np.float32))

    def sequence(self, num_cached_tokens: int, weights_version: int) -> SequenceLogprobs:
        """The results as arrays."""
        words = self._words
        assert words is not None, "a sequence that was scored has results"
        ids = tuple(self.token_ids[self.first :].tolist())
        if self.takes_all:
            values = words[:, 1:].view(np.float32)
            chosen = np.take_along_axis(values, self.token_ids[self.first :, None], axis=1)
            return SequenceLogprobs(
                token_ids=ids,
                logprobs=chosen[:, 0],
                ranks=np.asarray(1 + np.sum(values > chosen, axis=1), np.int32),
                top_ids=np.zeros((len(ids), 0), np.int32),
                top_logprobs=np.zeros((len(ids), 0), np.float32),
                all_logprobs=values,
                num_cached_tokens=num_cached_tokens,
                weights_version=weights_version,
            )
        results = sampling.unpack(words)
        return SequenceLogprobs(
            token_ids=ids,
            logprobs=results.logprobs.copy(),
            ranks=results.ranks.copy(),
            top_ids=results.top_ids[:, : self.num_tops].copy(),
            top_logprobs=results.top_logprobs[:, : self.num_tops].copy(),
            num_cached_tokens=num_cached_tokens,
            weights_version=weights_version,
        )


def _every(token: int, values: np.ndarray) -> dict[int, Logprob]:
    """The token's Logprob and then those of all others, most likely first, the lowest id first among equals."""
    order = np.argsort(-values, kind="stable")
    ranks = dict(zip(order.tolist(), range(1, len(order) + 1), strict=True))
    best = 1 + int(np.sum(values > values[token]))
    found = {token: Logprob(logprob=float(values[token]), rank=best)}
    for other in order.tolist():
        found.setdefault(other, Logprob(logprob=float(values[other]), rank=ranks[other]))
    return found
