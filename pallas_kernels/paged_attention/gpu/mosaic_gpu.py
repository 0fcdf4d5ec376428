"""Paged attention in Pallas Mosaic GPU, for Hopper: rows of one query and rows of several are attended to by one kernel
in two forms, and the splits of the former merged. K and V are written first, or by the kernel where all rows have one.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write import kv_write
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.gpu import kernel, merge_splits
from pallas_kernels.paged_attention.gpu import math as gpu_math
from pallas_kernels.paged_attention.gpu.config import LANES, Form, takes_new
from pallas_kernels.paged_attention.gpu.ops import Ops
from pallas_kernels.paged_attention.gpu.schedule import GpuSchedule
from pallas_kernels.paged_attention.gpu.shape import Common


def paged_attention(
    q: jax.Array,  # [T, N, H] bfloat16
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, V]
    pool: KVPool,
    schedule: GpuSchedule,
    logits: Logits,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, KVPool]:
    """See the package's paged_attention. Raises ValueError for queries that are not bfloat16."""
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"q is {q.dtype.name}; 'mosaic_gpu' multiplies bfloat16; take implementation 'xla'")
    writes = schedule.prefill is None and takes_new(pool, schedule.config.decode.divided)
    if not writes:
        pool = kv_write(pool, k, v, schedule.write_blocks, schedule.write_offsets, implementation="mosaic_gpu")
    new = jnp.stack([k, v], axis=2).astype(pool.dtype) if writes else None
    N, K, sinks = q.shape[1], k.shape[1], logits.sinks
    heads = jnp.full((N,), gpu_math.LOWEST) if sinks is None else sinks.astype(jnp.float32) * gpu_math.LOG2_E
    common = Common(
        group=N // K,
        scale=logits.scale,
        soft_cap=logits.soft_cap,
        ops=Ops(is_interpreted=bool(interpret)),
        interpret=interpret,
    )
    out, pool = _decode(q, new, pool, schedule, heads.reshape(K, -1), common, has_sinks=sinks is not None)
    if schedule.prefill is not None:
        out = jnp.where(schedule.prefill.is_mine[:, None, None], _prefill(q, pool, schedule, heads, common), out)
    return out, pool


def _decode(
    q: jax.Array,
    new: jax.Array | None,  # [T, K, 2, H], what is to be written to the pool
    pool: KVPool,
    schedule: GpuSchedule,
    sinks: jax.Array,
    common: Common,
    *,
    has_sinks: bool,
) -> tuple[jax.Array, KVPool]:  # [T, N, V], zero for tokens of other rows; the pool with what is new
    work, form = schedule.decode, schedule.config.decode
    (_, N, H), (K, G), V = q.shape, sinks.shape, pool.value_dim
    R, is_few = work.tokens.shape[0], work.max_splits * form.rings <= merge_splits.FEW
    rows = R if is_few else -(-R // _rows_step(K, form)) * _rows_step(K, form)
    by_head = q.reshape(len(q), K, G, H)
    by_head = by_head if new is None else jnp.concatenate([by_head, new], axis=2)
    queries = by_head[work.tokens[:, 0]][:, :, None]
    queries = jnp.pad(queries, ((0, rows - R), (0, 0), (0, 0), (0, -by_head.shape[2] % 8), (0, 0)))
    none = jnp.full((K, form.lane_groups, LANES), gpu_math.LOWEST)
    (results, sums), pool = kernel.attend(queries, pool, schedule, work, form, none, common, writes=new is not None)
    num_splits = work.num_splits * form.rings
    if is_few:
        found = results[..., :G, :], sums[..., :G], num_splits
        merged = merge_splits.merge_few(*found, sinks if has_sinks else None)
    else:
        lanes = rows * K * form.loaded
        lane_splits = jnp.broadcast_to(jnp.pad(num_splits, (0, rows - R))[:, None], (rows, lanes // rows))
        lane_sinks = jnp.pad(sinks, ((0, 0), (0, form.loaded - G)), constant_values=gpu_math.LOWEST)
        merged = merge_splits.merge(
            results.reshape(-1, lanes, V),
            sums.reshape(-1, lanes),
            lane_splits.reshape(lanes),
            jnp.broadcast_to(lane_sinks, (rows, K, form.loaded)).reshape(lanes),
            ops=common.ops,
            interpret=common.interpret,
        )
        merged = merged.reshape(rows, K, form.loaded, V)[:, :, :G]
    by_token = merged.reshape(rows, N, V)[work.tiles]
    return jnp.where(work.is_mine[:, None, None], by_token, jnp.zeros((), q.dtype)), pool


def _rows_step(num_kv_heads: int, form: Form) -> int:
    """Rows whose lanes fill groups of 64."""
    return LANES // math.gcd(LANES, num_kv_heads * form.loaded)


def _prefill(
    q: jax.Array, pool: KVPool, schedule: GpuSchedule, sinks: jax.Array, common: Common
) -> jax.Array:  # [T, N, V], anything for tokens of other rows
    work, form = schedule.prefill, schedule.config.prefill
    assert work is not None and form is not None
    (_, N, H), K, G, V = q.shape, sinks.shape[0] // common.group, common.group, pool.value_dim
    tiles, tile_q = work.tokens.shape
    lanes, used = form.lane_groups * LANES, tile_q * G
    queries = q[work.tokens].reshape(tiles, tile_q, K, G, H).transpose(0, 2, 1, 3, 4).reshape(tiles, K, used, H)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, lanes - used), (0, 0)))
    lane_sinks = jnp.pad(jnp.tile(sinks.reshape(K, G), (1, tile_q)), ((0, 0), (0, lanes - used)))
    (out,), _ = kernel.attend(
        queries.reshape(tiles, K, form.lane_groups, LANES, H),
        pool,
        schedule,
        work,
        form,
        lane_sinks.reshape(K, form.lane_groups, LANES),
        common,
    )
    by_tile = out.reshape(tiles, K, lanes, H)[:, :, :used, :V].reshape(tiles, K, tile_q, G, V)
    return by_tile[work.tiles, :, work.places].reshape(-1, N, V)
