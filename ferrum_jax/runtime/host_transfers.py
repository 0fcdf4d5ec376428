"""HostTransfers: copies blocks from the pools to host memory and back, while steps run.

An executable gathers blocks into buffers on their devices; a transfer takes each to its device's host memory while
steps go on. A load does the same in reverse. Only what uses a buffer waits for it: a load of a block that was just
spilled, and the scatter after a load. With several processes, each keeps what its own devices hold.
"""

from collections.abc import Sequence

import jax
import numpy as np

from ferrum_jax.core.plan import Copy
from ferrum_jax.models.sharding.shards import DATA
from ferrum_jax.runtime.block_copies import TIER_BATCHES, BlockCopies, batches
from ferrum_jax.runtime.distributed.processes import own_device
from ferrum_jax.runtime.pools.blocks import LayerBlocks
from ferrum_jax.runtime.pools.host_blocks import Buffers, blocks_of, buffer_shapes
from ferrum_jax.runtime.pools.host_memory import HostMemory, OwnBuffers, host_memory_kind
from ferrum_jax.runtime.pools.pools import Pools


class HostTransfers:
    """The host memory of each data shard and cache group, and the copies to and from it."""

    def __init__(self, copies: BlockCopies) -> None:
        """Raises ValueError if the devices have no host memory."""
        self._copies = copies
        num_shards = copies.mesh.shape[DATA]
        self._devices = copies.mesh.devices.reshape(num_shards, -1).tolist()
        self.kind = host_memory_kind(own_device(copies.mesh))
        wait = copies.transfers.wait
        self._memory = [[HostMemory(self.kind, wait) for _ in copies.of_blocks] for _ in range(num_shards)]
        self._nulls = [_zeros(buffer_shapes(copies.pool_shapes(group), copies.mesh)) for group in copies.of_blocks]

    def spill(self, pools: Pools, shard: int, spills: Sequence[Copy]) -> None:
        """Starts copies of a shard's blocks to host memory."""
        for group, memory in enumerate(self._memory[shard]):
            ids, host_ids = _ids_of(spills, group)
            for batch in batches(len(ids), TIER_BATCHES):
                spill = self._copies.get("spill", group, batch.size)
                blocks = spill(self._copies.pick(pools, group), self._places(shard, ids[batch.part], batch.size))
                kept = host_ids[batch.part]
                memory.put(kept, [self._own(shard, block) for block in blocks[: len(kept)]])

    def load(self, pools: Pools, shard: int, loads: Sequence[Copy]) -> Pools:
        """The pools with a shard's blocks from host memory; pools of groups that load are donated."""
        for group, memory in enumerate(self._memory[shard]):
            host_ids, ids = _ids_of(loads, group)
            for batch in batches(len(ids), TIER_BATCHES):
                blocks = [self._whole(group, block) for block in memory.on_devices(host_ids[batch.part])]
                blocks += [self._nulls[group]] * (batch.size - len(blocks))
                places = self._places(shard, ids[batch.part], batch.size)
                load = self._copies.get("load", group, batch.size)
                pools = self._copies.put(pools, group, load(self._copies.pick(pools, group), places, tuple(blocks)))
        return pools

    def read(self, shard: int, group: int, host_ids: Sequence[int]) -> tuple[LayerBlocks, ...]:
        """Blocks of a shard as NumPy arrays. Waits for them."""
        blocks = self._memory[shard][group].get(host_ids)
        return blocks_of(self._copies.pool_shapes(group), blocks, self._copies.head_copies[group])

    def close(self) -> None:
        """Frees the memory."""
        for memory in (memory for shard in self._memory for memory in shard):
            memory.clear()

    def _places(self, shard: int, ids: Sequence[int], size: int) -> np.ndarray:
        """[shards * size] int32: the ids of one data shard, padded with null ids, and null ids for all other shards."""
        places = np.zeros((len(self._devices), size), np.int32)
        places[shard, : len(ids)] = ids
        return places.reshape(-1)

    def _own(self, shard: int, block: Buffers) -> OwnBuffers:
        """The parts of each buffer on those of the shard's devices that this process has, in their order."""
        if self._copies.mesh.size == 1:
            return tuple((buffer,) for buffer in block)
        parts = [{part.device: part.data for part in buffer.addressable_shards} for buffer in block]
        return tuple(tuple(of[device] for device in self._devices[shard] if device in of) for of in parts)

    def _whole(self, group: int, block: OwnBuffers) -> Buffers:
        """The buffers of a block over all data shards, with zeros for shards other than the block's own."""
        if self._copies.mesh.size == 1:
            return tuple(part for (part,) in block)
        whole = []
        for null, own in zip(self._nulls[group], block, strict=True):
            parts = {part.device: part.data for part in null.addressable_shards} | {part.device: part for part in own}
            whole.append(jax.make_array_from_single_device_arrays(null.shape, null.sharding, list(parts.values())))
        return tuple(whole)


def _zeros(shapes: Sequence[jax.ShapeDtypeStruct]) -> Buffers:
    """Buffers of zeros, which are loaded into null ids."""
    return tuple(
        jax.make_array_from_callback(shape.shape, shape.sharding, np.zeros(shape.shape, shape.dtype).__getitem__)
        for shape in shapes
    )


def _ids_of(copies: Sequence[Copy], group: int) -> tuple[list[int], list[int]]:
    """Sources and targets of a group's copies."""
    own = [copy for copy in copies if copy.pool == group]
    return [copy.source for copy in own], [copy.target for copy in own]
