"""Lookup: how much of a request's tokens the pools hold, over all kinds of cache groups.

A row resumes at position p where each group holds what a query at p attends to: without a window all blocks before
p, with one those of positions p - window + 1 .. p - 1, with recurrent state the snapshot at p. What lies behind a
window need not be there. Where a window's blocks are gone, a shorter prefix may be whole, so the hit is the longest at
which every group resumes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ferrum_jax.request import Request
from ferrum_jax.scheduling.id_pool import IdPool
from ferrum_jax.scheduling.keys import RequestKeys
from ferrum_jax.scheduling.prompts import CachedPrompts
from ferrum_jax.scheduling.states import StateSlots
from ferrum_jax.scheduling.tables import first_needed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """What of a request's tokens the pools hold."""

    num_tokens: int  # whose KV is there
    num_blocks: int  # full ones
    blocks: list[list[int]]  # per group their ids, 0 where they lie behind the window
    tails: list[int] = dataclasses.field(default_factory=list)  # per group the block to copy for the partial tail
    source: int = 0  # slot of the last token's hidden state
    snapshot: int = 0  # slot of the recurrent state after num_tokens

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
        states: StateSlots | None,
    ) -> None:
        """windows: per cache group how many positions a query sees, its own the last; None is all.

        states: of a model that has recurrent layers.
        """
        self._groups = tuple(zip(pools, windows, strict=True))
        self._keys = keys
        self._prompts = prompts
        self._block_size = block_size
        self._states = states

    def nothing(self) -> Hit:
        return Hit(num_tokens=0, num_blocks=0, blocks=[[] for _ in self._groups])

    def find(self, request: Request, *, whole: bool = True) -> Hit:
        """Leading blocks up to one token before the end, or, with `whole`, all of a cached prompt."""
        limit = (len(request.token_ids) - 1) // self._block_size
        keys = self._keys.of_blocks(request, limit)[:limit]
        blocks = self._find_blocks(keys)
        if whole and len(blocks[0]) == limit and self._prompts.keeps(request):
            hit = self._find_whole(request, blocks)
            if hit is not None:
                return hit
        snapshot = 0
        if self._states is not None:
            blocks = self._find_blocks(keys[: len(blocks[0])], self._states)
            snapshot = self._states.pool.find(keys[len(blocks[0]) - 1]) if blocks[0] else 0
        num_blocks = len(blocks[0])
        return Hit(num_tokens=num_blocks * self._block_size, num_blocks=num_blocks, blocks=blocks, snapshot=snapshot)

    def _find_whole(self, request: Request, blocks: list[list[int]]) -> Hit | None:
        """The hit of a cached prompt, of which `blocks` are all full ones before its last token."""
        num_tokens, num_blocks = len(request.token_ids), len(blocks[0])
        key = self._keys.of_whole(request)
        tails, source = self._prompts.find(request, key)
        snapshot = 0
        if self._states is not None:
            snapshot = self._states.pool.find(self._keys.of_prefix(request, num_tokens))
            if not (source and snapshot):  # a state cannot be taken back by one token
                return None
        if num_tokens % self._block_size:
            if not tails:
                return None
            num_tokens -= source == 0
        else:
            last = [pool.find(request.keys[num_blocks]) for pool, _ in self._groups]
            if not (source and all(last)):
                return None
            blocks = [[*ids, id] for ids, id in zip(blocks, last, strict=True)]
            num_blocks += 1
        return Hit(
            num_tokens=num_tokens, num_blocks=num_blocks, blocks=blocks, tails=tails, source=source, snapshot=snapshot
        )

    def _find_blocks(self, keys: Sequence[bytes], states: StateSlots | None = None) -> list[list[int]]:
        """Per group the ids of the longest run of leading blocks at whose end every group resumes, and `states` too."""
        runs: dict[IdPool, list[int]] = {}
        for pool, window in self._groups:
            if window is None:
                runs[pool] = pool.find_run(keys)
                keys = keys[: len(runs[pool])]
        windowed = [(pool, window) for pool, window in self._groups if window is not None]
        end, longest = len(keys), -1
        while end != longest:  # what one of them lacks shortens the others' prefix too
            longest = end
            for pool, window in windowed:
                end = self._longest_in_window(pool, window, keys[:end])
            end = end if states is None else states.longest(keys[:end])
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
