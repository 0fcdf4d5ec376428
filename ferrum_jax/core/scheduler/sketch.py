"""Sketch: the rows of one shard in the step that is being planned, before anything is booked."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ferrum_jax.core.request import Request


class _Chunk(Protocol):
    def __call__(self, request: Request, budget: int, *, most: int) -> int: ...


@dataclasses.dataclass(kw_only=True, slots=True)
class Sketch:
    """Decodes at slots and positions [rows], then chunks.

    longest: most tokens of a row that is added now; None for as many as the budget has. is_filled: FLEX rows came to it
    beside others. turns: forwards of each decode, where the step has a horizon.
    """

    slots: np.ndarray
    starts: np.ndarray
    requests: list[Request]
    chunks: list[tuple[Request, int]]
    budget: int  # tokens that are left for new rows
    num_open: int  # row slots for new rows
    filling: set[bytes] | None = None  # keys that the step adds to the cache, once somebody has asked
    longest: int | None = None
    is_filled: bool = False
    turns: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.requests) + sum(count for _, count in self.chunks)

    @property
    def longest_row(self) -> int:
        """Tokens of the row that computes most."""
        return max([min(len(self.requests), 1), *(count for _, count in self.chunks)])

    @property
    def room(self) -> int:
        """Tokens that are left for the next row."""
        return self.budget if self.longest is None else min(self.budget, self.longest)

    def give_what_is_left(self, grow: Callable[[int, int], bool], chunk: _Chunk) -> None:
        """Lengthens the chunks that were cut for others by what these did not take, the first first."""
        for index, (request, count) in enumerate(self.chunks):
            longer = chunk(request, count + self.budget, most=count + self.budget)
            if longer > count and grow(request.slot, request.num_computed + longer):
                self.chunks[index] = request, longer
                self.budget -= longer - count

    def open_rest(self, num_tokens: float, longest: int | None) -> None:
        """Leaves at most so many tokens, for FLEX rows."""
        self.budget, self.longest, self.filling = int(min(self.budget, num_tokens)), longest, None
        self.is_filled = True

    def fill(
        self,
        decodes: Sequence[Request],
        prompts: Sequence[Request],
        grow: Callable[[int, int], bool],
        chunk: _Chunk,
    ) -> None:
        """Adds rows while there are tokens and blocks for them; new rows come only where these have all they need.

        decodes, prompts: rows that decode, and those with tokens left to compute. grow: whether a slot has blocks for
        so many tokens. chunk: of `Shard`.
        """
        for request in decodes[: self.budget]:
            if not grow(request.slot, request.num_computed + 1):
                break
            self.requests = [*self.requests, request]
            self.budget -= 1
        for request in prompts:
            count = chunk(request, self.room, most=self.room) if self.room else 0
            if not count or not grow(request.slot, request.num_computed + count):
                self.num_open = 0
                break
            self.chunks.append((request, count))
            self.budget -= count
