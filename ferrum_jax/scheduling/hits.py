"""Lookup: how much of a request's tokens the pools hold, over all kinds of cache groups.

A row resumes at position p where each group holds what a query at p attends to: without a window all blocks before
p, with one those of positions p - window + 1 .. p - 1. What lies behind a window need not be there. Where a window's
blocks are gone, a shorter prefix may be whole, so the hit is the longest at which every group resumes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ferrum_jax.request import Request
from ferrum_jax.scheduling.id_pool import IdPool
from ferrum_jax.scheduling.keys import RequestKeys
from ferrum_jax.scheduling.prompts import CachedPrompts
from ferrum_jax.scheduling.tables import first_needed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """What of a request's tokens the pools hold."""

    num_tokens: int  # whose KV is there
    num_blocks: int  # full ones
    blocks: list[list[int]]  # per group their ids, 0 where they lie behind the window
    tails: list[int] = dataclasses.field(default_factory=list)  # per group the block to copy for the partial tail
    source: int = 0  # slot of the last token's hidden state

    def held(self, group: int) -> list[int]:
        """The ids of the group's blocks that are there."""
        ids = self.blocks[group]
        return ids if not ids or ids[0] else [id for id in ids if id]


class Lookup:
    """Finds hits. Changes nothing."""

    def __init__(
        self,
        pools: Sequence[IdPool],
        windows: Sequence[int | None],
        *,
        keys: RequestKeys,
        prompts: CachedPrompts,
        block_size: int,
    ) -> None:
        """windows: per cache group how many positions a query sees, its own the last; None is all."""
        self._groups = tuple(zip(pools, windows, strict=True))
        self._keys = keys
        self._prompts = prompts
        self._block_size = block_size

    def nothing(self) -> Hit:
        return Hit(num_tokens=0, num_blocks=0, blocks=[[] for _ in self._groups])

    def find(self, request: Request) -> Hit:
        """Leading blocks up to one token before the end, or all of a cached prompt."""
        num_tokens, limit = len(request.token_ids), (len(request.token_ids) - 1) // self._block_size
        blocks = self._find_blocks(self._keys.of_blocks(request, limit)[:limit])
        num_blocks = len(blocks[0])
        if num_blocks == limit and self._prompts.keeps(request):
            tails, source = self._prompts.find(request, self._keys.of_whole(request))
            if num_tokens % self._block_size == 0 and source:
                last = [pool.find(request.keys[limit]) for pool, _ in self._groups]
                if all(last):
                    blocks = [[*ids, id] for ids, id in zip(blocks, last, strict=True)]
                    return Hit(num_tokens=num_tokens, num_blocks=limit + 1, blocks=blocks, source=source)
            elif tails:
                computed = 0 if source else 1
                return Hit(
                    num_tokens=num_tokens - computed, num_blocks=limit, blocks=blocks, tails=tails, source=source
                )
        return Hit(num_tokens=num_blocks * self._block_size, num_blocks=num_blocks, blocks=blocks)

    def without_tails(self, hit: Hit) -> Hit:
        """The hit's full blocks alone."""
        if not hit.tails:
            return hit
        return Hit(num_tokens=hit.num_blocks * self._block_size, num_blocks=hit.num_blocks, blocks=hit.blocks)

    def _find_blocks(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Per group the ids of the longest run of leading blocks at whose end every group resumes."""
        runs: dict[IdPool, list[int]] = {}
        for pool, window in self._groups:
            if window is None:
                runs[pool] = pool.find_run(keys)
                keys = keys[: len(runs[pool])]
        windowed = [(pool, window) for pool, window in self._groups if window is not None]
        end, longest = len(keys), -1
        while end != longest:  # what one window lacks shortens the others' prefix too
            longest = end
            for pool, window in windowed:
                end = self._longest_in_window(pool, window, keys[:end])
        found = []
        for pool, window in self._groups:
            first = first_needed(window, end * self._block_size, self._block_size)
            found.append(runs[pool][:end] if window is None else [0] * first + [pool.find(k) for k in keys[first:end]])
        return found

    def _longest_in_window(self, pool: IdPool, window: int, keys: Sequence[bytes]) -> int:
        """The most blocks at whose end the pool has all that the window covers."""
        end = len(keys)
        while end:
            first = first_needed(window, end * self._block_size, self._block_size)
            missing = next((i for i in range(end - 1, first - 1, -1) if not pool.find(keys[i])), None)
            if missing is None:
                break
            end = missing
        return end
