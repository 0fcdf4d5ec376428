"""CacheManager: which KV blocks each running row owns, and which of them others may share.

A cache group is a set of layers that share one block table; each has its own `IdPool`, so a key of one
group never finds an id of another. Per group a persistent table [row slots, blocks] int32 holds the ids,
padded with the null id 0; it is the truth about ownership, and each entry is one holder of its id. Blocks
[0, num_published) of a row carry their chain keys and are never written again.

Why sharing is safe without locks: steps run on the device in the order of their plans, and a plan copies
its tables. A block that is published when the step that fills it is dispatched, or given away while a
step that uses it is in flight, is read or written under its new meaning by later steps only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import numpy as np

from ferrum_jax.ints import ceil_div
from ferrum_jax.metrics import ReuseMetrics
from ferrum_jax.request import Request
from ferrum_jax.scheduling.id_pool import IdPool
from ferrum_jax.scheduling.pins import Pins
from ferrum_jax.scheduling.prefix import extend_keys, root_key


class CacheManager:
    """The books about KV blocks of one data shard."""

    def __init__(
        self,
        *,
        pool_sizes: Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        fingerprint: bytes = b"",
        kv_dtype: str = "float32",
        block_bytes: Sequence[int] | None = None,
        enabled: bool = True,
    ) -> None:
        """pool_sizes: blocks of each cache group's device pool, the null one included.

        block_bytes: bytes of one block of each group over all its layers, for the metrics.
        enabled: False neither looks up nor publishes.
        """
        self.block_size = block_size
        self.enabled = enabled
        self.pools = tuple(IdPool(size) for size in pool_sizes)
        width = ceil_div(max_model_len, block_size)
        self.pins = Pins(self.pools)
        self.tables = tuple(np.zeros((max_num_seqs + 1, width), np.int32) for _ in pool_sizes)
        self.num_blocks = np.zeros(max_num_seqs + 1, np.int32)  # by row slot
        self.num_published = np.zeros(max_num_seqs + 1, np.int32)
        self._fingerprint = fingerprint
        self._kv_dtype = kv_dtype
        self._block_bytes = tuple(block_bytes or [0] * len(pool_sizes))
        self.counters = ReuseMetrics(enabled=enabled, block_size=block_size, kv_dtype=kv_dtype)

    # -- what a row owns -------------------------------------------------------------------------------

    def admit(self, request: Request, slot: int) -> int | None:
        """Give `slot` the blocks of all of the request's tokens; the number of tokens whose KV is there.

        Hits are whole blocks and stop one token before the end. None, and then nothing has changed but
        the count of refusals, when a group lacks blocks for what is missing.
        """
        num_tokens = len(request.token_ids)
        looks_up = self.enabled and request.takes_hits
        hits = self._longest_hit(request) if looks_up else [[] for _ in self.pools]
        num_hits = len(hits[0])
        total = ceil_div(num_tokens, self.block_size)
        for pool, ids in zip(self.pools, hits, strict=True):
            if total - num_hits > pool.num_free - pool.num_cached_among(ids):
                self.counters.refusals += 1
                return None
        assert self.num_blocks[slot] == 0, f"slot {slot} is admitted twice"
        for pool, table, ids in zip(self.pools, self.tables, hits, strict=True):
            for id in ids:  # before anything is acquired, so that no hit is evicted for its own tail
                pool.retain(id)
            table[slot, :num_hits] = ids
            table[slot, num_hits:total] = pool.take(total - num_hits)
        self.num_blocks[slot] = total
        self.num_published[slot] = num_hits
        if looks_up:
            self._count_lookup(num_hits, num_tokens, first=request.num_preemptions == 0)
        return num_hits * self.block_size

    def shares(self, request: Request, filling: Set[bytes]) -> bool:
        """Whether the request would compute a block whose key is among `filling`, and might hit it a step later."""
        if not filling or not request.takes_hits:
            return False
        limit = (len(request.token_ids) - 1) // self.block_size
        self._extend_keys(request, limit)
        return not filling.isdisjoint(request.keys[:limit])

    def _longest_hit(self, request: Request) -> list[list[int]]:
        """Per group the ids of the longest run of leading blocks that every group has."""
        limit = (len(request.token_ids) - 1) // self.block_size
        self._extend_keys(request, limit)
        keys = request.keys[:limit]
        hits = []
        for pool in self.pools:
            hits.append(pool.find_run(keys))
            keys = keys[: len(hits[-1])]
        return [ids[: len(keys)] for ids in hits]

    def _count_lookup(self, num_hits: int, num_tokens: int, *, first: bool) -> None:
        counters, hit_tokens = self.counters, num_hits * self.block_size
        counters.lookups += 1
        counters.hits += num_hits > 0
        counters.misses += num_hits == 0
        counters.hit_blocks += num_hits
        counters.hit_tokens += hit_tokens
        counters.missed_tokens += num_tokens - hit_tokens
        counters.saved_prefill_tokens += hit_tokens if first else 0

    def rows_to_grow(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Indices of the slots [rows] whose blocks hold fewer than `num_tokens` [rows]."""
        return np.flatnonzero(self.num_blocks[slots] * self.block_size < num_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give `slot` the blocks it lacks for `num_tokens`; False, and nothing changed, when a pool lacks them."""
        have = int(self.num_blocks[slot])
        total = ceil_div(num_tokens, self.block_size)
        for pool in self.pools:
            if total - have > pool.num_free:
                return False
        for pool, table in zip(self.pools, self.tables, strict=True):
            table[slot, have:total] = pool.take(total - have)
        self.num_blocks[slot] = total
        return True

    def trim(self, slot: int, num_tokens: int) -> None:
        """Give back the blocks beyond `num_tokens`; a published block cannot be cut."""
        have, keep = int(self.num_blocks[slot]), ceil_div(num_tokens, self.block_size)
        published = int(self.num_published[slot]) * self.block_size
        assert num_tokens >= published, f"trim to {num_tokens} tokens, of which {published} are published"
        if keep < have:
            self._give_back(slot, keep, have)

    def release(self, slot: int) -> None:
        """Give back all blocks of `slot`, the deepest first, so that shared heads outlive tails."""
        self._give_back(slot, 0, int(self.num_blocks[slot]))
        self.num_published[slot] = 0

    def _give_back(self, slot: int, start: int, end: int) -> None:
        for pool, table in zip(self.pools, self.tables, strict=True):
            pool.release(table[slot, start:end][::-1].tolist())
            table[slot, start:end] = 0
        self.num_blocks[slot] = start

    # -- what others may share -------------------------------------------------------------------------

    def rows_to_publish(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Indices of the slots [rows] that have full unpublished blocks within `num_tokens` [rows]."""
        if not self.enabled:
            return np.zeros(0, np.int64)
        return np.flatnonzero((self.num_published[slots] + 1) * self.block_size <= num_tokens)

    def keys_to_publish(self, request: Request, slot: int, num_tokens: int) -> list[bytes]:
        """The keys that publishing the first `num_tokens` would add to the cache."""
        if not self.enabled:
            return []
        end = num_tokens // self.block_size
        self._extend_keys(request, end)
        keys = request.keys[int(self.num_published[slot]) : end]
        return [key for key in keys if not all(pool.find(key) for pool in self.pools)]

    def publish(self, request: Request, slot: int, num_tokens: int) -> None:
        """Publish the full blocks within the first `num_tokens`, whose KV is dispatched and whose ids are known.

        A block that another row published first is replaced by that one in the table; the twin is freed.
        The caller has copied the tables of the step that writes it.
        """
        first, end = int(self.num_published[slot]), num_tokens // self.block_size
        if not self.enabled or end <= first:
            return
        self._extend_keys(request, end)
        keys = request.keys
        for pool, table in zip(self.pools, self.tables, strict=True):
            for index in range(first, end):
                id = int(table[slot, index])
                canonical = pool.publish(id, keys[index])
                if canonical != id:
                    pool.retain(canonical)
                    table[slot, index] = canonical
                    pool.release((id,))
                    self.counters.twins_merged += 1
                else:
                    self.counters.published_blocks += 1
        self.num_published[slot] = end

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        if len(request.keys) < num_blocks:
            root = b"" if request.keys else self._root(request)
            extend_keys(request.keys, root, request.token_ids, num_blocks, self.block_size, request.media)

    def _root(self, request: Request) -> bytes:
        return root_key(
            fingerprint=self._fingerprint,
            kv_dtype=self._kv_dtype,
            block_size=self.block_size,
            adapter=request.adapter,
            salt=request.cache_salt,
        )

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of all full blocks of the request's tokens."""
        num_blocks = len(request.token_ids) // self.block_size
        self._extend_keys(request, num_blocks)
        return request.keys[:num_blocks]

    def num_usable(self, request: Request) -> int:
        """The blocks that the request can have when nothing else runs: all that are not pinned, or pinned for it."""
        usable = []
        for group, pool in enumerate(self.pools):
            pinned = len(self.pins.ids(group))
            own = self.pins.num_among(group, self.keys_of(request)) if pinned and request.takes_hits else 0
            usable.append(pool.num_ids - 1 - pinned + own)
        return min(usable)

    # -- what a step and a reader see ------------------------------------------------------------------

    def gather_tables(self, slots: np.ndarray) -> tuple[np.ndarray, ...]:
        """Per group a copy [rows, widest row's blocks] int32 of the rows' tables."""
        width = int(self.num_blocks[slots].max())
        return tuple(table[slots, :width] for table in self.tables)

    def metrics(self) -> ReuseMetrics:
        """The counters, with the gauges of this moment over all groups."""
        metrics, pools = self.counters, self.pools
        metrics.evictions = sum(pool.evictions for pool in pools)
        metrics.revivals = sum(pool.revivals for pool in pools)
        metrics.live = sum(pool.num_live for pool in pools)
        metrics.cached = sum(pool.num_cached for pool in pools)
        metrics.clean = sum(pool.num_clean for pool in pools)
        metrics.peak_live = sum(pool.peak_live for pool in pools)
        metrics.entries = sum(pool.num_keyed for pool in pools)
        metrics.pinned = self.pins.num_pinned
        metrics.bytes = sum(pool.num_keyed * size for pool, size in zip(pools, self._block_bytes, strict=True))
        return metrics

    def reset(self) -> None:
        """Forget every cached prefix. Raises ValueError while a row owns blocks or one is pinned."""
        for pool in self.pools:
            pool.reset()

    def check_invariants(self, running: Sequence[Request] = ()) -> None:
        """Prove the books: each table entry is one holder of its id, and published blocks carry their keys."""
        columns = np.arange(self.tables[0].shape[1])
        used = columns < self.num_blocks[:, None]
        for group, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            assert np.array_equal(table != 0, used), "a table holds ids beyond its blocks, or null within them"
            pool.check_invariants(Counter([*table[used].tolist(), *self.pins.ids(group)]))
            for request in running:
                for index in range(int(self.num_published[request.slot])):
                    id = int(table[request.slot, index])
                    assert pool.key_of(id) == request.keys[index], f"block {index} of {request.id} has a foreign key"
        assert (self.num_published <= self.num_blocks).all(), "a row published more blocks than it has"
