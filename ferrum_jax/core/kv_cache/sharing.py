"""Sharing: which blocks of rows others may have, under the keys of their content.

A block is published when the step that computes its last token is dispatched and its token ids are known; from then on
nobody writes it. Beside the blocks an entry of the prompt and snapshots of recurrent states are kept. What a step
fills is known while the step is planned, so a request that would compute the same can wait for it.
"""

from collections.abc import Set

import numpy as np

from ferrum_jax.core.kv_cache.books import Books
from ferrum_jax.core.request import Request
from ferrum_jax.io.ints import ceil_div


class Sharing(Books):
    """The sharing of rows' blocks. A manager that is not enabled shares nothing; what windows left is given back."""

    def rows_to_publish(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Indices of the slots [rows] that have full unpublished blocks within `num_tokens` [rows]."""
        if not (self.enabled or self.blocks.has_windows):
            return np.zeros(0, np.int64)
        return np.flatnonzero((self.blocks.num_published[slots] + 1) * self._block_size <= num_tokens)

    def keys_to_publish(self, request: Request, num_tokens: int) -> set[bytes]:
        """Keys of blocks filled once `num_tokens` are computed, and of the one being filled.

        A chunk may end within a block that a later chunk fills: a request that shares this block waits for it too.
        """
        if not self.enabled or request.has_old_kv:
            return set()
        end, pools = ceil_div(num_tokens, self._block_size), self.pools
        end = min(end, len(request.token_ids) // self._block_size)
        keys = self._keys.of_blocks(request, end)[int(self.blocks.num_published[request.slot]) : end]
        if self.states is not None:  # without a snapshot at their end, blocks are no hit
            pools, keys = (*pools, self.states.pool), keys[-1:]
        missing: set[bytes] = set()
        for pool in pools:
            missing |= pool.missing(keys)
        if self._ends_prompt(request, num_tokens):
            whole = self._keys.of_whole(request)
            if self.prompts.would_store(request, whole):
                missing.add(whole)
        return missing

    def shares(self, request: Request, filling: Set[bytes]) -> bool:
        """True if this step fills a block, by its key, that the request could reuse one step later."""
        if not filling or not request.takes_hits:
            return False
        limit = request.hit_limit // self._block_size
        keys = self._keys.of_blocks(request, limit)[:limit]
        return not filling.isdisjoint(keys) or (self.prompts.keeps(request) and self._keys.of_whole(request) in filling)

    def _ends_prompt(self, request: Request, num_tokens: int) -> bool:
        """Whether a step that computes up to `num_tokens` ends a prompt that may be kept as an entry."""
        ends = num_tokens == len(request.token_ids) == request.num_prompt_tokens
        return ends and request.num_computed < num_tokens and self.prompts.keeps(request)

    def keep(self, request: Request, num_tokens: int) -> None:
        """Order what is kept of a row, beside its full blocks, if the next plan computes up to `num_tokens`.

        An entry of its prompt if that ends there, and a snapshot of its recurrent state.
        """
        if not self.enabled or request.num_computed == num_tokens or request.has_old_kv:
            return
        ends_prompt = self._ends_prompt(request, num_tokens)
        if ends_prompt:
            last = (num_tokens - 1) // self._block_size
            tails = [int(table[request.slot, last]) for table in self.blocks.tables]
            self.prompts.store(request, self._keys.of_whole(request), tails, self._transfers)
        if self.states is not None and (ends_prompt or num_tokens % self._block_size == 0):
            self.states.keep(request.slot, self._keys.of_prefix(request, num_tokens), self._transfers)

    def follow(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Order snapshots of rows that draw tokens and fill a block with those before `ends` [rows]."""
        if self.enabled and self.states is not None:
            for row in np.flatnonzero(ends % self._block_size == 0).tolist():
                self.states.follow(int(slots[row]), int(ends[row]), self._transfers)

    def publish(self, request: Request, slot: int, num_tokens: int) -> None:
        """Publish the full blocks within the first `num_tokens`, whose KV is dispatched and whose ids are known.

        A block that another row published first is replaced by that one in the table; the twin is freed. What a
        window has left behind is given back. The caller has copied the tables of the step that writes the blocks.
        """
        first, end = int(self.blocks.num_published[slot]), num_tokens // self._block_size
        if end <= first or not (self.enabled or self.blocks.has_windows):
            return
        if self.enabled and not request.has_old_kv:
            self._publish_blocks(request, slot, first, end)
            if self.states is not None:
                self.states.publish(slot, num_tokens, lambda count: self._keys.of_prefix(request, count))
        self.blocks.num_published[slot] = end
        if self.blocks.has_windows:
            self.counters.left_behind_blocks += self.blocks.leave_behind(slot)

    def _publish_blocks(self, request: Request, slot: int, first: int, end: int) -> None:
        keys = self._keys.of_blocks(request, end)[first:end]
        for group, (pool, table) in enumerate(zip(self.pools, self.blocks.tables, strict=True)):
            ids = table[slot, first:end].tolist()
            canonical = pool.publish_all(ids, keys)
            twins = [index for index, id in enumerate(ids) if canonical[index] != id] if canonical != ids else []
            for index in twins:
                pool.retain(canonical[index])
                table[slot, first + index] = canonical[index]
                pool.release((ids[index],))
            self.counters.twins_merged += len(twins)
            self.counters.published_blocks += len(ids) - len(twins)
            if self.events is not None:
                self.events.stored(group, request, first, canonical)
