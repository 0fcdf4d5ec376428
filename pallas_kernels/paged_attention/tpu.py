"""paged_attention for Mosaic TPU: the decode kernel for rows of one query, which also writes their K and V."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool, encode
from pallas_kernels.paged_attention import tpu_decode
from pallas_kernels.paged_attention.tpu_config import LANES
from pallas_kernels.paged_attention.tpu_schedule import TpuSchedule


def paged_attention(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,
    pool: KVPool,
    schedule: TpuSchedule,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,  # [N]
    interpret: Any = False,
) -> tuple[jax.Array, KVPool]:
    """See the package's paged_attention. interpret: for tests, pltpu.InterpretParams."""
    N, H = q.shape[1:]
    shape = schedule.config.shape
    padded = jnp.pad(q, ((0, 0), (0, shape.num_heads - N), (0, shape.lanes - H)))
    if sinks is not None:
        column = jnp.pad(sinks.astype(jnp.float32), (0, shape.num_heads - N))
        sinks = jnp.broadcast_to(column[:, None], (shape.num_heads, LANES))
    out, values = tpu_decode.decode(
        padded,
        slabs(k, v, pool),
        pool.values,
        schedule.decode,
        shape=shape,
        config=schedule.config.decode,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        window=schedule.window,
        interpret=interpret,
    )
    first = H if pool.is_packed else 0  # values are in the second half of a packed vector
    return out[:, :N, first : first + H], dataclasses.replace(pool, values=values)


def slabs(k: jax.Array, v: jax.Array, pool: KVPool) -> jax.Array:  # [T, K, H] twice -> [T, vectors, Hp]
    """The tokens' vectors as the pool keeps them."""
    (T, K, H), lanes = k.shape, pool.values.shape[3]
    if pool.is_packed:
        return encode(jnp.concatenate([k, v], axis=2), pool.dtype)[0]
    pairs = jnp.pad(jnp.stack([k, v], axis=2), ((0, 0), (0, 0), (0, 0), (0, lanes - H)))
    return encode(pairs, pool.dtype)[0].reshape(T, 2 * K, lanes)
