"""paged_attention for Mosaic TPU.

Rows of one query go to the decode kernel, which also writes their K and V. K and V of rows of several queries are
written first, a transfer for each block, and then read by the prefill kernel: a token's K and V are read many times.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write import tpu as kv_write
from pallas_kernels.paged_attention import tpu_decode
from pallas_kernels.paged_attention.tpu_config import LANES
from pallas_kernels.paged_attention.tpu_prefill import prefill_attention
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
    if schedule.mixed is None:
        return _decode(q, k, v, pool, schedule, scale, soft_cap, sinks, interpret)
    mixed = schedule.mixed
    q1, k1, v1 = (x.at[mixed.singles].get(mode="clip") for x in (q, k, v))  # [R, ...]
    singles, pool = _decode(q1, k1, v1, pool, schedule, scale, soft_cap, sinks, interpret)
    pool = kv_write.kv_write(pool, k, v, mixed.runs, interpret=interpret)
    out = prefill_attention(q, pool, mixed.tiles, scale=scale, soft_cap=soft_cap, sinks=sinks, interpret=interpret)
    out = jnp.where(mixed.is_served[:, None, None], out, 0)
    return out.at[mixed.singles].set(singles, mode="drop"), pool


def _decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: KVPool,
    schedule: TpuSchedule,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
    interpret: Any,
) -> tuple[jax.Array, KVPool]:
    """paged_attention of rows that have one query, with the tokens of the decode schedule."""
    N, H = q.shape[1:]
    shape = schedule.config.shape
    padded = jnp.pad(q, ((0, 0), (0, shape.num_heads - N), (0, shape.lanes - H)))
    if sinks is not None:
        column = jnp.pad(sinks.astype(jnp.float32), (0, shape.num_heads - N))
        sinks = jnp.broadcast_to(column[:, None], (shape.num_heads, LANES))
    out, values = tpu_decode.decode(
        padded,
        kv_write.encode_tokens(pool, k, v)[0],
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
