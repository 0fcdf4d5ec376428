"""The runner: owns weights and pools on the device, turns a StepPlan into one call of an executable.

All data shards of a step run in one bucket, the smallest that holds the part of each; one without rows runs padding.
A step is dispatched and its result fetched later; pools are threaded from call to call, so the order of
dispatch is the only synchronisation. One runner serves one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ferrum_jax.cache.pools import Pools
from ferrum_jax.plan import Copy, StepPlan
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.buckets import Bucket, Ladder
from ferrum_jax.runtime.compile import Executables
from ferrum_jax.runtime.host_transfers import HostTransfers
from ferrum_jax.runtime.inputs import blob_size, pack, pack_copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
    """A step that was dispatched and not yet fetched."""

    plan: StepPlan
    bucket: Bucket
    _rows: jax.Array
    _prompt: jax.Array
    _last: jax.Array

    def rows(self) -> np.ndarray:
        """[rows, words] int32 as `sampling.unpack` reads it, of all shards. Waits for the device."""
        return _without_padding(self._rows, [shard.num_rows for shard in self.plan.shards])

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it."""
        rows: Any = self._rows
        return rows.is_ready()

    def prompt(self) -> np.ndarray:
        """[tokens, words] int32, the same words for each prompt token asked for. Waits for the device."""
        return _without_padding(self._prompt, [shard.num_tokens for shard in self.plan.shards])

    def last_states(self) -> np.ndarray:
        """[rows, D] float32, the final hidden state of each row's last token. Waits for the device."""
        return _without_padding(self._last, [shard.num_rows for shard in self.plan.shards]).astype(np.float32)


def _without_padding(array: jax.Array, counts: Sequence[int]) -> np.ndarray:
    """Of each shard's part of an array the first items, as many as count. Waits for the device."""
    parts = np.split(np.asarray(array), len(counts))
    return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])


class Runner:
    """Runs steps on the devices of a mesh."""

    def __init__(
        self,
        *,
        weights: tuple[jax.Array, ...],
        pools: Pools,
        executables: Executables,
        ladder: Ladder,
        copies: BlockCopies,
        num_shards: int = 1,
        host: HostTransfers | None = None,
    ) -> None:
        """host: where a host tier is kept."""
        self._weights = weights
        self._kv = pools.flat_kv()
        self._kv_tree = jax.tree.structure(pools.kv)
        self.copies = copies
        self.host = host
        self._num_shards = num_shards
        self._slots = pools.slots
        self._prompts = pools.prompts
        self._executables = executables
        self._ladder = ladder
        self.num_steps = 0
        self.num_tokens = 0
        self.num_padded_tokens = 0

    @property
    def num_executables(self) -> int:
        return len(self._executables)

    @property
    def num_loaded(self) -> int:
        """Executables that are in memory; the others lie in bytes and were not needed yet."""
        return self._executables.num_loaded

    def close(self) -> None:
        """Frees the pools, those too that a step broken off has donated and not returned."""
        for pool in (*self._kv, self._slots, self._prompts):
            pool.delete()
        if self.host is not None:
            self.host.close()

    def write_slot(self, shard: int, slot: int, record: np.ndarray) -> None:
        """Puts the sampling record of a request that is about to run into its row slot."""
        places = np.full(self._num_shards, self._slots.shape[0], np.int32)  # beyond the pools of other shards
        places[shard] = slot
        self._slots = self._executables.write_slot(self._slots, places, record)

    def _pools(self) -> Pools:
        return Pools(kv=jax.tree.unflatten(self._kv_tree, self._kv), slots=self._slots, prompts=self._prompts)

    def read_pool(self, shard: int, index: int, ids: Sequence[int]) -> Iterator[tuple[slice, Any]]:
        """(which of the ids, what they stand for, then padding) in batches, on their way to the host.

        index: as in `BlockCopies`, which says in which form.
        """
        return self.copies.read(self._pools(), shard, index, ids)

    def write_pool(self, shard: int, index: int, ids: Sequence[int], data: Callable[[slice, int], Any]) -> None:
        """Puts what `ids` stand for into a pool; data(which of the ids, size) gives each batch."""
        pools = self.copies.write(self._pools(), shard, index, ids, data)
        self._kv, self._prompts = pools.flat_kv(), pools.prompts

    def move(self, shard: int, spills: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Starts copies of a shard's blocks to its host tier, and then of host blocks to its pools."""
        if self.host is not None:
            self.host.spill(self._pools(), shard, spills)
            self._kv = self.host.load(self._pools(), shard, loads).flat_kv()

    def _copy(self, copies: Sequence[Sequence[Copy]]) -> None:
        """Of each shard."""
        for blob in pack_copies(copies):
            self._kv = self._executables.copy_blocks(self._kv, blob)

    def rehearse(self, num_groups: int) -> None:
        """Runs the largest steps without a row, so that a shortage of memory shows now. Writes go to null ids."""
        for bucket in self._ladder.largest:
            blob = np.zeros(self._num_shards * blob_size(bucket, num_groups), np.int32)
            self._kv, self._slots, self._prompts, *results = self._executables.steps[bucket](
                self._weights, self._kv, self._slots, self._prompts, blob
            )
            jax.block_until_ready(results)

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts a step and the copy of its result to the host; returns at once."""
        shards = plan.shards
        bucket = self._ladder.bucket_of(plan)
        execute = self._executables.steps[bucket]
        for index, shard in enumerate(shards):
            if shard.spills or shard.loads:
                self.move(index, shard.spills, shard.loads)
        self._copy([shard.copies_before for shard in shards])
        self._kv, self._slots, self._prompts, rows, prompt, last = execute(
            self._weights, self._kv, self._slots, self._prompts, pack(shards, bucket)
        )
        self._copy([shard.copies_after for shard in shards])
        rows.copy_to_host_async()
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.num_padded_tokens += bucket.num_tokens * len(shards)
        return InFlight(plan=plan, bucket=bucket, _rows=rows, _prompt=prompt, _last=last)
