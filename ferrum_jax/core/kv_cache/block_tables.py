"""BlockTables: which blocks each running row holds, in every cache group.

Per group a persistent table [row slots, blocks] int32, padded with the null id 0; it is the truth about ownership:
each entry is one holder of its id. In a group with a sliding window a row has blocks only up to where its next
step ends, and those that the window has left behind are given back and null:

    behind        published      being filled     padding
    0  0  0  0  | 17  4  9  12 | 23  31         | 0  0  0
"""

from collections.abc import Sequence

import numpy as np

from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.io.ints import ceil_div, first_needed


class BlockTables:
    """The tables over the pools of all cache groups."""

    def __init__(self, pools: Sequence[IdPool], sizes: EngineSizes) -> None:
        self._pools = tuple(pools)
        self._windows = tuple(sizes.windows)
        self._block_size = sizes.block_size
        self.has_windows = any(self._windows)
        num_slots = sizes.max_num_seqs + 1
        width = ceil_div(sizes.max_model_len, sizes.block_size)
        self._all = np.zeros((len(self._pools), num_slots, width), np.int32)
        self.tables = tuple(self._all)
        self.num_blocks = np.zeros((len(self._pools), num_slots), np.int32)  # by group and row slot
        self.num_published = np.zeros(num_slots, np.int32)  # leading full ones that are not written again
        self.num_behind = np.zeros((len(self._pools), num_slots), np.int32)  # by group

    def fill(self, slot: int, blocks: Sequence[Sequence[int]], totals: Sequence[int]) -> None:
        """Give an empty row `blocks`, which the caller holds, and new ones behind them up to `totals`.

        blocks: per group, equally many, published; null where they are behind the window. totals: per group.
        """
        given = len(blocks[0])
        for group, (pool, table, ids, total) in enumerate(zip(self._pools, self.tables, blocks, totals, strict=True)):
            assert not self.num_blocks[group, slot], f"slot {slot} is filled twice"
            table[slot, :total] = [*ids, *pool.take(total - given)]
            self.num_blocks[group, slot] = total
            self.num_behind[group, slot] = ids.count(0)
        self.num_published[slot] = given

    def grow(self, slot: int, total: int) -> bool:
        """Give a row new blocks until each group has `total`; False, and nothing changed, when a pool lacks them."""
        have = self.num_blocks[:, slot].tolist()
        for pool, count in zip(self._pools, have, strict=True):
            if total - count > pool.num_free:
                return False
        for group, (pool, table, count) in enumerate(zip(self._pools, self.tables, have, strict=True)):
            if total > count:
                table[slot, count:total] = pool.take(total - count)
                self.num_blocks[group, slot] = total
        return True

    def clear(self, slots: Sequence[int]) -> None:
        """Give back all blocks of rows that end, each deepest first, so that shared heads outlive tails."""
        rows = np.array(slots)
        width = int(self.num_blocks[:, rows].max())
        for pool, table in zip(self._pools, self.tables, strict=True):
            ids = table[rows, :width][:, ::-1]
            pool.release(ids[ids != 0].tolist())
        self._all[:, rows, :width] = 0
        self.num_blocks[:, rows] = 0
        self.num_published[rows] = 0
        self.num_behind[:, rows] = 0

    def leave_behind(self, slot: int) -> int:
        """Give back the published blocks to which no token after them attends; how many.

        The oldest first, for they are needed by the shortest prefixes alone.
        """
        count = 0
        for group, (window, pool, table) in enumerate(zip(self._windows, self._pools, self.tables, strict=True)):
            first = int(self.num_behind[group, slot])
            end = first_needed(window, int(self.num_published[slot]) * self._block_size, self._block_size)
            if end > first:
                pool.release(table[slot, first:end].tolist())
                table[slot, first:end] = 0
                self.num_behind[group, slot] = end
                count += end - first
        return count

    def gather(self, slots: np.ndarray) -> tuple[np.ndarray, ...]:
        """Per group a copy [rows, widest row's blocks] int32 of the rows' tables."""
        width = int(self.num_blocks[:, slots].max(initial=0))
        return tuple(self._all[:, slots, :width])

    def holders(self) -> list[list[int]]:
        """Per group the ids in its table, each as often as it is there. Asserts that they are where they should be."""
        columns = np.arange(self._all.shape[2])
        used = (columns < self.num_blocks[..., None]) & (columns >= self.num_behind[..., None])
        assert ((self._all != 0) == used).all(), "a table holds ids beyond or behind its blocks, or null within them"
        assert (self.num_behind <= self.num_published).all(), "a row left an unpublished block behind"
        assert (self.num_published <= self.num_blocks).all(), "a row published more blocks than it has"
        return [table[of_group].tolist() for table, of_group in zip(self.tables, used, strict=True)]
