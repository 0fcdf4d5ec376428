"""Scoring: which tokens of a step something is kept of, and where it is kept: log-probabilities of prompts, experts."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ferrum_jax.core.outputs import NOT_FINITE
from ferrum_jax.core.plan import ShardPlan, StepPlan
from ferrum_jax.engine.of_tokens.kept_experts import KeptExperts
from ferrum_jax.engine.of_tokens.prompt_scores import PromptScores
from ferrum_jax.engine.of_tokens.routed_experts import RoutedExperts
from ferrum_jax.engine.submission import Choice
from ferrum_jax.runtime.dispatched import InFlight, Scores
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.sampling_params import MAX_NAMED_IDS

_ChoiceAt = Callable[[int, int], Choice]  # who has the slot of a shard


class Observed(Protocol):
    """Values of one step's tokens, on their way to the host."""

    def collect(self) -> list[Choice]:
        """Stores it. Waits for the device. Returns the choices with logits that are not finite."""
        ...


class _Followed(NamedTuple):
    """Tokens of one prompt that a step computes and whose next token is scored."""

    slot: int

    choice: Choice
    start: int  # position of the first
    count: int
    place: int  # of the first among the tokens of its shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """The prompt log-probabilities of one step, on their way to the host."""

    stretches: list[_Followed]
    scores: Scores

    def collect(self) -> list[Choice]:
        """Stores the results: token p gives the log-probability of token p + 1. Waits for the device.

        Returns the choices with logits that are not finite; they have no log-probabilities there.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts of the tokens of one step. stretches: book, position of the first token, place in the step, count.

    kept: beside the blocks. hits: by shard and row, the books of rows that begin with a hit.
    """

    step: InFlight
    stretches: Sequence[tuple[RoutedExperts, int, int, int]]
    kept: KeptExperts | None
    hits: Mapping[tuple[int, int], RoutedExperts]

    def collect(self) -> list[Choice]:
        """Stores them. Waits for the device."""
        experts = self.step.experts()
        if self.kept is not None:
            for place, found in self.kept.follow(self.step.plan, experts, self.hits).items():
                self.hits[place].put(0, found)
        for kept, start, place, count in self.stretches:
            kept.put(start, experts[place : place + count])
        return []


def start_scoring(
    runner: Runner, step: InFlight, choice_at: _ChoiceAt, kept: KeptExperts | None = None
) -> list[Observed]:
    """Starts what the rows of a step ask for, which was dispatched just now. kept: experts beside the blocks."""
    observed: list[Observed] = [*_start_scores(runner, step.plan, choice_at)]
    if step.gives_experts:
        hits = {} if kept is None else dict(_hits(step.plan, choice_at))
        observed.append(Routing(step=step, stretches=list(_routed(step.plan, choice_at)), kept=kept, hits=hits))
    return observed


def _hits(plan: StepPlan, choice_at: _ChoiceAt) -> Iterator[tuple[tuple[int, int], RoutedExperts]]:
    for index, slot, _ in plan.admitted:
        (row,) = np.flatnonzero(plan.shards[index].slots == slot).tolist()
        kept = choice_at(index, slot).experts
        if kept is not None and plan.shards[index].starts[row]:
            yield (index, row), kept


def _routed(plan: StepPlan, choice_at: _ChoiceAt) -> Iterator[tuple[RoutedExperts, int, int, int]]:
    place = 0
    for index, shard in enumerate(plan.shards):
        rows = zip(shard.slots.tolist(), shard.starts.tolist(), shard.counts.tolist(), strict=True)
        for slot, start, count in rows:
            kept = choice_at(index, slot).experts
            if kept is not None:
                yield kept, start, place, count
            place += count


def _start_scores(runner: Runner, plan: StepPlan, choice_at: _ChoiceAt) -> Iterator[Scoring]:
    by_shard = [list(_stretches(shard, index, choice_at)) for index, shard in enumerate(plan.shards)]
    for whole in (False, True):
        asked = [[part for part in found if _asked(part.choice).takes_all == whole] for found in by_shard]
        stretches = [part for found in asked for part in found]
        if stretches:
            tops = any(_asked(part.choice).num_tops for part in stretches)
            tokens = [_tokens(found) for found in asked]
            named = (
                [_named(found) for found in asked] if any(_asked(part.choice).num_named for part in stretches) else None
            )
            scores = runner.score_all(tokens) if whole else runner.score(tokens, tops=tops, named=named)
            yield Scoring(stretches=stretches, scores=scores)


def _stretches(shard: ShardPlan, index: int, choice_at: _ChoiceAt) -> Iterator[_Followed]:
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


def _named(stretches: Sequence[_Followed]) -> np.ndarray:
    """[n, MAX_NAMED_IDS]: the tokens that are scored at each of theirs."""
    parts = [_asked(choice).named_ids(start + 1, count) for _, choice, start, count, _ in stretches]
    return np.concatenate([np.zeros((0, MAX_NAMED_IDS), np.int32), *parts])


def _asked(choice: Choice) -> PromptScores:
    scores = choice.submission.scores
    assert scores is not None, "only those that ask have stretches"
    return scores
