"""CacheManager: which KV blocks each running row owns, and which of them others may share.

A cache group is a set of layers that share one block table; each has its own `IdPool`, so a key of one
group never finds an id of another. What rows own stands in `BlockTables`. The first num_published blocks of a row
carry their chain keys and are never written again.

Why sharing is safe without locks: steps run on the device in the order of their plans, and a plan copies
its tables. A block that is published when the step that fills it is dispatched, or given away while a
step that uses it is in flight, is read or written under its new meaning by later steps only.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ferrum_jax.ints import ceil_div
from ferrum_jax.metrics import ReuseMetrics
from ferrum_jax.request import Request
from ferrum_jax.scheduling.admission import Admission
from ferrum_jax.scheduling.hits import Hit, Lookup
from ferrum_jax.scheduling.host_tier import HostTier
from ferrum_jax.scheduling.id_pool import IdPool
from ferrum_jax.scheduling.keys import RequestKeys
from ferrum_jax.scheduling.pins import Pins
from ferrum_jax.scheduling.prompts import CachedPrompts
from ferrum_jax.scheduling.sharing import Sharing
from ferrum_jax.scheduling.states import StateSlots
from ferrum_jax.scheduling.tables import BlockTables
from ferrum_jax.scheduling.transfers import Transfers


class CacheManager:
    """The books about KV blocks of one data shard."""

    def __init__(
        self,
        *,
        pool_sizes: Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        windows: Sequence[int | None] | None = None,
        tier: HostTier | None = None,
        fingerprint: bytes = b"",
        kv_dtype: str = "float32",
        block_bytes: Sequence[int] | None = None,
        max_cached_prompts: int = 0,
        min_cached_prompt_tokens: int = 8,
        max_snapshots: int | None = None,
        state_bytes: int = 0,
        enabled: bool = True,
    ) -> None:
        """pool_sizes: blocks of each cache group's device pool, the null one included.

        windows: of each group, the positions that a query sees, or None for all; by default no group has one.
        tier: the books of host memory, which keeps what the pools evict.
        block_bytes: bytes of one block of each group over all its layers, for the metrics.
        max_snapshots: of a model with recurrent layers, kept beside the rows' own states; None where it has none.
        state_bytes: bytes of one recurrent state. enabled: False neither looks up nor publishes.
        """
        self.block_size = block_size
        self.enabled = enabled
        self.pools = tuple(IdPool(size) for size in pool_sizes)
        self.windows = tuple(windows or [None] * len(self.pools))
        self.pins = Pins(self.pools)
        self.blocks = BlockTables(
            self.pools, self.windows, block_size=block_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self.prompts = CachedPrompts(
            self.pools,
            block_size=block_size,
            max_prompts=max_cached_prompts,
            min_tokens=min_cached_prompt_tokens,
            keeps_tails=max_snapshots is None,
        )
        self.states: StateSlots | None = None
        if max_snapshots is not None:
            self.states = StateSlots(
                max_num_seqs=max_num_seqs,
                max_snapshots=max_snapshots if enabled else 0,
                copy_pool=len(self.pools),
                slot_bytes=state_bytes,
            )
        self._keys = RequestKeys(fingerprint=fingerprint, kv_dtype=kv_dtype, block_size=block_size)
        self.tier = tier if enabled else None
        if self.tier is not None:
            for group, pool in enumerate(self.pools):
                pool.on_evict = functools.partial(self.tier.spill, group)
        self._lookup = Lookup(
            self.pools,
            self.windows,
            keys=self._keys,
            prompts=self.prompts,
            block_size=block_size,
            states=self.states,
            tier=self.tier,
        )
        self._admission = Admission(
            self.pools, blocks=self.blocks, prompts=self.prompts, states=self.states, tier=self.tier
        )
        self._transfers = Transfers()
        self._block_bytes = tuple(block_bytes or [0] * len(pool_sizes))
        self.counters = ReuseMetrics(enabled=enabled, block_size=block_size, kv_dtype=kv_dtype)
        self.sharing = Sharing(
            self.pools,
            blocks=self.blocks,
            prompts=self.prompts,
            states=self.states,
            keys=self._keys,
            block_size=block_size,
            enabled=enabled,
            counters=self.counters,
        )

    # -- what a row owns -------------------------------------------------------------------------------

    def admit(self, request: Request, slot: int, budget: int | None = None) -> int | None:
        """Give `slot` the blocks of all of the request's tokens; the number of tokens whose KV is there.

        Of groups with a window these are only the blocks of its first chunk, of at most `budget` tokens (None: all).
        Hits are whole blocks and stop one token before the end, unless this very prompt is cached: then its partial
        block is copied, and with its last hidden state nothing is left to compute. None, and then nothing has changed
        but the count of refusals, when a group lacks blocks for what is missing.
        """
        budget = len(request.token_ids) if budget is None else budget
        looks_up = self.enabled and request.takes_hits
        hit = self._lookup.find(request) if looks_up else self._lookup.nothing()
        totals = self._totals(request, hit, budget)
        if not self._admission.fits(hit, totals):
            # tails hold a block each that the request itself may need
            hit = self._lookup.find(request, whole=False) if hit.tails else hit
            totals = self._totals(request, hit, budget)
            if not self._admission.fits(hit, totals):
                self.counters.refusals += 1
                return None
        self._admission.give(hit, request, slot, totals, self._transfers)
        if looks_up:
            self._count_lookup(hit, request)
        return hit.num_tokens

    def num_hit_tokens(self, request: Request) -> int:
        """The tokens whose KV `admit` would find here. Changes nothing."""
        return self._lookup.find(request).num_tokens if self.enabled and request.takes_hits else 0

    def _totals(self, request: Request, hit: Hit, budget: int) -> list[int]:
        """Per group the blocks of a row that begins with the hit and computes a first chunk within the budget."""
        total = ceil_div(len(request.token_ids), self.block_size)
        if not self.blocks.has_windows:
            return [total] * len(self.pools)
        end = hit.num_tokens + self._chunk(hit.num_tokens, len(request.token_ids), budget)
        first = ceil_div(end, self.block_size)
        return [total if window is None else first for window in self.windows]

    def _count_lookup(self, hit: Hit, request: Request) -> None:
        counters = self.counters
        counters.lookups += 1
        counters.missed_tokens += len(request.token_ids) - hit.num_tokens
        counters.host_hits += bool(hit.loads)
        if not hit.num_tokens:
            counters.misses += 1
            return
        counters.hits += 1
        counters.prompt_hits += hit.source > 0
        counters.hit_blocks += hit.num_blocks
        counters.hit_tokens += hit.num_tokens
        counters.saved_prefill_tokens += hit.num_tokens if request.num_preemptions == 0 else 0

    def rows_to_grow(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Indices of the slots [rows] whose blocks hold fewer than `num_tokens` [rows]."""
        return np.flatnonzero(self.blocks.num_blocks[:, slots].min(0) * self.block_size < num_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give `slot` the blocks it lacks for `num_tokens`; False, and nothing changed, when a pool lacks them."""
        return self.blocks.grow(slot, ceil_div(num_tokens, self.block_size))

    def trim(self, slot: int, num_tokens: int) -> None:
        """Give back the blocks beyond `num_tokens`; a published block cannot be cut."""
        published = int(self.blocks.num_published[slot]) * self.block_size
        assert num_tokens >= published, f"trim to {num_tokens} tokens, of which {published} are published"
        self.blocks.cut(slot, ceil_div(num_tokens, self.block_size))

    def release(self, *slots: int) -> None:
        """Give back all blocks of row slots, and their states."""
        self.blocks.clear(slots)
        if self.states is not None:
            for slot in slots:
                self.states.leave(slot)

    def chunk(self, request: Request, budget: int) -> int:
        """How many of a row's known tokens a step computes, at most `budget`.

        With recurrent layers it ends at a block boundary if it reaches one, for only there a snapshot can be shared.
        """
        return self._chunk(request.num_computed, len(request.token_ids), budget)

    def _chunk(self, start: int, num_tokens: int, budget: int) -> int:
        end = min(num_tokens, start + budget)
        boundary = end // self.block_size * self.block_size
        return (boundary if self.states is not None and self.enabled and boundary > start else end) - start

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of all full blocks of the request's tokens."""
        num_blocks = len(request.token_ids) // self.block_size
        return self._keys.of_blocks(request, num_blocks)[:num_blocks]

    def key_of_whole(self, request: Request) -> bytes:
        """The key of all of the request's tokens, under which its end is kept if it is cached as a whole prompt."""
        return self._keys.of_whole(request)

    def keep(self, request: Request, num_tokens: int) -> None:
        """Order what is kept of a row, beside its full blocks, if the next plan computes up to `num_tokens`."""
        self.sharing.keep(request, num_tokens, self._transfers)

    # -- what a step and a reader see ------------------------------------------------------------------

    def state_slots(self, slots: np.ndarray) -> np.ndarray:
        """[rows] int32: where the recurrent states of row slots [rows] are; 0 where the model has none."""
        return np.zeros(len(slots), np.int32) if self.states is None else self.states.of_rows(slots)

    def take_transfers(self) -> Transfers:
        """What the plan that is being made moves beside its rows; its ids may be given away from the next plan on."""
        taken, self._transfers = self._transfers, Transfers()
        taken.release()
        if self.tier is not None:
            taken.spills, taken.loads = self.tier.take()
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
        if self.tier is not None:
            self.tier.measure(metrics)
        slots = self.prompts.slots
        metrics.cached_prompts, metrics.prompt_evictions = (slots.num_keyed, slots.evictions) if slots else (0, 0)
        if self.states is not None:
            snapshots = metrics.snapshots = self.states.pool.num_keyed
            metrics.snapshot_bytes = snapshots * self.states.slot_bytes
            metrics.snapshot_evictions = self.states.pool.evictions
        metrics.bytes = sum(pool.num_keyed * size for pool, size in zip(pools, self._block_bytes, strict=True))
        return metrics

    def reset(self) -> None:
        """Forget every cached prefix. Raises ValueError while a row owns blocks or one is pinned."""
        for pool in self.all_pools():
            pool.reset()
        if self.tier is not None:
            self.tier.reset()

    def numbered_pools(self) -> list[tuple[int, IdPool]]:
        """All pools whose ids can have keys, numbered as in `plan.Copy`."""
        pools = list(enumerate(self.pools))
        if self.states is not None:
            pools.append((len(self.pools), self.states.pool))
        if self.prompts.slots is not None:
            pools.append((len(self.pools) + 1, self.prompts.slots))
        return pools

    def all_pools(self) -> tuple[IdPool, ...]:
        """Those of blocks, of prompts and of states."""
        slots = () if self.prompts.slots is None else (self.prompts.slots,)
        return (*self.pools, *slots, *(() if self.states is None else (self.states.pool,)))

    def check_invariants(self, running: Sequence[Request] = ()) -> None:
        """Prove the books: each table entry is one holder of its id, and published blocks carry their keys."""
        for group, (pool, in_tables) in enumerate(zip(self.pools, self.blocks.holders(), strict=True)):
            held = [id for holder, id in self._transfers.held if holder is pool]
            pool.check_invariants(Counter([*in_tables, *held, *self.pins.ids(group)]))
            for request in running if self.enabled else ():
                first, end = self.blocks.num_behind[group, request.slot], self.blocks.num_published[request.slot]
                for index in range(int(first), int(end)):
                    id = int(self.blocks.tables[group][request.slot, index])
                    assert pool.key_of(id) == request.keys[index], f"block {index} of {request.id} has a foreign key"
        rows = [] if self.states is None else self.states.holders()
        for pool in self.all_pools()[len(self.pools) :]:
            held = [id for holder, id in self._transfers.held if holder is pool]
            is_states = self.states is not None and pool is self.states.pool
            pool.check_invariants(Counter([*held, *(rows if is_states else ())]))
        if self.tier is not None:
            self.tier.check_invariants()
