"""Decode attention over latents: the heads of a row in groups of up to 64 lanes, and the merge of its splits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu import merge_splits
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.latent import kernel
from pallas_kernels.paged_attention.gpu.latent.shape import HALVES
from pallas_kernels.paged_attention.gpu.schedule import GpuSchedule
from pallas_kernels.paged_attention.gpu.shape import Common


def latent_decode(
    q: jax.Array,  # [T, N, V + rope]
    pool: KVPool,  # with the step's latents
    schedule: GpuSchedule,
    sinks: jax.Array,  # [N] float32, base 2
    common: Common,
) -> jax.Array:  # [T, N, V], zero for tokens of other rows
    """Attention of rows of one query."""
    work, loaded = schedule.decode, schedule.config.decode.loaded
    (T, N, lanes), V, R = q.shape, pool.value_dim, work.tokens.shape[0]
    groups = -(-N // loaded)
    pad = groups * loaded - N
    queries = jnp.pad(q, ((0, 0), (0, pad), (0, 0))).reshape(T, groups, loaded, lanes)
    results, sums = kernel.attend(queries, pool, schedule, common)
    of_lanes = (R, groups, HALVES, LANES)
    is_used = jnp.arange(LANES) < loaded
    num_splits = jnp.where(is_used, work.num_splits[:, None, None, None], 0)
    lane_sinks = jnp.pad(sinks, (0, pad), constant_values=m.LOWEST).reshape(groups, 1, loaded)
    lane_sinks = jnp.pad(lane_sinks, ((0, 0), (0, 0), (0, LANES - loaded)), constant_values=m.LOWEST)
    merged = merge_splits.merge(
        results.reshape(work.max_splits, -1, V // HALVES),
        sums.reshape(work.max_splits, -1),
        jnp.broadcast_to(num_splits, of_lanes).reshape(-1),
        jnp.broadcast_to(lane_sinks, of_lanes).reshape(-1),
        ops=common.ops,
        interpret=common.interpret,
    )
    by_row = merged.reshape(*of_lanes, V // HALVES)[:, :, :, :loaded].transpose(0, 1, 3, 2, 4)
    by_row = by_row.reshape(R, groups * loaded, V)[:, :N]
    return jnp.where(work.is_mine[:, None, None], by_row[work.tiles], jnp.zeros((), q.dtype))
