"""CachedPrompts: whole prompts whose repeat computes nothing.

An entry is a slot that keeps the hidden state of the prompt's last token, from which the first new token is
sampled, and in every cache group a copy of the block in which the prompt ends, where that is not full. Slot
and copies carry the whole prompt's key in their pools; nobody holds them, so each pool evicts them as it
does everything else, and a repeat needs all of them, with the full blocks before. Copies without a slot still
save all tokens but the last.
"""

from collections.abc import Sequence

from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.transfers import Transfers
from ferrum_jax.core.plan import Copy
from ferrum_jax.core.request import Request
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes


class CachedPrompts:
    """The entries over the block pools of all cache groups and one pool of slots."""

    def __init__(self, pools: Sequence[IdPool], sizes: EngineSizes) -> None:
        self._pools = tuple(pools)
        self._block_size = sizes.block_size
        self._min_tokens = sizes.min_cached_prompt_tokens
        self._keeps_tails = sizes.max_snapshots is None  # a recurrent state at the end of a tail is in no block
        self.slots = IdPool(sizes.max_cached_prompts + 1) if sizes.max_cached_prompts else None

    def keeps(self, request: Request) -> bool:
        """Whether an entry is made of the request's prompt, or looked for."""
        return request.most_hit_tokens is None and (self._keeps_state(request) or self._keeps_tail(request))

    def _keeps_state(self, request: Request) -> bool:
        return self.slots is not None and len(request.token_ids) >= self._min_tokens

    def _keeps_tail(self, request: Request) -> bool:
        """A copy of the tail alone is for the other choices of the request, and saves all tokens of it but one."""
        return self._keeps_tails and request.num_choices > 1 and len(request.token_ids) % self._block_size > 1

    def find(self, key: bytes) -> int:
        """The slot of the state of a whole prompt's key, or 0."""
        return self.slots.find(key) if self.slots is not None else 0

    def would_store(self, request: Request, key: bytes) -> bool:
        """Whether `store` has something to do and, as things are, room for it."""
        tails = self._missing_tails(request, key)
        state = self._keeps_state(request) and self.slots is not None and not self.slots.find(key)
        return bool(tails or state) and all(self._pools[group].num_free for group in tails)

    def _missing_tails(self, request: Request, key: bytes) -> list[int]:
        """The groups that lack a copy of the block in which the prompt ends."""
        if len(request.token_ids) % self._block_size == 0:
            return []
        return [group for group, pool in enumerate(self._pools) if not pool.find(key)]

    def store(self, request: Request, key: bytes, tails: Sequence[int], transfers: Transfers) -> None:
        """Order what an entry lacks, of a row whose prompt ends in the next plan; nothing where a pool is full.

        tails: per group the row's block in which the prompt ends.
        """
        if not self.would_store(request, key):
            return
        for group in self._missing_tails(request, key):
            (id,) = self._pools[group].take(1)
            self._publish(self._pools[group], id, key, transfers)
            transfers.copies_after.append(Copy(pool=group, source=tails[group], target=id))
        if self.slots is not None and self._keeps_state(request) and not self.slots.find(key):
            for id in self.slots.acquire(1) or ():
                self._publish(self.slots, id, key, transfers)
                transfers.targets[request.slot] = id

    def _publish(self, pool: IdPool, id: int, key: bytes, transfers: Transfers) -> None:
        pool.publish(id, key)
        transfers.held.append((pool, id))
