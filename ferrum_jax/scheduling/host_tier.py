"""HostTier: the books about blocks that host memory keeps for the device pools.

A keyed block that a device pool evicts is copied to host memory under its key; a prompt that asks for it
later gets a device block again, into which it is copied back. The copy in host memory stays, so a block that
is evicted once more need not be copied. Host memory has ids and an `IdPool` of its own for each cache group;
nothing holds a host id longer than one plan, so the least recently used one goes when another is needed.

Copies are ordered by plans: the spills of a plan read device blocks before its loads and rows write any, and
its loads read host memory before its spills arrive there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_jax.plan import Copy
from ferrum_jax.scheduling.id_pool import IdPool


class HostTier:
    """Host blocks of each cache group. Of a copy, `pool` is the group."""

    def __init__(self, pool_sizes: Sequence[int]) -> None:
        """pool_sizes: host blocks of each group, the null one included."""
        self.pools = tuple(IdPool(size) for size in pool_sizes)
        self.spilled_blocks = 0
        self.loaded_blocks = 0
        self._spills: list[Copy] = []
        self._loads: list[Copy] = []

    def spill(self, group: int, id: int, key: bytes) -> None:
        """The device block `id` of this key is given away by the plan that is being made."""
        pool = self.pools[group]
        host_id = pool.find(key)
        if host_id:
            pool.retain(host_id)
        else:
            ids = pool.acquire(1)
            if ids is None:
                return  # every host block is read by this plan
            (host_id,) = ids
            pool.publish(host_id, key)
            self._spills.append(Copy(pool=group, source=id, target=host_id))
            self.spilled_blocks += 1
        pool.release((host_id,))  # now the most recently used

    def find(self, group: int, key: bytes) -> int:
        """The host id of a key, or 0. Changes nothing."""
        return self.pools[group].find(key)

    def hold(self, group: int, host_id: int) -> None:
        """Keep a host block until the plan that is being made has read it."""
        self.pools[group].retain(host_id)

    def load(self, group: int, host_id: int, id: int) -> None:
        """Copy a host block that is held into the device block `id` before the plan's rows read it."""
        self._loads.append(Copy(pool=group, source=host_id, target=id))
        self.loaded_blocks += 1

    def take(self) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """The spills and loads of the plan that is being made; from the next on its host blocks may be given away."""
        spills, loads = tuple(self._spills), tuple(self._loads)
        for copy in loads:
            self.pools[copy.pool].release((copy.source,))
        self._spills, self._loads = [], []
        return spills, loads

    def check_invariants(self) -> None:
        for group, pool in enumerate(self.pools):
            holders: dict[int, int] = {}
            for copy in self._loads:
                if copy.pool == group:
                    holders[copy.source] = holders.get(copy.source, 0) + 1
            pool.check_invariants(holders)
