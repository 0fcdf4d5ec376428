"""HostTier: the books about blocks that host memory keeps for the device pools.

A keyed block that a device pool evicts is copied to host memory under its key; a prompt that asks for it
later gets a device block again, into which it is copied back. The copy in host memory stays, so a block that
is evicted once more need not be copied. Host memory has ids and an `IdPool` of its own for each cache group;
nothing holds a host id longer than one plan, so the least recently used one goes when another is needed.

Copies are ordered by plans: the spills of a plan read device blocks before its loads and rows write any, and
have arrived in host memory before its loads read there. A host block that a plan loads is held until the plan is
made, so no spill of the same plan takes its place.
"""

import functools
from collections.abc import Sequence

from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.metrics import ReuseMetrics
from ferrum_jax.core.plan import Copy
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes


class HostTier:
    """Host blocks of each cache group. A copy's `pool` is its group."""

    def __init__(self, pool_sizes: Sequence[int], block_bytes: Sequence[int] | None = None) -> None:
        """pool_sizes: host blocks of each group, the null one included. block_bytes: of one, for the metrics."""
        self.pools = tuple(IdPool(size) for size in pool_sizes)
        self._block_bytes = tuple(block_bytes or [0] * len(pool_sizes))
        self.spilled_blocks = 0
        self.loaded_blocks = 0
        self._spills: dict[tuple[int, int], Copy] = {}  # by group and host id; the last content counts
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
            self._spills[group, host_id] = Copy(pool=group, source=id, target=host_id)
        pool.release((host_id,))  # now the most recently used

    def find(self, group: int, key: bytes) -> int:
        """The host id of a key, or 0. Changes nothing."""
        return self.pools[group].find(key)

    def unkey(self, key: bytes) -> None:
        """Forget the blocks of a key, in every group."""
        for group, pool in enumerate(self.pools):
            self._spills.pop((group, pool.find(key)), None)
            pool.unkey(key)

    def unkey_all(self) -> None:
        """Forget every block."""
        for pool in self.pools:
            pool.unkey_all()
        self._spills = {}

    def hold(self, group: int, host_id: int) -> None:
        """Keep a host block until the plan that is being made has read it."""
        self.pools[group].retain(host_id)

    def load(self, group: int, host_id: int, id: int) -> None:
        """Copy a host block that is held into the device block `id` before the plan's rows read it."""
        self._loads.append(Copy(pool=group, source=host_id, target=id))

    def take(self) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """The spills and loads of the plan that is being made; from the next on its host blocks may be given away."""
        spills, loads = tuple(self._spills.values()), tuple(self._loads)
        for copy in loads:
            self.pools[copy.pool].release((copy.source,))
        self._spills, self._loads = {}, []
        self.spilled_blocks += len(spills)
        self.loaded_blocks += len(loads)
        return spills, loads

    def measure(self, metrics: ReuseMetrics) -> None:
        """Write the counters and the gauges of this moment."""
        metrics.spilled_blocks, metrics.loaded_blocks = self.spilled_blocks, self.loaded_blocks
        metrics.host_evictions = sum(pool.evictions for pool in self.pools)
        metrics.host_entries = sum(pool.num_keyed for pool in self.pools)
        metrics.host_bytes = sum(
            pool.num_keyed * size for pool, size in zip(self.pools, self._block_bytes, strict=True)
        )

    def reset(self) -> None:
        """Forget every key; no load may wait for its plan."""
        for pool in self.pools:
            pool.reset()
        self._spills = {}

    def check_invariants(self) -> None:
        """Prove the books: a host block is held once for each load that waits for its plan, and by nothing else."""
        for group, pool in enumerate(self.pools):
            holders: dict[int, int] = {}
            for copy in self._loads:
                if copy.pool == group:
                    holders[copy.source] = holders.get(copy.source, 0) + 1
            pool.check_invariants(holders)
        for (group, host_id), copy in self._spills.items():
            assert copy.target == host_id and copy.pool == group, "a spill is filed under another block's id"
            assert self.pools[group].key_of(host_id) is not None, f"host block {host_id} is filled and has no key"


def host_tier_of(sizes: EngineSizes, pools: Sequence[IdPool]) -> HostTier | None:
    """The host tier, which takes blocks that the pools evict; None of a shard without host memory."""
    if not sizes.num_host_blocks:
        return None
    tier = HostTier([sizes.num_host_blocks + 1] * len(pools), sizes.host_block_bytes)
    for group, pool in enumerate(pools):
        pool.on_evict = functools.partial(tier.spill, group)
    return tier
