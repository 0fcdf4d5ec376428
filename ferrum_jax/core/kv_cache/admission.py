"""Admission: a hit and what is missing beside it become what a row holds, in every cache group or in none."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_jax.core.kv_cache.books import Books
from ferrum_jax.core.kv_cache.lookup import Hit
from ferrum_jax.core.kv_cache.transfers import Transfers
from ferrum_jax.core.plan import Copy
from ferrum_jax.core.request import Request


class Admission:
    """Over the pools, tables and tiers of one CacheManager."""

    def __init__(self, books: Books) -> None:
        self._pools = books.pools
        self._blocks = books.blocks
        self._prompts = books.prompts
        self._states = books.states
        self._tier = books.tier

    def fits(self, hit: Hit, totals: Sequence[int]) -> bool:
        """Whether every group has the blocks that are missing, once the hit is retained."""
        for group, pool in enumerate(self._pools):
            missing = totals[group] - hit.num_blocks + (hit.num_to_load(group) if hit.loads else 0)
            if missing > pool.num_free - pool.num_cached_among(hit.held(group)):
                return False
        return self._states is None or self._states.fits(hit.snapshot)

    def give(self, hit: Hit, request: Request, slot: int, totals: Sequence[int], transfers: Transfers) -> None:
        """Give a row the hit and new blocks up to `totals`; what the next plan copies for it goes to `transfers`.

        The hit is retained before anything is acquired, so that none of it is evicted for its own tail.
        """
        for group, pool in enumerate(self._pools):
            for id in hit.held(group):
                pool.retain(id)
            if hit.tails and hit.tails[group]:
                transfers.held.append((pool, hit.tails[group]))
        self._blocks.fill(slot, self._load(hit, request) if hit.loads else hit.blocks, totals)
        for group, tail in enumerate(hit.tails):
            target = int(self._blocks.tables[group][slot, hit.num_blocks])
            if tail:
                transfers.copies_before.append(Copy(pool=group, source=tail, target=target))
            elif self._tier is not None:
                self._tier.load(group, hit.loads[group][hit.num_blocks], target)
        if hit.source and self._prompts.slots is not None:
            self._prompts.slots.retain(hit.source)
            transfers.held.append((self._prompts.slots, hit.source))
            transfers.sources[slot] = hit.source
        if self._states is not None:
            self._states.enter(slot, hit.snapshot, transfers)

    def _load(self, hit: Hit, request: Request) -> list[list[int]]:
        """The hit's blocks, with device blocks for those that are in host memory: published, and to be loaded."""
        assert self._tier is not None
        blocks = []
        for group, (pool, ids, loads) in enumerate(zip(self._pools, hit.blocks, hit.loads, strict=True)):
            for host_id in loads.values():  # before anything is evicted
                self._tier.hold(group, host_id)
            new, ids = pool.take(hit.num_to_load(group)), list(ids)
            for id, (index, host_id) in zip(new, loads.items(), strict=False):  # a tail is the last, and has no new id
                pool.publish(id, request.keys[index])
                self._tier.load(group, host_id, id)
                ids[index] = id
            blocks.append(ids)
        return blocks
