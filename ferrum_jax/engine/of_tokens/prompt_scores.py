"""PromptScores: log-probabilities of a sequence's tokens, as steps give them, and in the forms that users get."""

from collections.abc import Iterator, Sequence

import numpy as np

from ferrum_jax.core.outputs import NOT_FINITE, Logprob, SequenceLogprobs
from ferrum_jax.core.request_options import ScoresAsked
from ferrum_jax.runtime import sampling
from ferrum_jax.sampling_params import MAX_NAMED_IDS, MAX_NAMED_SCORES, WHOLE_VOCABULARY, SamplingParams


class PromptScores:
    """The results of tokens first .. end - 1 of a sequence; those that are not known yet are NOT_FINITE.

    A result is the words of `score`, or of `score_all` where the whole vocabulary is asked for. Tokens may be named,
    whose log-probabilities belong to it.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        first: int,
        num_tops: int,
        named: Sequence[Sequence[int]] = (),
        named_from: int = 1,
    ) -> None:
        """named: for each token from `named_from` on, or a single list for all of them."""
        self.token_ids = np.asarray(token_ids, np.int32)
        self.first, self.end = first, len(token_ids)
        self.takes_all = num_tops == WHOLE_VOCABULARY
        self.num_tops = 0 if self.takes_all else num_tops
        self._named, self._named_from = named, named_from
        self.num_named = max(map(len, named), default=0)
        self._words: np.ndarray | None = None

    def named_ids(self, position: int, count: int) -> np.ndarray:
        """[count, MAX_NAMED_IDS] int32: the tokens that are named of those from `position` on, and then 0."""
        found = np.zeros((count, MAX_NAMED_IDS), np.int32)
        for row, ids in zip(found, self._rows(position, count), strict=True):
            row[: len(ids)] = ids
        return found

    def _rows(self, position: int, count: int) -> list[Sequence[int]]:
        """The ids to score at each of `count` tokens from `position` on."""
        if len(self._named) == 1:
            return [self._named[0] if each >= self._named_from else () for each in range(position, position + count)]
        at = position - self._named_from
        before = min(count, max(0, -at)) if self._named else count
        return [()] * before + list(self._named[max(0, at) : max(0, at) + count - before])

    def put(self, position: int, words: np.ndarray) -> None:
        """Keeps the results of tokens from `position` on."""
        width = words.shape[1] if self.takes_all else sampling.RESULT_WORDS + self.num_named
        if self._words is None:
            self._words = np.zeros((self.end - self.first, width), np.int32)
            self._words[:, 0] = NOT_FINITE
        self._words[position - self.first :][: len(words)] = words[:, :width]

    def named(self) -> list[list[float]] | None:
        """The log-probabilities of named tokens, a list for each token; None where some were not computed."""
        if self._words is None or not self._named:
            return None
        rows = self._words[self._named_from - self.first :]
        if (rows[:, 0] == NOT_FINITE).any():
            return None
        ids = self._rows(self._named_from, len(rows))
        if self.takes_all:
            every = rows[:, 1:].view(np.float32)
            return [values[list(own)].tolist() for values, own in zip(every, ids, strict=True)]
        found = rows[:, sampling.RESULT_WORDS :].view(np.float32)
        return [values[: len(own)].tolist() for values, own in zip(found, ids, strict=True)]

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


def prompt_scores(token_ids: Sequence[int], sampling: SamplingParams, asked: ScoresAsked | None) -> PromptScores:
    """The book of what a request asks of a sequence. asked: of one whose tokens are scored and not completed.

    Raises ValueError for named tokens that do not fit it.
    """
    start, tops = 1 if asked is None else asked.start, sampling.prompt_logprobs
    named = sampling.named_rows
    if not named:
        return PromptScores(token_ids, first=start, num_tops=tops or 0)
    first = max(start, 1 + sampling.prompt_logprob_start)
    count, is_for_all = len(token_ids) - first, named is not sampling.prompt_logprob_token_ids
    what = f"behind prompt_logprob_start, {first - 1}, of a prompt of {len(token_ids)} tokens"
    if count < 1:
        raise ValueError(f"no token is left to score {what}; lower prompt_logprob_start")
    if not is_for_all and len(named) != count:
        raise ValueError(
            f"prompt_logprob_token_ids holds {len(named)} lists, and there are {count} tokens {what}; give a list for "
            "each of these, or one list of ids for all"
        )
    if (scores := count * max(map(len, named))) > MAX_NAMED_SCORES:
        raise ValueError(f"{scores:,} log-probabilities are asked for {what}; at most {MAX_NAMED_SCORES:,} are given")
    own_first = first if tops is None else start
    return PromptScores(token_ids, first=own_first, num_tops=tops or 0, named=named, named_from=first)


def _every(token: int, values: np.ndarray) -> dict[int, Logprob]:
    """The token's Logprob and then those of all others, most likely first, the lowest id first among equals."""
    order = np.argsort(-values, kind="stable")
    ranks = dict(zip(order.tolist(), range(1, len(order) + 1), strict=True))
    best = 1 + int(np.sum(values > values[token]))
    found = {token: Logprob(logprob=float(values[token]), rank=best)}
    for other in order.tolist():
        found.setdefault(other, Logprob(logprob=float(values[other]), rank=ranks[other]))
    return found
