"""Admission: a hit and what is missing beside it become what a row holds, in every cache group or in none."""

from collections.abc import Sequence

from ferrum_jax.core.kv_cache.books import Books
from ferrum_jax.core.kv_cache.lookup import Hit
from ferrum_jax.core.plan import Copy
from ferrum_jax.core.request import Request


class Admission(Books):
    """Blocks and slots for rows that begin."""

    def _fits(self, hit: Hit, totals: Sequence[int]) -> bool:
        """Whether every group has the blocks that are missing, once the hit is retained."""
        for group, pool in enumerate(self.pools):
            missing = totals[group] - hit.num_blocks + (hit.num_to_load(group) if hit.loads else 0)
            if missing > pool.num_free - pool.num_cached_among(hit.held(group)):
                return False
        return self.states is None or self.states.fits(hit.snapshot)

    def _give(self, hit: Hit, request: Request, slot: int, totals: Sequence[int]) -> None:
        """Give a row the hit and new blocks up to `totals`; the next plan copies for it.

        The hit is retained before anything is acquired, so that none of it is evicted for its own tail.
        """
        for group, pool in enumerate(self.pools):
            for id in hit.held(group):
                pool.retain(id)
            if hit.tails and hit.tails[group]:
                self._transfers.held.append((pool, hit.tails[group]))
        blocks = self._load(hit, request) if hit.loads else hit.blocks
        self.blocks.fill(slot, blocks, totals)
        if self.events is not None:
            for group, ids in enumerate(blocks):
                self.events.stored(group, request, 0, ids)
        for group, tail in enumerate(hit.tails):
            target = int(self.blocks.tables[group][slot, hit.num_blocks])
            if tail:
                self._transfers.copies_before.append(Copy(pool=group, source=tail, target=target))
            elif self.tier is not None:
                self.tier.load(group, hit.loads[group][hit.num_blocks], target)
        if hit.source and self.prompts.slots is not None:
            self.prompts.slots.retain(hit.source)
            self._transfers.held.append((self.prompts.slots, hit.source))
            self._transfers.sources[slot] = hit.source
        if self.states is not None:
            self.states.enter(slot, hit.snapshot, self._transfers)

    def _load(self, hit: Hit, request: Request) -> list[list[int]]:
        """The hit's blocks, with device blocks for those that are in host memory: published, and to be loaded."""
        assert self.tier is not None
        blocks = []
        for group, (pool, ids, loads) in enumerate(zip(self.pools, hit.blocks, hit.loads, strict=True)):
            for host_id in loads.values():  # before anything is evicted
                self.tier.hold(group, host_id)
            new, ids = pool.take(hit.num_to_load(group)), list(ids)
            for id, (index, host_id) in zip(new, loads.items(), strict=False):  # a tail is the last, and has no new id
                pool.publish(id, request.keys[index])
                self.tier.load(group, host_id, id)
                ids[index] = id
            blocks.append(ids)
        return blocks
