"""paged_attention for Mosaic TPU.

Rows of one query go to the decode kernel, which also writes their K and V. K and V of rows of several queries are
written first, a transfer for each block, and then read by the prefill kernel: a token's K and V are read many times.
Scales of int8 are written before all, for those of a block change together.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write import mosaic_tpu as kv_write
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.tpu.decode import kernel as decode_kernel
from pallas_kernels.paged_attention.tpu.decode.config import LANES, Specialisation
from pallas_kernels.paged_attention.tpu.prefill.kernel import prefill_attention
from pallas_kernels.paged_attention.tpu.schedule import TpuSchedule


def paged_attention(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, V]
    pool: KVPool,
    schedule: TpuSchedule,
    logits: Logits,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, KVPool]:
    """See the package's paged_attention. interpret: for tests, pltpu.InterpretParams."""
    vectors, scales = kv_write.encode_tokens(pool, k, v)
    if scales is not None:
        assert schedule.scale_runs is not None, "the schedule was made for another pool"
        pool = kv_write.write_scales(pool, scales, schedule.scale_runs, interpret=interpret)
    mixed = schedule.mixed
    if mixed is None:
        return _decode(q, vectors, pool, schedule, logits, interpret)
    singles = None
    if schedule.config.prefill_from > 1:
        q1, vectors1 = (x.at[mixed.singles].get(mode="clip") for x in (q, vectors))
        singles, pool = _decode(q1, vectors1, pool, schedule, logits, interpret)
    pool = kv_write.write_vectors(pool, vectors, mixed.runs, interpret=interpret)
    out = prefill_attention(q, pool, mixed.tiles, logits, interpret=interpret)
    out = jnp.where(mixed.is_served[:, None, None], out, 0)
    return out if singles is None else out.at[mixed.singles].set(singles, mode="drop"), pool


def _decode(
    q: jax.Array,  # [tokens of the decode schedule, N, H]
    vectors: jax.Array,  # of these, [tokens, vectors, Hp]
    pool: KVPool,
    schedule: TpuSchedule,
    logits: Logits,
    interpret: Any,
) -> tuple[jax.Array, KVPool]:
    """Attention of the rows of one query, whose vectors are written to the pool."""
    N, H = q.shape[1:]
    shape, sinks = schedule.config.shape, logits.sinks
    padded = jnp.pad(q, ((0, 0), (0, shape.num_heads - N), (0, shape.key_lanes - H)))
    if sinks is not None:
        column = jnp.pad(sinks.astype(jnp.float32), (0, shape.num_heads - N))
        sinks = jnp.broadcast_to(column[:, None], (shape.num_heads, LANES))
    out, values = decode_kernel.decode(
        padded,
        vectors,
        pool,
        schedule.decode,
        sinks,
        Specialisation(
            shape=shape,
            config=schedule.config.decode,
            scale=logits.scale,
            soft_cap=logits.soft_cap,
            window=schedule.step.window,
            chunked=schedule.step.chunked,
            interpret=interpret,
        ),
    )
    first = H if pool.is_packed and pool.v_head_dim == H else 0  # such values are in the second half of their vector
    return out[:, :N, first : first + pool.v_head_dim], dataclasses.replace(pool, values=values)
