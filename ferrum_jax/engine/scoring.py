"""Log-probabilities of prompts: which tokens of a step are asked for, and where what comes of them is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ferrum_jax.engine.prompt_scores import PromptScores
from ferrum_jax.engine.submission import Choice
from ferrum_jax.plan import ShardPlan, StepPlan
from ferrum_jax.request import NOT_FINITE
from ferrum_jax.runtime.runner import Runner, Scores


class _Followed(NamedTuple):
    """Tokens of one prompt that a step computes and whose next token is scored."""

    slot: int

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
        words, row = self.scores.words(), 0
        damaged: list[Choice] = []
        for _, choice, start, count, _ in self.stretches:
            kept = choice.submission.scores
            assert kept is not None, "they were asked for"
            found = words[row : row + count]
            kept.put(start + 1, found)
            if (found[:, 0] == NOT_FINITE).any() and choice not in damaged:
                damaged.append(choice)
            row += count
        return damaged


def start_scoring(runner: Runner, plan: StepPlan, choice_at: Callable[[int, int], Choice]) -> list[Scoring]:
    """Starts what the rows of a step ask for, which was dispatched just now.

    choice_at: who has the slot of a shard.
    """
    by_shard = [list(_stretches(shard, index, choice_at)) for index, shard in enumerate(plan.shards)]
    started = []
    for whole in (False, True):
        asked = [[part for part in found if _asked(part.choice).takes_all == whole] for found in by_shard]
        stretches = [part for found in asked for part in found]
        if stretches:
            tops = any(_asked(part.choice).num_tops for part in stretches)
            tokens = [_tokens(found) for found in asked]
            scores = runner.score_all(tokens) if whole else runner.score(tokens, tops=tops)
            started.append(Scoring(stretches=stretches, scores=scores))
    return started


def _stretches(shard: ShardPlan, index: int, choice_at: Callable[[int, int], Choice]) -> Iterator[_Followed]:
    place = 0
    for slot, start, count in zip(shard.slots.tolist(), shard.starts.tolist(), shard.counts.tolist(), strict=True):
        choice = choice_at(index, slot)
        scores = choice.submission.scores
        if scores is not None and choice.request.choice == 0:
            first, end = max(start, scores.first - 1), min(start + count, scores.end - 1)
            if first < end:
                yield _Followed(slot, choice, first, end - first, place + first - start)
        place += count


def _tokens(stretches: Sequence[_Followed]) -> np.ndarray:
    """[4, n]: places of tokens among those of their shard, the tokens that follow them, row slots, their positions."""
    parts = [np.zeros((4, 0), np.int32)]
    for slot, choice, start, count, place in stretches:
        next_ones = np.arange(start + 1, start + 1 + count, dtype=np.int32)
        following = _asked(choice).token_ids[next_ones]
        parts.append(np.stack([next_ones + (place - start - 1), following, np.full(count, slot, np.int32), next_ones]))
    return np.concatenate(parts, axis=1)


def _asked(choice: Choice) -> PromptScores:
    scores = choice.submission.scores
    assert scores is not None, "only those that ask have stretches"
    return scores
