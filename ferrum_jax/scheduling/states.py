"""StateSlots: the recurrent state of each running row, and snapshots of states from which others resume.

A state stands for all tokens before a position and cannot be rewound, so a prefix is resumed only where a snapshot was
taken: at block boundaries where a prefill chunk ends, and where a prompt ends. Rows and snapshots are ids of one
pool. A row's state is its own alone; a snapshot is a copy, published under the key of the tokens that it stands for
and held by nobody, so the least recently used one goes when a slot is needed. Layers reset the state of a row
that begins at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ferrum_jax.plan import Copy
from ferrum_jax.scheduling.id_pool import IdPool
from ferrum_jax.scheduling.transfers import Transfers


class StateSlots:
    """The slots of one data shard."""

    def __init__(self, *, max_num_seqs: int, max_snapshots: int, copy_pool: int, slot_bytes: int) -> None:
        """max_snapshots: slots beside those of rows; while fewer rows run, more snapshots are kept.

        copy_pool: index of these slots in `Copy`. slot_bytes: of a state in all layers.
        """
        self.pool = IdPool(1 + max_num_seqs + max_snapshots)
        self.slot_bytes = slot_bytes
        self._keeps = max_snapshots > 0
        self._copy_pool = copy_pool
        self._of_row = np.zeros(max_num_seqs + 1, np.int32)

    def fits(self, snapshot: int) -> bool:
        """Whether a row can get a slot, once the snapshot that it resumes from (0 for none) is retained."""
        return self.pool.num_free - self.pool.num_cached_among([snapshot] if snapshot else []) > 0

    def enter(self, slot: int, snapshot: int, transfers: Transfers) -> None:
        """Give a row a state of its own, which the next plan fills from the snapshot; 0 for none."""
        assert self._of_row[slot] == 0, f"slot {slot} has a state already"
        if snapshot:
            self.pool.retain(snapshot)
            transfers.held.append((self.pool, snapshot))
        (id,) = self.pool.take(1)
        self._of_row[slot] = id
        if snapshot:
            transfers.copies_before.append(Copy(pool=self._copy_pool, source=snapshot, target=id))

    def leave(self, slot: int) -> None:
        """Give back the state of a row that ends."""
        self.pool.release((int(self._of_row[slot]),))
        self._of_row[slot] = 0

    def keep(self, slot: int, key: bytes, transfers: Transfers) -> None:
        """Order a snapshot of the row's state after the next plan, unless there is one or no slot is free."""
        if not self._keeps or self.pool.find(key):
            return
        for id in self.pool.acquire(1) or ():
            self.pool.publish(id, key)
            transfers.held.append((self.pool, id))
            transfers.copies_after.append(Copy(pool=self._copy_pool, source=int(self._of_row[slot]), target=id))

    def longest(self, keys: Sequence[bytes]) -> int:
        """The most leading blocks at whose end there is a snapshot; keys: of the blocks."""
        return next((end for end in range(len(keys), 0, -1) if self.pool.find(keys[end - 1])), 0)

    def of_rows(self, slots: np.ndarray) -> np.ndarray:
        """[rows] int32: the state slots of row slots [rows]."""
        return self._of_row[slots]

    def holders(self) -> list[int]:
        """The ids that rows hold."""
        return self._of_row[self._of_row != 0].tolist()
