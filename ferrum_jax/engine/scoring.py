"""Prompt log-probabilities: which tokens of a step are asked for, and where what comes of them is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ferrum_jax import sampling
from ferrum_jax.engine.submission import Choice
from ferrum_jax.plan import ShardPlan, StepPlan
from ferrum_jax.request import NOT_FINITE
from ferrum_jax.runtime.runner import Runner, Scores


class _Followed(NamedTuple):
    """Tokens of one prompt that a step computes and whose next token is of the prompt too."""

    choice: Choice
    start: int  # position of the first
    count: int
    place: int  # of the first among the tokens of its shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """What was asked of one step, and its results on their way."""

    stretches: list[_Followed]
    scores: Scores

    def collect(self) -> list[Choice]:
        """Stores the results: token p gives the log-probability of token p + 1. Waits for the device.

        Returns the choices of which some logits are not finite; they have no log-probabilities there.
        """
        results, row = sampling.unpack(self.scores.words()), 0
        damaged: list[Choice] = []
        for choice, start, count, _ in self.stretches:
            entries = choice.submission.prompt_logprobs
            assert entries is not None, "it was asked for"
            for position in range(start + 1, start + 1 + count):
                if results.token_ids[row] != NOT_FINITE:
                    entries[position] = results.row(row, _num_asked(choice))
                elif choice not in damaged:
                    damaged.append(choice)
                row += 1
        return damaged


def start_scoring(runner: Runner, plan: StepPlan, choice_at: Callable[[int, int], Choice]) -> Scoring | None:
    """Starts what the rows of a step ask for, which was dispatched just now; None where they ask for nothing.

    choice_at: who has the slot of a shard.
    """
    by_shard = [list(_stretches(shard, index, choice_at)) for index, shard in enumerate(plan.shards)]
    stretches = [stretch for found in by_shard for stretch in found]
    if not stretches:
        return None
    tops = any(_num_asked(stretch.choice) for stretch in stretches)
    return Scoring(stretches=stretches, scores=runner.score([_tokens(found) for found in by_shard], tops=tops))


def _stretches(shard: ShardPlan, index: int, choice_at: Callable[[int, int], Choice]) -> Iterator[_Followed]:
    place = 0
    for slot, start, count in zip(shard.slots.tolist(), shard.starts.tolist(), shard.counts.tolist(), strict=True):
        choice = choice_at(index, slot)
        followed = min(count, choice.request.num_prompt_tokens - 1 - start)
        if not choice.request.takes_hits and followed > 0:
            yield _Followed(choice, start, followed, place)
        place += count


def _tokens(stretches: list[_Followed]) -> tuple[np.ndarray, np.ndarray]:
    """The places of tokens among those of their shard, and the tokens that follow them."""
    places = [np.arange(place, place + count, dtype=np.int32) for _, _, count, place in stretches]
    following = [np.array(c.request.token_ids[s + 1 : s + 1 + n], np.int32) for c, s, n, _ in stretches]
    none = np.zeros(0, np.int32)
    return np.concatenate([none, *places]), np.concatenate([none, *following])


def _num_asked(choice: Choice) -> int:
    return choice.submission.sampling.prompt_logprobs or 0
