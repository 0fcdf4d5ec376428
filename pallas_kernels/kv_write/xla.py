"""kv_write in plain XLA: one scatter of whole tokens, in place where the pool is donated.

K and V are interleaved first. Two scatters of heads would spare the CPU that copy, but a TPU lays the pool out
anew, in and out, to split the axis that it tiles.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool, as_bits, encode


def kv_write(pool: KVPool, k: jax.Array, v: jax.Array, block_ids: jax.Array, offsets: jax.Array) -> KVPool:
    """See the package's kv_write."""
    (k, k_scales), (v, v_scales) = (encode(x, pool.dtype) for x in (k, v))
    values = _write_values(pool.values, as_bits(k, pool), as_bits(v, pool), block_ids, offsets)
    scales = pool.scales
    if k_scales is not None and v_scales is not None:
        scales = _write_scales(pool.scales, k_scales, v_scales, block_ids, offsets)
    return dataclasses.replace(pool, values=values, scales=scales)


def _write_values(
    pool: jax.Array,  # [P, C, 2K, H], or packed [P, C, K, H + V]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, V]
    block_ids: jax.Array,  # [T]
    offsets: jax.Array,
) -> jax.Array:
    token = jnp.concatenate([k, v], axis=2).reshape(len(k), *pool.shape[2:])  # [T, 2K, H] or [T, K, H + V]
    return pool.at[block_ids, offsets].set(token, mode="promise_in_bounds")


def _write_scales(
    pool: jax.Array,  # [P, 2K, C]
    k: jax.Array,  # [T, K]
    v: jax.Array,
    block_ids: jax.Array,  # [T]
    offsets: jax.Array,
) -> jax.Array:
    token = jnp.stack([k, v], axis=2).reshape(len(k), pool.shape[1])  # [T, 2K]
    if len(block_ids) == 1:
        return jax.lax.dynamic_update_slice(pool, token[:, :, None], (block_ids[0], 0, offsets[0]))
    return pool.at[block_ids, :, offsets].set(token, mode="promise_in_bounds")
