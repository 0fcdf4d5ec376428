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

import dataclasses
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np

from ferrum_jax.ints import ceil_div
from ferrum_jax.metrics import ReuseMetrics
from ferrum_jax.plan import Copy
from ferrum_jax.request import Request
from ferrum_jax.scheduling.id_pool import IdPool
from ferrum_jax.scheduling.keys import RequestKeys
from ferrum_jax.scheduling.pins import Pins
from ferrum_jax.scheduling.prompts import CachedPrompts
from ferrum_jax.scheduling.transfers import Transfers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Hit:
    """What of a request's tokens the pools hold."""

    num_tokens: int  # whose KV is there
    blocks: list[list[int]]  # per group the ids of leading full blocks
    tails: list[int] = dataclasses.field(default_factory=list)  # per group the block to copy for the partial tail
    source: int = 0  # slot of the last token's hidden state


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
        max_cached_prompts: int = 0,
        min_cached_prompt_tokens: int = 8,
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
        self.prompts = CachedPrompts(
            self.pools, block_size=block_size, max_prompts=max_cached_prompts, min_tokens=min_cached_prompt_tokens
        )
        self._keys = RequestKeys(fingerprint=fingerprint, kv_dtype=kv_dtype, block_size=block_size)
        self._transfers = Transfers()
        self._block_bytes = tuple(block_bytes or [0] * len(pool_sizes))
        self.counters = ReuseMetrics(enabled=enabled, block_size=block_size, kv_dtype=kv_dtype)

    # -- what a row owns -------------------------------------------------------------------------------

    def admit(self, request: Request, slot: int) -> int | None:
        """Give `slot` the blocks of all of the request's tokens; the number of tokens whose KV is there.

        Hits are whole blocks and stop one token before the end, unless this very prompt is cached: then its partial
        block is copied, and with its last hidden state nothing is left to compute. None, and then nothing has changed
        but the count of refusals, when a group lacks blocks for what is missing.
        """
        total = ceil_div(len(request.token_ids), self.block_size)
        looks_up = self.enabled and request.takes_hits
        hit = self._find(request) if looks_up else _Hit(num_tokens=0, blocks=[[] for _ in self.pools])
        if not self._fits(hit, total):
            hit = self._without_tails(hit)  # which hold a block each that the request itself may need
            if not self._fits(hit, total):
                self.counters.refusals += 1
                return None
        assert self.num_blocks[slot] == 0, f"slot {slot} is admitted twice"
        self._give(hit, slot, total)
        if looks_up:
            self._count_lookup(hit, request)
        return hit.num_tokens

    def _find(self, request: Request) -> _Hit:
        """The longest run of leading blocks that every group has, or all of a cached prompt."""
        num_tokens, limit = len(request.token_ids), (len(request.token_ids) - 1) // self.block_size
        keys = self._keys.of_blocks(request, limit)[:limit]
        blocks = []
        for pool in self.pools:
            blocks.append(pool.find_run(keys))
            keys = keys[: len(blocks[-1])]
        blocks = [ids[: len(keys)] for ids in blocks]
        if len(keys) == limit and self.prompts.keeps(request):
            tails, source = self.prompts.find(request, self._keys.of_whole(request))
            if num_tokens % self.block_size == 0 and source:
                last = [pool.find(request.keys[limit]) for pool in self.pools]
                if all(last):
                    blocks = [[*ids, id] for ids, id in zip(blocks, last, strict=True)]
                    return _Hit(num_tokens=num_tokens, blocks=blocks, source=source)
            elif tails:
                return _Hit(num_tokens=num_tokens - (source == 0), blocks=blocks, tails=tails, source=source)
        return _Hit(num_tokens=len(keys) * self.block_size, blocks=blocks)

    def _without_tails(self, hit: _Hit) -> _Hit:
        if not hit.tails:
            return hit
        return _Hit(num_tokens=len(hit.blocks[0]) * self.block_size, blocks=hit.blocks)

    def _fits(self, hit: _Hit, total: int) -> bool:
        """Whether every group has the blocks that are missing, once the hit is retained."""
        for group, (pool, ids) in enumerate(zip(self.pools, hit.blocks, strict=True)):
            retained = [*ids, hit.tails[group]] if hit.tails else ids
            if total - len(ids) > pool.num_free - pool.num_cached_among(retained):
                return False
        return True

    def _give(self, hit: _Hit, slot: int, total: int) -> None:
        """Retain the hit before anything is acquired, so that none of it is evicted for its own tail."""
        num_hits, transfers = len(hit.blocks[0]), self._transfers
        for group, (pool, table, ids) in enumerate(zip(self.pools, self.tables, hit.blocks, strict=True)):
            for id in ids:
                pool.retain(id)
            if hit.tails:
                pool.retain(hit.tails[group])
                transfers.held.append((pool, hit.tails[group]))
            table[slot, :num_hits] = ids
            table[slot, num_hits:total] = pool.take(total - num_hits)
            if hit.tails:
                copy = Copy(pool=group, source=hit.tails[group], target=int(table[slot, num_hits]))
                transfers.copies_before.append(copy)
        if hit.source and self.prompts.slots is not None:
            self.prompts.slots.retain(hit.source)
            transfers.held.append((self.prompts.slots, hit.source))
            transfers.sources[slot] = hit.source
        self.num_blocks[slot] = total
        self.num_published[slot] = num_hits

    def _count_lookup(self, hit: _Hit, request: Request) -> None:
        counters = self.counters
        counters.lookups += 1
        counters.hits += hit.num_tokens > 0
        counters.misses += hit.num_tokens == 0
        counters.prompt_hits += hit.source > 0
        counters.hit_blocks += len(hit.blocks[0])
        counters.hit_tokens += hit.num_tokens
        counters.missed_tokens += len(request.token_ids) - hit.num_tokens
        counters.saved_prefill_tokens += hit.num_tokens if request.num_preemptions == 0 else 0

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
        """The keys that a step which computes up to `num_tokens` will add to the cache."""
        if not self.enabled:
            return []
        end = num_tokens // self.block_size
        keys = self._keys.of_blocks(request, end)[int(self.num_published[slot]) : end]
        keys = [key for key in keys if not all(pool.find(key) for pool in self.pools)]
        if self._ends_prompt(request, num_tokens):
            whole = self._keys.of_whole(request)
            keys += [whole] if self.prompts.would_store(request, whole) else []
        return keys

    def shares(self, request: Request, filling: Set[bytes]) -> bool:
        """Whether the request would compute what has a key among `filling`, and might hit it a step later."""
        if not filling or not request.takes_hits:
            return False
        limit = (len(request.token_ids) - 1) // self.block_size
        keys = self._keys.of_blocks(request, limit)[:limit]
        return not filling.isdisjoint(keys) or (self.prompts.keeps(request) and self._keys.of_whole(request) in filling)

    def _ends_prompt(self, request: Request, num_tokens: int) -> bool:
        """Whether a step that computes up to `num_tokens` ends a prompt of which an entry may be kept."""
        ends = num_tokens == len(request.token_ids) == request.num_prompt_tokens
        return ends and request.num_computed < num_tokens and self.prompts.keeps(request)

    def keep_prompt(self, request: Request, num_tokens: int) -> None:
        """Make an entry of the row's prompt if the next plan, which computes up to `num_tokens`, ends it."""
        if self.enabled and self._ends_prompt(request, num_tokens):
            last = (num_tokens - 1) // self.block_size
            tails = [int(table[request.slot, last]) for table in self.tables]
            self.prompts.store(request, self._keys.of_whole(request), tails, self._transfers)

    def publish(self, request: Request, slot: int, num_tokens: int) -> None:
        """Publish the full blocks within the first `num_tokens`, whose KV is dispatched and whose ids are known.

        A block that another row published first is replaced by that one in the table; the twin is freed.
        The caller has copied the tables of the step that writes it.
        """
        first, end = int(self.num_published[slot]), num_tokens // self.block_size
        if not self.enabled or end <= first:
            return
        keys = self._keys.of_blocks(request, end)
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

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of all full blocks of the request's tokens."""
        num_blocks = len(request.token_ids) // self.block_size
        return self._keys.of_blocks(request, num_blocks)[:num_blocks]

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

    def take_transfers(self) -> Transfers:
        """What the plan that is being made moves beside its rows; its ids may be given away from the next plan on."""
        taken, self._transfers = self._transfers, Transfers()
        taken.release()
        self.counters.copied_blocks += len(taken.copies_before) + len(taken.copies_after)
        return taken

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
        slots = self.prompts.slots
        metrics.cached_prompts, metrics.prompt_evictions = (slots.num_keyed, slots.evictions) if slots else (0, 0)
        metrics.bytes = sum(pool.num_keyed * size for pool, size in zip(pools, self._block_bytes, strict=True))
        return metrics

    def reset(self) -> None:
        """Forget every cached prefix. Raises ValueError while a row owns blocks or one is pinned."""
        for pool in self._all_pools():
            pool.reset()

    def _all_pools(self) -> tuple[IdPool, ...]:
        return self.pools if self.prompts.slots is None else (*self.pools, self.prompts.slots)

    def check_invariants(self, running: Sequence[Request] = ()) -> None:
        """Prove the books: each table entry is one holder of its id, and published blocks carry their keys."""
        columns = np.arange(self.tables[0].shape[1])
        used = columns < self.num_blocks[:, None]
        for group, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            assert np.array_equal(table != 0, used), "a table holds ids beyond its blocks, or null within them"
            held = [id for holder, id in self._transfers.held if holder is pool]
            pool.check_invariants(Counter([*table[used].tolist(), *held, *self.pins.ids(group)]))
            for request in running:
                for index in range(int(self.num_published[request.slot])):
                    id = int(table[request.slot, index])
                    assert pool.key_of(id) == request.keys[index], f"block {index} of {request.id} has a foreign key"
        if self.prompts.slots is not None:
            slots = self.prompts.slots
            slots.check_invariants(Counter(id for holder, id in self._transfers.held if holder is slots))
        assert (self.num_published <= self.num_blocks).all(), "a row published more blocks than it has"
