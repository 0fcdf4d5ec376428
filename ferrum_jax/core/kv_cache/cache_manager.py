"""CacheManager: which KV blocks each running row owns, and which of them others may share.

A cache group is a set of layers that share one block table; each has its own `IdPool`, so a key of one
group never finds an id of another. What rows own stands in `BlockTables`. The first num_published blocks of a row
carry their chain keys and are never written again.

Why sharing is safe without locks: steps run on the device in the order of their plans, and a plan copies
its tables. A block that is published when the step that fills it is dispatched, or given away while a
step that uses it is in flight, is read or written under its new meaning by later steps only.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ferrum_jax.core.kv_cache.admission import Admission
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.junctions import Junctions
from ferrum_jax.core.kv_cache.lookup import Hit, Lookup
from ferrum_jax.core.kv_cache.sharing import Sharing
from ferrum_jax.core.kv_cache.transfers import Transfers
from ferrum_jax.core.metrics import ReuseMetrics
from ferrum_jax.core.request import Request
from ferrum_jax.io.ints import ceil_div


class CacheManager(Lookup, Admission, Sharing):
    """The books about KV blocks of one data shard."""

    # -- what a row owns -------------------------------------------------------------------------------

    def admit(self, request: Request, slot: int, budget: int | None = None) -> int | None:
        """Give `slot` the blocks of all of the request's tokens; the number of tokens whose KV is there.

        Groups with a window give only the blocks of its first chunk of at most `budget` tokens (None: all).
        Hits are whole blocks and stop one token before the end, unless this very prompt is cached: then its partial
        block is copied, and with its last hidden state nothing is left to compute. None, and then nothing has changed
        but the count of refusals, when a group lacks blocks for what is missing.
        """
        budget = len(request.token_ids) if budget is None else budget
        hit, totals = self._found(request, budget)
        if totals is None:
            self.counters.refusals += 1
            return None
        self._give(hit, request, slot, totals)
        request.junction = hit.junction
        if self.enabled and request.takes_hits:
            self._count_lookup(hit, request)
        return hit.num_tokens

    def has_room(self, request: Request, budget: int) -> bool:
        """Whether `admit` would find blocks for the request. Changes nothing."""
        return self._found(request, budget)[1] is not None

    def _found(self, request: Request, budget: int) -> tuple[Hit, list[int] | None]:
        """The request's cached prefix, and the blocks that its row needs in each group, or None without room."""
        for whole in (True, False):  # tails hold a block each that the request itself may need
            looks_up = self.enabled and request.takes_hits
            hit = self.find(request, whole=whole) if looks_up else self._nothing()
            totals = self._totals(request, hit, budget)
            if self._fits(hit, totals):
                return hit, totals
            if not hit.tails:
                break
        return hit, None

    def num_hit_tokens(self, request: Request, *, whole: bool = True) -> int:
        """The tokens whose KV `admit` would find here; without `whole` in full blocks alone. Changes nothing."""
        return self.find(request, whole=whole).num_tokens if self.enabled and request.takes_hits else 0

    def _totals(self, request: Request, hit: Hit, budget: int) -> list[int]:
        """Per group the blocks of a row that begins with the hit and computes a first chunk within the budget."""
        total = ceil_div(len(request.token_ids), self.sizes.block_size)
        if not self.blocks.has_windows:
            return [total] * len(self.pools)
        end = hit.num_tokens + self._chunk(hit.num_tokens, len(request.token_ids), budget)
        first = ceil_div(end, self.sizes.block_size)
        return [total if window is None else first for window in self.sizes.windows]

    def _count_lookup(self, hit: Hit, request: Request) -> None:
        counters, missed = self.counters, len(request.token_ids) - hit.num_tokens
        counters.host_hits += bool(hit.loads)
        if request.num_preemptions:  # mostly what it computed itself
            counters.resumed_tokens += hit.num_tokens
            counters.recomputed_tokens += missed
            return
        counters.lookups += 1
        counters.missed_tokens += missed
        if not hit.num_tokens:
            counters.misses += 1
            return
        counters.hits += 1
        counters.prompt_hits += hit.source > 0
        counters.hit_blocks += hit.num_blocks
        counters.hit_tokens += hit.num_tokens
        counters.saved_prefill_tokens += hit.num_tokens

    def rows_to_grow(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Indices of the slots [rows] whose blocks hold fewer than `num_tokens` [rows]."""
        return np.flatnonzero(self.blocks.num_blocks[:, slots].min(0) * self.sizes.block_size < num_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give `slot` the blocks it lacks for `num_tokens`; False, and nothing changed, when a pool lacks them."""
        return self.blocks.grow(slot, ceil_div(num_tokens, self.sizes.block_size))

    def release(self, *slots: int) -> None:
        """Give back all blocks of row slots, and their states."""
        self.blocks.clear(slots)
        if self.states is not None:
            for slot in slots:
                self.states.leave(slot)

    def chunk(self, request: Request, budget: int) -> int:
        """How many of a row's known tokens a step computes, at most `budget`.

        With recurrent layers it ends at a block boundary if it reaches one, for only there a snapshot can be shared;
        and where the prefix parted from what was cached, so that the next request that shares it resumes there.
        """
        count = self._chunk(request.num_computed, len(request.token_ids), budget)
        to_junction = request.junction - request.num_computed
        return to_junction if 0 < to_junction < count else count

    def _chunk(self, start: int, num_tokens: int, budget: int) -> int:
        end = min(num_tokens, start + budget)
        boundary = end // self.sizes.block_size * self.sizes.block_size
        return (boundary if self.states is not None and self.enabled and boundary > start else end) - start

    def most_drafts(self, num_tokens: int) -> int:
        """Drafted tokens that may come behind a row's: what a recurrent state computes again lies in one block."""
        if self.states is None:
            return num_tokens
        return -num_tokens % self.sizes.block_size if self.states.can_branch else 0

    def begin_drafts(self, slot: int) -> bool:
        """Order what a row goes back to if a draft of the next plan does not come true; False where nothing is free."""
        return self.states is None or self.states.branch(slot, self._transfers)

    def settle_drafts(self, slot: int, *, are_whole: bool) -> bool:
        """Whether a row goes on behind the drafts that came true; False where its state is that of before the step."""
        return self.states is None or self.states.settle(slot, are_whole=are_whole)

    def junctions(self) -> Junctions | None:
        """Finds where waiting prompts part; None where no row has to stop there."""
        keeps = self.enabled and self.states is not None and self.states.max_snapshots > 0
        return Junctions(self._keys, self.sizes.block_size) if keeps else None

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of all full blocks of the request's tokens."""
        num_blocks = len(request.token_ids) // self.sizes.block_size
        return self._keys.of_blocks(request, num_blocks)[:num_blocks]

    def key_of_whole(self, request: Request, num_tokens: int | None = None) -> bytes:
        """The key of a request's first tokens, or all, under which their end is kept if they are a cached prompt."""
        return self._keys.of_whole(request, num_tokens)

    # -- what others may share -------------------------------------------------------------------------

    def unkey(self, request: Request) -> None:
        """Nothing that stands for tokens of the request is found any more: blocks, snapshots, its whole prompt.

        For one whose logits were not finite: later hits compute again. Rows that share its blocks keep them and end at
        their own logits.
        """
        if not self.enabled:
            return
        for key in self._keys.all_of(request):
            for pool in self.all_pools():
                self._has_unkeyed |= pool.unkey(key)
            if self.tier is not None:
                self.tier.unkey(key)

    # -- what a step and a reader see ------------------------------------------------------------------

    def state_slots(self, slots: np.ndarray) -> np.ndarray:
        """[rows] int32: where the recurrent states of row slots [rows] are; 0 where the model has none."""
        return np.zeros(len(slots), np.int32) if self.states is None else self.states.of_rows(slots)

    def take_transfers(self) -> Transfers:
        """Transfers of the plan that is being made; its ids may be given away from the next plan on."""
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
        block_bytes = self.sizes.block_bytes or [0] * len(pools)
        metrics.bytes = sum(pool.num_keyed * size for pool, size in zip(pools, block_bytes, strict=True))
        return metrics

    def renew(self, fingerprint: bytes) -> None:
        """Other weights, of this fingerprint: all that was computed is forgotten, the pinned too; rows keep theirs."""
        self.pins.clear()
        for pool in self.all_pools():
            pool.unkey_all()
        if self.tier is not None:
            self.tier.unkey_all()
        if self.states is not None:
            self.states.leave_alone()
        self._keys.renew(fingerprint)
        self._has_unkeyed = True

    def reset(self) -> None:
        """Forget every cached prefix, the pinned ones too. Raises ValueError while a row owns blocks or a state."""
        for pool in self.all_pools():
            held = pool.num_live - len(self.pins.ids(pool))
            if held:
                raise ValueError(f"reset of a pool while rows hold {held} of its ids; let them end first")
        self.pins.clear()
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

    def check_invariants(self, running: Sequence[Request] = ()) -> None:
        """Prove the books: each table entry is one holder of its id, and published blocks carry their keys."""
        for group, (pool, in_tables) in enumerate(zip(self.pools, self.blocks.holders(), strict=True)):
            held = [id for holder, id in self._transfers.held if holder is pool]
            pool.check_invariants(Counter([*in_tables, *held, *self.pins.ids(pool)]))
            for request in running if self.enabled else ():
                first, end = self.blocks.num_behind[group, request.slot], self.blocks.num_published[request.slot]
                for index in range(int(first), int(end)):
                    id = int(self.blocks.tables[group][request.slot, index])
                    key = pool.key_of(id)
                    is_right = (key is None and self._has_unkeyed) or key == request.keys[index]
                    assert is_right, f"block {index} of {request.id} has a foreign key"
        rows = [] if self.states is None else self.states.holders()
        for pool in self.all_pools()[len(self.pools) :]:
            held = [id for holder, id in self._transfers.held if holder is pool]
            is_states = self.states is not None and pool is self.states.pool
            pool.check_invariants(Counter([*held, *self.pins.ids(pool), *(rows if is_states else ())]))
        if self.tier is not None:
            self.tier.check_invariants()
