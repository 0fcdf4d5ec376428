"""StateSlots: the recurrent state of each running row, and snapshots of states from which others resume.

A state stands for all tokens before a position and cannot be rewound, so a prefix is resumed only where a snapshot was
taken: at block boundaries where a prefill chunk ends, where a prompt ends, and in an answer. Rows and snapshots are
ids of one pool. A row's state is its own alone; a snapshot is a copy, published under the key of the tokens that it
stands for. That of a prompt is held by nobody, so the least recently used one goes when a slot is needed.

A decoding row that is *followed* holds a snapshot at the last block boundary that it passed: a copy for each block of
tokens, in the place of the one before it. When the row ends, it stays as all others do. At most half as many rows
are followed as there are snapshots, the first that pass a boundary. Layers reset the state of a row that begins at 0.

A row that computes drafted tokens holds a copy of its state of before the step. Where a draft does not come true, it
goes on with that one and computes again what it knows by then.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.transfers import Transfers
from ferrum_jax.core.plan import Copy


class StateSlots:
    """The slots of one data shard."""

    def __init__(self, *, max_num_seqs: int, max_snapshots: int, copy_pool: int, slot_bytes: int) -> None:
        """max_snapshots: slots beside those of rows; while fewer rows run, more snapshots are kept.

        copy_pool: index of these slots in `Copy`. slot_bytes: of a state in all layers.
        """
        self.pool = IdPool(1 + max_num_seqs + max_snapshots)
        self.slot_bytes = slot_bytes
        self.max_snapshots = max_snapshots
        self._copy_pool = copy_pool
        self._of_row = np.zeros(max_num_seqs + 1, np.int32)
        self._num_open = max_num_seqs  # rows that may still come; each needs a slot
        self._left_alone: set[int] = set()  # row slots without a snapshot
        self._followed: dict[int, int] = {}  # row slot -> its snapshot, 0 until the first one is published
        self._before: dict[int, int] = {}  # row slot -> its state of before the step in flight, which has drafts
        self._ordered: dict[int, tuple[int, int]] = {}  # row slot -> its next snapshot and the tokens before that

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
        self._num_open -= 1
        if snapshot:
            transfers.copies_before.append(Copy(pool=self._copy_pool, source=snapshot, target=id))

    def leave(self, slot: int) -> None:
        """Give back the state of a row that ends; the snapshot in its answer is cached from now on."""
        ordered, _ = self._ordered.pop(slot, (0, 0))
        snapshot, before = self._followed.pop(slot, 0), self._before.pop(slot, 0)
        self.pool.release([id for id in (int(self._of_row[slot]), ordered, snapshot, before) if id])
        self._of_row[slot] = 0
        self._left_alone.discard(slot)
        self._num_open += 1

    @property
    def can_branch(self) -> bool:
        """Whether a slot is free beside those of rows that may still come."""
        return self.pool.num_free > self._num_open

    def branch(self, slot: int, transfers: Transfers) -> bool:
        """Order a copy of the row's state of before the next plan, which has drafts; False where no slot is free."""
        if not self.can_branch:
            return False
        (id,) = self.pool.take(1)
        self._before[slot] = id
        transfers.copies_before.append(Copy(pool=self._copy_pool, source=int(self._of_row[slot]), target=id))
        return True

    def settle(self, slot: int, *, are_whole: bool) -> bool:
        """Keep the row's state if all drafts came true, else that of before them; whether they did."""
        given_back = self._before.pop(slot)
        if not are_whole:
            self._of_row[slot], given_back = given_back, int(self._of_row[slot])
            ordered, _ = self._ordered.pop(slot, (0, 0))
            self.pool.release([id for id in (ordered,) if id])
        self.pool.release((given_back,))
        return are_whole

    def leave_alone(self) -> None:
        """Keep no snapshot of the rows that run now."""
        self._left_alone.update(np.flatnonzero(self._of_row).tolist())

    def keep(self, slot: int, key: bytes, transfers: Transfers) -> None:
        """Order a snapshot of the row's state after the next plan, unless there is one or no slot is free."""
        if not self.max_snapshots or self.pool.find(key):
            return
        for id in self.pool.acquire(1) or ():
            self.pool.publish(id, key)
            transfers.held.append((self.pool, id))
            transfers.copies_after.append(Copy(pool=self._copy_pool, source=int(self._of_row[slot]), target=id))

    def follow(self, slot: int, num_tokens: int, transfers: Transfers) -> None:
        """Order a snapshot of a decoding row's state at a block boundary, if the row is followed or may be.

        Its key is known when the step is committed, so the row holds it without one until then.
        """
        if slot in self._left_alone:
            return
        if slot not in self._followed:
            if len(self._followed) >= self.max_snapshots // 2:
                return
            self._followed[slot] = 0
        if slot in self._ordered or self.pool.num_free <= self._num_open:
            return
        (id,) = self.pool.take(1)
        self._ordered[slot] = id, num_tokens
        transfers.copies_after.append(Copy(pool=self._copy_pool, source=int(self._of_row[slot]), target=id))

    def publish(self, slot: int, num_tokens: int, key_of: Callable[[int], bytes]) -> None:
        """Publish the snapshot that a followed row ordered within its first `num_tokens`, in the place of its last one.

        key_of: the key of the row's first tokens, by their number.
        """
        id, position = self._ordered.get(slot, (0, 0))
        if not id or position > num_tokens:
            return
        del self._ordered[slot]
        found = self.pool.publish(id, key_of(position))
        if found != id:  # another row has been there, and its snapshot is not this row's to replace
            self.pool.retain(found)
            self.pool.release((id, found))
        before, self._followed[slot] = self._followed[slot], id if found == id else 0
        if before:
            if self.pool.num_holders(before) == 1 and self.pool.key_of(before) is not None:
                self.pool.withdraw(before)
            self.pool.release((before,))

    def longest(self, keys: Sequence[bytes]) -> int:
        """The most leading blocks at whose end there is a snapshot; keys: of the blocks."""
        return next((end for end in range(len(keys), 0, -1) if self.pool.find(keys[end - 1])), 0)

    def of_rows(self, slots: np.ndarray) -> np.ndarray:
        """[rows] int32: the state slots of row slots [rows]."""
        return self._of_row[slots]

    def holders(self) -> list[int]:
        """The ids that rows hold, each as often as they do. Asserts that only rows with a state are followed."""
        rows = np.flatnonzero(self._of_row)
        assert len(rows) + self._num_open == len(self._of_row) - 1, "rows with a state are miscounted"
        assert self._ordered.keys() <= self._followed.keys() <= set(rows.tolist()), "a row that left is followed"
        assert len(self._followed) <= self.max_snapshots // 2, "too many rows are followed"
        assert self._before.keys() <= set(rows.tolist()), "a row that left holds a state of before its drafts"
        snapshots = [*self._followed.values(), *self._before.values(), *(id for id, _ in self._ordered.values())]
        return [*self._of_row[rows].tolist(), *(id for id in snapshots if id)]
