"""HostMemory: the blocks that the host tier keeps, by host id, in memory which devices copy to by themselves.

A block is kept as its buffers came (`host_blocks.py`), each in the host memory of the device that has it, and is
freed when another takes its id. Copies are asynchronous, and whoever uses a buffer waits for it. Until a copy is
done its source takes device memory, so no more than a few batches are on their way at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

MAX_ARRIVING = 4  # batches
_KINDS = ("pinned_host", "unpinned_host")  # the better one first

OwnBuffers = tuple[tuple[jax.Array, ...], ...]  # one block: of each buffer the parts on this process's devices


def host_memory_kind(device: Any) -> str:
    """jax's name for the host memory of a device: pinned, which it reaches by itself, where there is such.

    Raises ValueError if there is neither.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    found = next((kind for kind in _KINDS if kind in kinds), None)
    if found is None:
        raise ValueError(
            f"host_cache_bytes wants memory of the host, and {device} has {', '.join(kinds)} alone; set it to 0"
        )
    return found


class HostMemory:
    """Blocks of one data shard and cache group by host id."""

    def __init__(self, kind: str, wait: Callable[[list[jax.Array]], Any] = jax.block_until_ready) -> None:
        """kind: of memory, as `host_memory_kind` says. wait: for copies. Memory is taken as blocks come."""
        self.kind, self._wait = kind, wait
        self._blocks: dict[int, OwnBuffers] = {}
        self._arriving: deque[list[jax.Array]] = deque()

    def put(self, host_ids: Sequence[int], blocks: Sequence[OwnBuffers]) -> None:
        """Starts the copies of a batch of blocks, which may still be computed, from their devices."""
        buffers, tree = jax.tree.flatten(list(blocks))
        kept = _moved(buffers, self.kind)
        self._blocks.update(zip(host_ids, jax.tree.unflatten(tree, kept), strict=True))
        self._arriving.append(kept)
        if len(self._arriving) > MAX_ARRIVING:
            self._wait(self._arriving.popleft())

    def get(self, host_ids: Sequence[int]) -> list[OwnBuffers]:
        """The buffers of blocks, which may still be on their way."""
        return [self._blocks[id] for id in host_ids]

    def on_devices(self, host_ids: Sequence[int]) -> list[OwnBuffers]:
        """Copies of them in the memory of their devices, on their way there."""
        buffers, tree = jax.tree.flatten(self.get(host_ids))
        return jax.tree.unflatten(tree, _moved(buffers, None))

    def clear(self) -> None:
        """Frees all of them."""
        self._blocks.clear()
        self._arriving.clear()


def _moved(buffers: Sequence[jax.Array], kind: str | None) -> list[jax.Array]:
    """Copies in a memory of this kind of the same devices; None is their own."""
    return jax.device_put(list(buffers), [SingleDeviceSharding(b.device, memory_kind=kind) for b in buffers])
