"""Books: what is known of the ids of one data shard, which lookup, admission and sharing read and write together."""

import functools

from ferrum_jax.core.kv_cache.block_tables import BlockTables
from ferrum_jax.core.kv_cache.events import KVEvents
from ferrum_jax.core.kv_cache.host_tier import host_tier_of
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.keys import RequestKeys
from ferrum_jax.core.kv_cache.pins import Pins
from ferrum_jax.core.kv_cache.snapshots import StateSlots
from ferrum_jax.core.kv_cache.transfers import Transfers
from ferrum_jax.core.kv_cache.whole_prompts import CachedPrompts
from ferrum_jax.core.metrics import ReuseMetrics
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes


class Books:
    """The books of one CacheManager, which is made of parts that all have them.

    groups: the pool of each cache group, and its window: how many positions a query sees, its own the last, or None for
    all. states: of a model that has recurrent layers. tier: where host memory keeps what the pools evict.
    """

    def __init__(
        self,
        sizes: EngineSizes,
        *,
        fingerprint: bytes = b"",
        kv_dtype: str = "float32",
        enabled: bool = True,
        has_events: bool = False,
    ) -> None:
        """fingerprint, kv_dtype: of the model and its pools, for the keys. enabled: False neither looks up nor
        publishes. has_events: somebody takes them."""
        self.sizes, self.enabled = sizes, enabled
        self._block_size = sizes.block_size
        self.pools = tuple(IdPool(count + 1) for count in sizes.group_blocks)
        self.groups = tuple(zip(self.pools, sizes.windows, strict=True))
        self.blocks = BlockTables(self.pools, sizes)
        self.prompts = CachedPrompts(self.pools, sizes)
        self.states = self._state_slots()
        self.tier = host_tier_of(sizes, self.pools) if enabled else None
        self.events = self._events() if has_events else None
        self.pins = Pins(self.pools, self.all_pools()[len(self.pools) :])
        self.counters = ReuseMetrics(enabled=enabled, block_size=sizes.block_size, kv_dtype=kv_dtype)
        self._keys = RequestKeys(fingerprint=fingerprint, kv_dtype=kv_dtype, block_size=sizes.block_size)
        self._transfers = Transfers()  # of the next plan
        self._has_unkeyed = False  # so rows may hold published blocks without a key

    def _state_slots(self) -> StateSlots | None:
        """The state slots of a model with recurrent layers, or None."""
        if self.sizes.max_snapshots is None:
            return None
        return StateSlots(
            max_num_seqs=self.sizes.max_num_seqs,
            max_snapshots=self.sizes.max_snapshots if self.enabled else 0,
            copy_pool=len(self.pools),
            slot_bytes=self.sizes.state_bytes,
        )

    def _events(self) -> KVEvents:
        """The events of the pools, which have none so far."""
        events = KVEvents(self.sizes.windows, self._block_size)
        for group, pool in enumerate(self.pools):
            pool.on_unkeyed = functools.partial(events.removed, group)
        return events

    def all_pools(self) -> tuple[IdPool, ...]:
        """The pools of blocks, prompts and states."""
        slots = () if self.prompts.slots is None else (self.prompts.slots,)
        return (*self.pools, *slots, *(() if self.states is None else (self.states.pool,)))
