"""BlockCopies: the executables that bring blocks of the pools to the host and back.

Made when first needed or by `warm_up`, kept in the store like those of steps. A call copies a batch of ids,
of one cache group; batches have few sizes, so that few blocks cost little and many take few calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.cache.blocks import LayerBlocks, block_shapes, gather_blocks, scatter_blocks
from ferrum_jax.runtime.layout import Layout
from ferrum_jax.runtime.store import ExecutableStore
from ferrum_jax.sharding import formats, whole
from pallas_kernels.kv_pool import KVPool

BATCHES = (4, 32)  # ids of a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """A part of a list of ids, and the size of the call that copies it."""

    part: slice
    size: int


def batches(count: int) -> Iterator[_Batch]:
    """How `count` ids are copied: in large calls, unless more than half of one would be padding."""
    small, large = BATCHES
    start = 0
    while start < count:
        size = large if 2 * (count - start) > large else small
        end = min(start + size, count)
        yield _Batch(part=slice(start, end), size=size)
        start = end


class BlockCopies:
    """Copies between the pools of one layout and the host. Of pools, all methods take and return all layers."""

    def __init__(self, layout: Layout, store: ExecutableStore | None) -> None:
        self._pools = layout.pools.kv
        self._groups = [group.layers for group in layout.options.spec.kv_groups]
        self._mesh = layout.mesh
        self._head_copies = layout.model.head_copies
        self._store = store
        self._made: dict[tuple[str, int, int], Callable[..., Any]] = {}

    def shapes(self, group: int) -> tuple[LayerBlocks, ...]:
        """The form of one block of a group's layers."""
        return block_shapes(self._of_group(self._pools, group), head_copies=self._head_copies, count=1)

    def warm_up(self) -> None:
        """Make every executable now."""
        for group in range(len(self._groups)):
            for size in BATCHES:
                self._gather(group, size)
                self._scatter(group, size)

    def read(
        self, pools: tuple[KVPool, ...], group: int, ids: Sequence[int]
    ) -> Iterator[tuple[slice, tuple[LayerBlocks, ...]]]:
        """(which of the ids, their blocks) in batches, on their way to the host; what follows the ids is padding."""
        layers = self._of_group(pools, group)
        for batch in batches(len(ids)):
            blocks = self._gather(group, batch.size)(layers, _padded(ids[batch.part], batch.size))
            for array in jax.tree.leaves(blocks):
                array.copy_to_host_async()
            yield batch.part, blocks

    def write(
        self,
        pools: tuple[KVPool, ...],
        group: int,
        ids: Sequence[int],
        blocks: Callable[[slice, int], tuple[LayerBlocks, ...]],
    ) -> tuple[KVPool, ...]:
        """The pools, which are donated, with blocks at `ids`. blocks(which of the ids, size) gives each batch."""
        for batch in batches(len(ids)):
            layers = self._of_group(pools, group)
            data = blocks(batch.part, batch.size)
            layers = self._scatter(group, batch.size)(layers, _padded(ids[batch.part], batch.size), data)
            changed = dict(zip(self._groups[group], layers, strict=True))
            pools = tuple(changed.get(layer, pool) for layer, pool in enumerate(pools))
        return pools

    def _of_group(self, pools: tuple[KVPool, ...], group: int) -> tuple[KVPool, ...]:
        return tuple(pools[layer] for layer in self._groups[group])

    def _gather(self, group: int, size: int) -> Callable[..., Any]:
        def gather(pools: tuple[KVPool, ...], ids: jax.Array) -> tuple[LayerBlocks, ...]:
            return gather_blocks(pools, ids, head_copies=self._head_copies)

        jitted = jax.jit(gather, out_shardings=whole(self._mesh))
        return self._get("gather", group, size, lambda pools, ids, _: jitted.lower(pools, ids).compile())

    def _scatter(self, group: int, size: int) -> Callable[..., Any]:
        def scatter(pools: tuple[KVPool, ...], ids: jax.Array, blocks: tuple[LayerBlocks, ...]) -> tuple[KVPool, ...]:
            return scatter_blocks(pools, ids, blocks, head_copies=self._head_copies)

        jitted = jax.jit(scatter, donate_argnums=(0,), out_shardings=formats(self._of_group(self._pools, group)))
        return self._get("scatter", group, size, lambda *arguments: jitted.lower(*arguments).compile())

    def _get(self, kind: str, group: int, size: int, compile: Callable[..., Any]) -> Callable[..., Any]:
        made = self._made.get((kind, group, size))
        if made is None:
            pools, ids = self._of_group(self._pools, group), jax.ShapeDtypeStruct((size,), jnp.int32)
            blocks = block_shapes(pools, head_copies=self._head_copies, count=size)
            if self._store is None:
                made = compile(pools, ids, blocks)
            else:
                text = f"{kind} {group} {pools} {ids} {self._head_copies}"
                made = self._store.get(text, lambda: compile(pools, ids, blocks))
            self._made[kind, group, size] = made
        return made


def _padded(ids: Sequence[int], size: int) -> np.ndarray:
    """[size] int32: the ids, then null."""
    padded = np.zeros(size, np.int32)
    padded[: len(ids)] = ids
    return padded
