"""Lookup: how much of a request's tokens the pools hold, over all kinds of cache groups.

A row resumes at position p where each group holds what a query at p attends to: without a window all blocks before
p, with one those of positions p - window + 1 .. p - 1, with recurrent state the snapshot at p. What lies behind a
window need not be there. Where a window's blocks are gone, a shorter prefix may be whole, so the hit is the longest at
which every group resumes. A block that the host tier holds counts as there: it will be copied into a device block.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ferrum_jax.core.kv_cache.books import Books
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.pins import Pinnable
from ferrum_jax.core.kv_cache.snapshots import StateSlots
from ferrum_jax.core.request import Request
from ferrum_jax.io.ints import first_needed


class Hit(NamedTuple):
    """The part of a request's tokens that the pools and the host tier hold."""

    num_tokens: int  # whose KV is there
    num_blocks: int  # full ones
    blocks: list[list[int]]  # per group their ids, 0 where they lie behind the window or in host memory
    tails: Sequence[int] = ()  # per group the block to copy for the partial tail
    source: int = 0  # slot of the last token's hidden state
    snapshot: int = 0  # slot of the recurrent state after num_tokens
    loads: Sequence[dict[int, int]] = ()  # per group: block index -> host id, if any
    junction: int = 0  # tokens whose blocks are there, where these are more than the last snapshot stands for

    def held(self, group: int) -> list[int]:
        """The ids of the group's blocks that the pool has, the tail's too."""
        ids = [*self.blocks[group], self.tails[group]] if self.tails else self.blocks[group]
        return [id for id in ids if id] if 0 in ids else ids

    def num_to_load(self, group: int) -> int:
        """Full blocks of the group that come from host memory."""
        return sum(index < self.num_blocks for index in self.loads[group]) if self.loads else 0


class Lookup(Books):
    """Finds hits. Changes nothing."""

    def _nothing(self) -> Hit:
        return Hit(num_tokens=0, num_blocks=0, blocks=[[] for _ in self.groups])

    def find(self, request: Request, *, whole: bool = True) -> Hit:
        """Leading blocks up to the request's limit, or, with `whole`, all of a cached prompt."""
        limit = request.hit_limit // self._block_size
        keys = self._keys.of_blocks(request, limit)[:limit]
        blocks = self._find_blocks(keys)
        if whole and len(blocks[0]) == limit and self.prompts.keeps(request):
            hit = self._find_whole(request, blocks)
            if hit is not None:
                return hit
        snapshot = junction = 0
        if self.states is not None:
            junction = len(blocks[0])
            blocks = self._find_blocks(keys[:junction], self.states)
            snapshot = self.states.pool.find(keys[len(blocks[0]) - 1]) if blocks[0] else 0
        num_tokens = len(blocks[0]) * self._block_size
        return Hit(
            num_tokens=num_tokens,
            num_blocks=len(blocks[0]),
            blocks=blocks,
            snapshot=snapshot,
            loads=self._loads(blocks, keys, num_tokens),
            junction=junction * self._block_size if junction > len(blocks[0]) else 0,
        )

    def find_prefix(self, request: Request) -> Pinnable | None:
        """The blocks that prompts with this request's prompt as prefix hit, the request itself included.

        That is the blocks that the position after them sees, with recurrent layers the snapshot there, and for itself,
        where it ends with a full block, its entry. None where some of it is not on the device.
        """
        num_tokens = len(request.token_ids)
        longer = dataclasses.replace(request, token_ids=array("i", [*request.token_ids, 0]), keys=[])
        hit, itself = self.find(longer, whole=False), self.find(request)
        if hit.num_blocks < num_tokens // self._block_size or hit.loads:
            return None
        hits = [hit, itself] if itself.source and num_tokens % self._block_size == 0 else [hit]
        found = {pool: [id for hit in hits for id in hit.held(group)] for group, (pool, _) in enumerate(self.groups)}
        if self.states is not None:
            found[self.states.pool] = [hit.snapshot for hit in hits]
        if self.prompts.slots is not None:
            found[self.prompts.slots] = [hit.source for hit in hits]
        return found

    def _find_whole(self, request: Request, blocks: list[list[int]]) -> Hit | None:
        """The hit of a cached prompt; `blocks` are all its full blocks before the last token."""
        num_tokens, num_blocks = len(request.token_ids), len(blocks[0])
        key = self._keys.of_whole(request)
        source = self.prompts.find(key)
        snapshot = 0
        if self.states is not None:
            snapshot = self.states.pool.find(self._keys.of_prefix(request, num_tokens))
            if not (source and snapshot):  # a state cannot be taken back by one token
                return None
        has_tail = num_tokens % self._block_size != 0
        last_key = key if has_tail else request.keys[num_blocks]
        last = self._ids(last_key) if has_tail or source else None
        if last is None:
            return None
        longer = [[*ids, id] for ids, id in zip(blocks, last, strict=True)]
        return Hit(
            num_tokens=num_tokens if source else num_tokens - 1,
            num_blocks=num_blocks + (not has_tail),
            blocks=blocks if has_tail else longer,
            tails=last if has_tail else [],
            source=source,
            snapshot=snapshot,
            loads=self._loads(longer, [*request.keys[:num_blocks], last_key], num_blocks * self._block_size),
        )

    def _ids(self, key: bytes) -> list[int] | None:
        """Per group the id of a block, 0 where host memory has it; None if a group has it nowhere."""
        ids = [pool.find(key) for pool, _ in self.groups]
        return ids if all(self.has(group, key) for group in range(len(ids))) else None

    def has(self, group: int, key: bytes) -> bool:
        """Whether a group's pool or host memory holds a block."""
        return bool(self.pools[group].find(key) or (self.tier is not None and self.tier.find(group, key)))

    def _loads(self, blocks: list[list[int]], keys: Sequence[bytes], position: int) -> Sequence[dict[int, int]]:
        """Host blocks to load before the row can resume at `position`."""
        if self.tier is None:
            return ()
        loads = []
        for group, (ids, (_, window)) in enumerate(zip(blocks, self.groups, strict=True)):
            first = first_needed(window, position, self._block_size)
            loads.append({i: self.tier.find(group, keys[i]) for i in range(first, len(ids)) if not ids[i]})
        return loads if any(loads) else ()

    def _find_blocks(self, keys: Sequence[bytes], states: StateSlots | None = None) -> list[list[int]]:
        """Per group the ids of the longest run of leading blocks at whose end every group resumes, and `states` too."""
        runs: dict[int, list[int]] = {}
        for group, (pool, window) in enumerate(self.groups):
            if window is None:
                runs[group] = self._find_run(group, pool, keys)
                keys = keys[: len(runs[group])]
        if not self.blocks.has_windows and states is None:
            return [run[: len(keys)] for run in runs.values()]
        windowed = [(group, window) for group, (_, window) in enumerate(self.groups) if window is not None]
        end, longest = len(keys), -1
        while end != longest:  # what one of them lacks shortens the others' prefix too
            longest = end
            for group, window in windowed:
                end = self._longest_in_window(group, window, keys[:end])
            end = end if states is None else states.longest(keys[:end])
        found = []
        for group, (pool, window) in enumerate(self.groups):
            first = first_needed(window, end * self._block_size, self._block_size)
            found.append(runs[group][:end] if window is None else [0] * first + [pool.find(k) for k in keys[first:end]])
        return found

    def _find_run(self, group: int, pool: IdPool, keys: Sequence[bytes]) -> list[int]:
        """The ids of the leading keys, up to the first that misses; 0 for what host memory has."""
        ids = pool.find_run(keys)
        if self.tier is not None:
            for key in keys[len(ids) :]:
                id = pool.find(key)
                if not id and not self.tier.find(group, key):
                    break
                ids.append(id)
        return ids

    def _longest_in_window(self, group: int, window: int, keys: Sequence[bytes]) -> int:
        """The most blocks at whose end the group has all that the window covers."""
        end = len(keys)
        while end:
            first = first_needed(window, end * self._block_size, self._block_size)
            missing = [i for i, key in enumerate(keys[first:end], first) if not self.has(group, key)]
            if not missing:
                break
            end = missing[-1]
        return end
