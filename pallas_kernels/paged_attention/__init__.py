"""Attention of ragged rows over KV blocks that lie anywhere in a pool.

A step's tokens are flat: rows of one query (decode) and of many (prefill) stand one after the other. Each
token's K and V are written to its row's blocks; then it attends to its row's context through the block table.
`make_schedule` lists the tiles that exist once per step; `paged_attention` runs them once per layer.
"""

from __future__ import annotations

import jax

from pallas_kernels.kv_pool import KVPool, check_pool
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.config import AttentionConfig
from pallas_kernels.paged_attention.schedule import RaggedBatch, Schedule, make_schedule
from pallas_kernels.shapes import check_shapes

__all__ = ["AttentionConfig", "RaggedBatch", "Schedule", "make_schedule", "paged_attention"]


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: KVPool,
    schedule: Schedule,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, KVPool]:  # [T, N, H], the dtype of q, zero for padding tokens; the pool with k and v
    """softmax(scale * q k^T + mask) v of every token over its row's context, accumulated in float32.

    q: [T, N, H]. k, v: [T, K, H] of the same tokens; they are written to the pool first (in place where it is
    donated), and attention reads what the pool keeps of them. schedule: of `make_schedule`, which has the window,
    for the same implementation. soft_cap: logits become soft_cap * tanh(logits / soft_cap). sinks: [N], a logit
    per head that takes weight and has no value. What no query may see is never read into a result: it may be NaN.
    Raises ValueError for shapes that do not fit and for an unknown implementation.
    """
    sizes = check_shapes(("T N H", q), ("T K H", k), ("T K H", v), T=schedule.num_tokens, H=pool.head_dim)
    if sizes["N"] % sizes["K"]:
        raise ValueError(f"q has {sizes['N']} heads and k {sizes['K']}; N must be a multiple of K")
    if pool.block_size != schedule.block_size:
        raise ValueError(
            f"the schedule is for blocks of {schedule.block_size} tokens; the pool's have {pool.block_size}"
        )
    check_pool(pool, sizes["K"], implementation)
    if implementation == "xla":
        pool = kv_write(pool, k, v, schedule.write_blocks, schedule.write_offsets)
        return xla.attention(q, pool, schedule, scale=scale, soft_cap=soft_cap, sinks=sinks), pool
    raise ValueError(f"implementation is {implementation!r}; paged_attention has only 'xla'")
