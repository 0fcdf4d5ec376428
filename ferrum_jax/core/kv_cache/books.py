"""Books: what is known of the ids of one data shard, which lookup, admission and sharing read and write together."""

from __future__ import annotations

import dataclasses

from ferrum_jax.core.kv_cache.block_tables import BlockTables
from ferrum_jax.core.kv_cache.host_tier import HostTier
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.keys import RequestKeys
from ferrum_jax.core.kv_cache.snapshots import StateSlots
from ferrum_jax.core.kv_cache.whole_prompts import CachedPrompts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Books:
    """The books of one CacheManager.

    pools, windows: of each cache group; a window is how many positions a query sees, its own the last, or None for all.
    states: of a model that has recurrent layers. tier: where host memory keeps what the pools evict.
    """

    block_size: int
    pools: tuple[IdPool, ...]
    windows: tuple[int | None, ...]
    blocks: BlockTables
    prompts: CachedPrompts
    states: StateSlots | None
    tier: HostTier | None
    keys: RequestKeys
