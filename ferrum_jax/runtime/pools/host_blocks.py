"""Blocks as flat buffers: what goes between the pools and the host tier.

On a device a block is one flat array of what its pools have of it in all layers of a cache group, bit for bit, and
where values are int8 one of scales, and one of indexers' keys where there are such. It is of the heads that this device
has, whichever other devices have them too. So no device sends another anything, a block comes and goes in a transfer of
each, and its memory is its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ferrum_jax.models.sharding import apart, formats, on_mesh, partitions, trace_update
from ferrum_jax.models.sharding.shards import TENSOR
from ferrum_jax.runtime.pools.blocks import LayerBlocks, outside
from pallas_kernels.kv_pool import KVPool

Buffers = tuple[jax.Array, ...]  # one block: of each kind of `_KINDS` that there is, flat
Pools = tuple[KVPool, ...]  # of the layers of a cache group
_KINDS = ("values", "scales", "index_keys")


def to_buffers(pools: Pools, ids: jax.Array) -> tuple[Buffers, ...]:
    """The buffers of each of the blocks `ids` [n] int32 of one device.

    Each by slices: a gather of them all that is stacked and taken apart takes XLA:CPU five times as long.
    """

    def block(id: jax.Array) -> Buffers:
        return tuple(
            jnp.concatenate([jax.lax.dynamic_index_in_dim(array, id, keepdims=False) for array in kind]).reshape(-1)
            for kind in _kinds(pools).values()
        )

    return tuple(block(ids[i]) for i in range(len(ids)))


def from_buffers(pools: Pools, ids: jax.Array, blocks: tuple[Buffers, ...]) -> Pools:
    """The pools of one device, to be donated, with blocks at `ids` [n] int32."""
    kinds = _kinds(pools)
    for i, block in enumerate(blocks):
        for (name, arrays), buffer in zip(kinds.items(), block, strict=True):
            parts = buffer.reshape(len(arrays), *arrays[0].shape[1:])
            kinds[name] = tuple(
                jax.lax.dynamic_update_index_in_dim(array, parts[j], ids[i], 0) for j, array in enumerate(arrays)
            )
    return _with_kinds(pools, kinds)


def _kinds(pools: Pools) -> dict[str, tuple[Any, ...]]:
    """The arrays of each kind that there is, of the layers that have it; all layers have values."""
    found = {name: tuple(getattr(pool, name) for pool in pools) for name in _KINDS}
    there = {name: tuple(array for array in arrays if array is not None) for name, arrays in found.items()}
    return {name: arrays for name, arrays in there.items() if arrays}


def _with_kinds(pools: Pools, kinds: Mapping[str, Sequence[Any]]) -> Pools:
    """The pools with other arrays, as `_kinds` gives them."""
    left = {name: iter(arrays) for name, arrays in kinds.items()}
    return tuple(
        dataclasses.replace(
            pool, **{name: next(arrays) for name, arrays in left.items() if getattr(pool, name) is not None}
        )
        for pool in pools
    )


def trace_to_buffers(pools: Pools, count: int, mesh: Mesh) -> jax.stages.Traced:
    """`to_buffers` on a mesh, ready to be lowered: every data shard has `count` ids of its own."""
    arguments, buffers = _arguments(pools, count, mesh)
    function = to_buffers
    if mesh.size > 1:
        function = jax.shard_map(
            function, mesh=mesh, in_specs=partitions(arguments), out_specs=partitions(buffers), check_vma=False
        )
    return jax.jit(function, out_shardings=formats(buffers)).trace(*arguments)


def trace_from_buffers(pools: Pools, count: int, mesh: Mesh) -> jax.stages.Traced:
    """`from_buffers` on a mesh, ready to be lowered: ids that a data shard has no block for are its null one."""
    before, buffers = _arguments(pools, count, mesh)
    return trace_update(from_buffers, (*before, buffers), mesh, placed=formats(pools))


def _arguments(pools: Pools, count: int, mesh: Mesh) -> tuple[tuple[Any, Any], Any]:
    """The shapes of (pools, ids), and of the buffers of `count` blocks."""
    return (pools, on_mesh(mesh, (count,), jnp.int32, "words")), (buffer_shapes(pools, mesh),) * count


def buffer_shapes(pools: Pools, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of one block's buffers on a mesh, those of every device one after the other."""
    return tuple(
        apart(mesh, sum(array.size // array.shape[0] for array in kind) // mesh.shape[TENSOR], kind[0].dtype)
        for kind in _kinds(pools).values()
    )


def host_block_bytes(pools: Sequence[Any]) -> int:
    """Bytes of one block of such pools, on all devices of a data shard."""
    return sum(array.size // array.shape[0] * array.dtype.itemsize for array in jax.tree.leaves(pools))


def blocks_of(pools: Pools, blocks: Sequence[Sequence[Sequence[Any]]], head_copies: int) -> tuple[LayerBlocks, ...]:
    """NumPy arrays of blocks; every buffer is given as those of the devices of "tp", in their order.

    pools: the shapes on the whole mesh. head_copies: how often they repeat each KV head.
    """
    joined: dict[str, Any] = {
        name: np.stack([_joined(block[kind], arrays[0].shape[1:], len(arrays)) for block in blocks], axis=1)
        for kind, (name, arrays) in enumerate(_kinds(pools).items())
    }  # [layers that have it, n, ...]; the bits are those of floats where the pool keeps integers
    joined["values"] = joined["values"].view(pools[0].dtype)
    if "index_keys" in joined:
        joined["index_keys"] = joined["index_keys"].view(pools[0].index_dtype)
    return tuple(
        outside(pool, found.values, found.scales, found.index_keys, head_copies)
        for pool, found in zip(pools, _with_kinds(pools, joined), strict=True)
    )


def _joined(parts: Sequence[Any], shape: tuple[int, ...], num_layers: int) -> np.ndarray:
    """Joins several devices' parts of a block, [layers, *shape]: heads are the axis before the last."""
    *outer, heads, last = shape
    each = [np.asarray(part).reshape(num_layers, *outer, heads // len(parts), last) for part in parts]
    return np.concatenate(each, axis=-2)
