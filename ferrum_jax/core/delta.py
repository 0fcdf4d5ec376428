"""Delta: what is new of one choice. An engine gives nothing else; texts, answers and files are made of deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ferrum_jax.core.outputs import Logprob, SequenceLogprobs

Entry = list[tuple[int, float, int]]  # token id, log-probability and rank: of the token that stands there, alternatives


def entry_of(found: Mapping[int, Logprob]) -> Entry:
    """Log-probabilities without texts."""
    return [(token_id, each.logprob, each.rank) for token_id, each in found.items()]


class Beside(NamedTuple):
    """Side outputs of a choice, for callers in the engine's process: they are never sent.

    weights_version, weights_versions, embedding, scores, routed_experts, sampling_mask: as in RequestOutput and
    CompletionOutput, of all tokens so far.
    """

    weights_version: int = 0
    weights_versions: tuple[int, ...] | None = None
    embedding: np.ndarray | None = None
    scores: SequenceLogprobs | None = None
    routed_experts: np.ndarray | None = None
    sampling_mask: np.ndarray | None = None


class Delta(NamedTuple):
    """New tokens of one choice. is_last: no other choice of the request goes on.

    times_us: when the step of each token was committed, in microseconds of the clock that all processes of a machine
    share (`time.monotonic`). named_logprobs: of prompt_logprob_token_ids, at tokens of the prompt.
    """

    id: int
    choice: int
    token_ids: list[int]
    logprobs: list[Entry] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_last: bool
    num_cached_tokens: int
    prompt_logprobs: list[Entry | None] | None
    times_us: list[int]
    beside: Beside | None = None
    named_logprobs: list[list[float]] | None = None

    def by_token(self) -> list[Delta]:
        """The delta as one for each token: waiting deltas are joined, and no result may depend on which."""
        last = len(self.token_ids) - 1
        return [
            self._replace(
                token_ids=[token_id],
                logprobs=None if self.logprobs is None else self.logprobs[place : place + 1],
                finish_reason=self.finish_reason if place == last else None,
                stop_reason=self.stop_reason if place == last else None,
                is_last=self.is_last and place == last,
                times_us=self.times_us[place : place + 1],
            )
            for place, token_id in enumerate(self.token_ids)
        ] or [self]


def joined(first: Delta, then: Delta) -> Delta:
    """Two deltas of one choice as one."""
    both = (first.logprobs, then.logprobs)
    logprobs = None if both == (None, None) else [*(first.logprobs or ()), *(then.logprobs or ())]
    return then._replace(
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs if then.prompt_logprobs is None else then.prompt_logprobs,
        times_us=first.times_us + then.times_us,
        named_logprobs=first.named_logprobs if then.named_logprobs is None else then.named_logprobs,
    )
