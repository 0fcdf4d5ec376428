"""Blocks out of the pools and back: what host memory and files hold.

Outside of the pools a block has one form, whatever implementation, mesh or packing the pools have: per layer
values [C, 2K, H] in the KV dtype, K and V of head k at 2k and 2k + 1, and for int8 float32 scales [2K, C]. Where V has
another size than K, values are [C, K, H + V], K of each head and then V, or a latent and what K has beside it. An
indexer's keys are [C, I].
Copies run as executables (`runtime/block_copies.py`), for a view of a pool on the host would stop its donation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KVPool, as_bits, from_bits, index_bits, index_values, pack, unpack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBlocks:
    """Blocks of one layer; K counts the model's KV heads."""

    values: jax.Array  # [n, C, 2K, H] or [n, C, K, H + V]
    scales: jax.Array | None  # [n, 2K, C] float32, None where values are not int8
    index_keys: jax.Array | None = None  # [n, C, I], None where the layer has no indexer


def gather_blocks(pools: tuple[KVPool, ...], ids: jax.Array, *, head_copies: int) -> tuple[LayerBlocks, ...]:
    """The blocks `ids` [n] int32 of every layer. head_copies: how often a pool repeats each KV head."""
    return tuple(_gather(pool, ids, head_copies) for pool in pools)


def _gather(pool: KVPool, ids: jax.Array, head_copies: int) -> LayerBlocks:
    scales = None if pool.scales is None else pool.scales[ids]
    index_keys = None if pool.index_keys is None else index_values(pool.index_keys[ids], pool)
    return outside(pool, from_bits(pool.values[ids], pool), scales, index_keys, head_copies)


def outside(pool: KVPool, values: Any, scales: Any, index_keys: Any, head_copies: int) -> LayerBlocks:
    """Blocks in their form outside of a pool like this; the arrays: what it has of them, floats not as integers.

    They are NumPy's arrays or jax's. Every device of "tp" has all of an indexer's keys.
    """
    n, C, H, both = values.shape[0], pool.block_size, pool.head_dim, pool.head_dim + pool.v_head_dim
    if not pool.is_packed:
        values = values[..., :H]  # of [n, C, 2K, Hp]
    elif values.shape[3] != both:
        values = (np if isinstance(values, np.ndarray) else jnp).concatenate(unpack(values, pool), axis=-1)
    values = values.reshape(n, C, -1, both)[:, :, ::head_copies].reshape(n, C, -1, _lanes(pool))
    if scales is not None:
        scales = scales.reshape(n, -1, 2, C)[:, ::head_copies].reshape(n, -1, C)
    return LayerBlocks(values=values, scales=scales, index_keys=None if index_keys is None else index_keys[:, :, 0])


def _lanes(pool: KVPool) -> int:
    """Values of a token's vector in a block outside the pools."""
    return pool.head_dim if pool.head_dim == pool.v_head_dim else pool.head_dim + pool.v_head_dim


def scatter_blocks(
    pools: tuple[KVPool, ...], ids: jax.Array, blocks: tuple[LayerBlocks, ...], *, head_copies: int
) -> tuple[KVPool, ...]:
    """The pools with `blocks` at `ids` [n] int32; pools are to be donated. Id 0 takes any number of them."""
    return tuple(_scatter(pool, ids, layer, head_copies) for pool, layer in zip(pools, blocks, strict=True))


def _scatter(pool: KVPool, ids: jax.Array, blocks: LayerBlocks, head_copies: int) -> KVPool:
    n, C, H = len(ids), pool.block_size, pool.head_dim
    values = jnp.repeat(blocks.values.reshape(n, C, -1, H + pool.v_head_dim), head_copies, axis=2)
    if pool.is_packed:
        values = pack(values[..., :H], values[..., H:], pool)
    else:
        values = values.reshape(n, C, -1, H)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, pool.values.shape[3] - H)))
    values = as_bits(values, pool)
    scales = pool.scales
    if scales is not None and blocks.scales is not None:
        repeated = jnp.repeat(blocks.scales.reshape(n, -1, 2, C), head_copies, axis=1)
        scales = scales.at[ids].set(repeated.reshape(n, -1, C))
    index_keys = pool.index_keys
    if index_keys is not None and blocks.index_keys is not None:
        index_keys = index_keys.at[ids].set(index_bits(blocks.index_keys, pool)[:, :, None])
    return dataclasses.replace(pool, values=pool.values.at[ids].set(values), scales=scales, index_keys=index_keys)
