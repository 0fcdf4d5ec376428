"""HostMemory: the arrays behind the host tier, and the copies that are on their way into them.

One NumPy array per layer and kind, indexed by host id, in the form of `cache/blocks.py`. Blocks arrive as device
arrays whose copy to the host has begun; they are put in their places when one of them is read or when more
than a few batches wait, in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ferrum_jax.cache.blocks import LayerBlocks

MOST_ARRIVING = 4  # batches


class HostMemory:
    """Blocks of all layers of one cache group by host id; id 0 is null."""

    def __init__(self, shapes: tuple[LayerBlocks, ...], num_blocks: int) -> None:
        """shapes: of any number of blocks. num_blocks: with the null one. Memory is taken as it is written."""
        leaves, self._tree = jax.tree.flatten(shapes)
        self._arrays = [np.zeros((num_blocks, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        self._arriving: deque[tuple[list[int], Any]] = deque()

    def put(self, host_ids: Sequence[int], blocks: tuple[LayerBlocks, ...]) -> None:
        """Keep the first len(host_ids) of `blocks`, which may still be on their way from the device."""
        self._arriving.append((list(host_ids), blocks))
        while len(self._arriving) > MOST_ARRIVING:
            self._settle_one()

    def get(self, host_ids: Sequence[int], count: int) -> tuple[LayerBlocks, ...]:
        """Fresh arrays of `count` blocks, the first of them those of `host_ids`; waits for those to arrive."""
        wanted = set(host_ids)
        while any(not wanted.isdisjoint(arriving) for arriving, _ in self._arriving):
            self._settle_one()
        ids = np.zeros(count, np.int64)
        ids[: len(host_ids)] = host_ids
        return jax.tree.unflatten(self._tree, [array[ids] for array in self._arrays])

    def _settle_one(self) -> None:
        host_ids, blocks = self._arriving.popleft()
        for array, leaf in zip(self._arrays, jax.tree.leaves(blocks), strict=True):
            array[host_ids] = np.asarray(leaf)[: len(host_ids)]
