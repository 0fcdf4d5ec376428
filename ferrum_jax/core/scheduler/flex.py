"""FLEX rows beside others: they take what steps are padded with, and make way for who needs their slots and blocks.

A step has the size of the smallest compiled one that holds it. What it would be padded with costs little more when
tokens are there in its place; a token more than that would make it a larger step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.shard import Shard
from ferrum_jax.core.scheduler.waiting import WaitingQueue

_OTHERS_FOR_ONE = 8  # tokens; padding costs nothing more when it is filled but for attention, which each row has


class StepSizes(NamedTuple):
    """Tokens of the compiled steps, smallest first: of those with one token a row, and of those with any counts.

    None at all leave FLEX rows nothing beside others.
    """

    decode: Sequence[int] = ()
    mixed: Sequence[int] = ()

    def alone(self, num_rows: int) -> float:
        """Most tokens of a step that only FLEX rows have: who comes meanwhile waits for it, and for one behind it."""
        return min([size for size in self.mixed if size >= 2 * num_rows], default=math.inf)

    def spare(self, num_tokens: int, *, decodes: bool, step: int) -> int:
        """Tokens that a step of so many has for FLEX rows: some of its padding.

        As many as the smallest of all steps has room for, and else one for each _OTHERS_FOR_ONE, over the steps in
        turn. decodes: no row computes more than one.
        """
        sizes = sorted([*self.mixed, *(self.decode if decodes else ())])
        padding = min([size - num_tokens for size in sizes if size >= num_tokens], default=0)
        share = num_tokens * (step + 1) // _OTHERS_FOR_ONE - num_tokens * step // _OTHERS_FOR_ONE
        return min(padding, max(share, min(sizes, default=0) - num_tokens))


def who_is_here(shards: Sequence[Shard], waiting: WaitingQueue) -> tuple[bool, bool]:
    """Whether FLEX requests are here, and whether others are beside them."""
    rows = [shard.rows for shard in shards]
    if not (waiting.num_flex or any(each.has_flex for each in rows)):
        return False, False
    return True, waiting.num_live > 0 or any(each.has_live for each in rows)


def make_way(shards: Sequence[Shard], waiting: WaitingQueue) -> None:
    """Preempts FLEX rows where a request that is none lacks a row slot or blocks."""
    num_live = waiting.num_live
    if num_live and any(shard.rows.has_flex for shard in shards):
        request = waiting.first()
        if request.id not in waiting.awaited:
            any(_makes_way(shard, request, num_live) for shard in shards)


def _makes_way(shard: Shard, request: Request, num_live: int) -> bool:
    """Preempts until the request has blocks and `num_live` a row slot each; whether there is some room."""
    rows, budget = shard.rows, shard.max_num_batched_tokens
    while rows.has_flex and not (rows.slots.num_free >= num_live and shard.cache.has_room(request, budget)):
        shard.preempt(rows.last())
    return rows.slots.num_free > 0


def fill_up(shards: Sequence[Shard], steps: StepSizes, most_alone: float, step: int) -> None:
    """Plans FLEX rows beside the others. most_alone: tokens of a step that has no others. step: its number."""
    sketches = [shard.sketch for shard in shards]
    num_tokens = max(sketch.num_tokens for sketch in sketches)
    decodes = all(sketch.longest_row <= 1 for sketch in sketches)
    most = num_tokens + steps.spare(num_tokens, decodes=decodes, step=step) if num_tokens else most_alone
    for shard, sketch in zip(shards, sketches, strict=True):
        shard.fill_up(most - sketch.num_tokens, longest=1 if decodes and num_tokens else None)
