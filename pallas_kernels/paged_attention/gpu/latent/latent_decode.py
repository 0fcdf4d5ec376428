"""Decode attention over latents: the heads of a row in groups of lanes, and the merge of its splits."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write import kv_write
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu import merge_splits
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.latent import kernel
from pallas_kernels.paged_attention.gpu.ops import Ops
from pallas_kernels.paged_attention.gpu.schedule import GpuSchedule
from pallas_kernels.paged_attention.gpu.shape import Common


def latent_attention(
    q: jax.Array,  # [T, N, V + rope] bfloat16
    k: jax.Array,  # [T, 1, V]
    v: jax.Array,  # [T, 1, rope]
    pool: KVPool,
    schedule: GpuSchedule,
    logits: Logits,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, KVPool]:  # [T, N, V]; the pool with k and v
    """See the package's paged_attention. Raises ValueError for queries that are not bfloat16."""
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"q is {q.dtype.name}; 'mosaic_gpu' multiplies bfloat16; take implementation 'xla'")
    pool = kv_write(pool, k, v, schedule.write_blocks, schedule.write_offsets, implementation="mosaic_gpu")
    N, sinks = q.shape[1], logits.sinks
    common = Common(
        group=N,
        scale=logits.scale,
        soft_cap=logits.soft_cap,
        ops=Ops(is_interpreted=bool(interpret)),
        interpret=interpret,
    )
    lane_sinks = jnp.full((N,), m.LOWEST) if sinks is None else sinks.astype(jnp.float32) * m.LOG2_E
    return _decode(q, pool, schedule, lane_sinks, common), pool


def _decode(
    q: jax.Array, pool: KVPool, schedule: GpuSchedule, sinks: jax.Array, common: Common
) -> jax.Array:  # [T, N, V], zero for tokens of other rows
    work, loaded = schedule.decode, schedule.config.decode.loaded
    (T, N, lanes), V, R = q.shape, pool.value_dim, work.tokens.shape[0]
    groups = -(-N // loaded)
    step = LANES // math.gcd(LANES, groups * loaded)  # rows whose heads fill groups of lanes in the merge
    rows, pad = -(-R // step) * step, groups * loaded - N
    queries = jnp.pad(q, ((0, 0), (0, pad), (0, 0))).reshape(T, groups, loaded, lanes)
    results, sums = kernel.attend(queries, pool, schedule, common, rows=rows)
    splits, *of_lanes, width = results.shape  # rows, groups, halves of the values if they are apart, lanes
    spread, wide = [1] * (len(of_lanes) - 3), of_lanes[-1] - loaded
    num_splits = jnp.pad(work.num_splits, (0, rows - R)).reshape(rows, *[1] * (len(of_lanes) - 1))
    num_splits = jnp.where(jnp.arange(of_lanes[-1]) < loaded, num_splits, 0)
    sinks = jnp.pad(sinks, (0, pad), constant_values=m.LOWEST).reshape(groups, loaded)
    sinks = jnp.pad(sinks, ((0, 0), (0, wide)), constant_values=m.LOWEST).reshape(groups, *spread, loaded + wide)
    merged = merge_splits.merge(
        results.reshape(splits, -1, width),
        sums.reshape(splits, -1),
        jnp.broadcast_to(num_splits, of_lanes).reshape(-1),
        jnp.broadcast_to(sinks, of_lanes).reshape(-1),
        ops=common.ops,
        interpret=common.interpret,
    )
    by_row = merged.reshape(rows, groups, V // width, -1, width)[:, :, :, :loaded].transpose(0, 1, 3, 2, 4)
    by_row = by_row.reshape(rows, groups * loaded, V)[:, :N]
    return jnp.where(work.is_mine[:, None, None], by_row[work.tiles], jnp.zeros((), q.dtype))
