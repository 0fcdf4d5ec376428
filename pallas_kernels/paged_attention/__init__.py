"""Attention of ragged rows over KV blocks that lie anywhere in a pool.

A step's tokens are flat: rows of one query (decode) and of many (prefill) stand one after the other. Each
row attends to its own context, causally, through its block table. `make_schedule` lists the tiles that exist
once per step; `paged_attention` runs them once per layer.
"""

from __future__ import annotations

import jax

from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.config import AttentionConfig
from pallas_kernels.paged_attention.schedule import RaggedBatch, Schedule, make_schedule
from pallas_kernels.shapes import check_shapes

__all__ = ["AttentionConfig", "RaggedBatch", "Schedule", "make_schedule", "paged_attention"]


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    schedule: Schedule,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:  # [T, N, H], the dtype of q; zero for padding tokens
    """softmax(scale * q k^T + mask) v of every token over its row's context, accumulated in float32.

    q: [T, N, H]. pool: [P, C, 2K, H], K of head k at 2k and V at 2k + 1; the step's own K and V are already in
    it. window: as in make_schedule. soft_cap: logits become soft_cap * tanh(logits / soft_cap). sinks: [N], a
    logit per head that takes weight and has no value. What no query may see is never read into a result: it
    may be NaN. Raises ValueError for shapes or a window that do not fit, and for an unknown implementation.
    """
    sizes = check_shapes(("T N H", q), ("P C 2K H", pool), T=schedule.num_tokens, C=schedule.block_size)
    if sizes["2K"] % 2 or sizes["N"] % (sizes["2K"] // 2):
        raise ValueError(f"pool has {sizes['2K']} vectors a token; it must be 2K with K a divisor of N, {sizes['N']}")
    if window != schedule.window:
        raise ValueError(f"window is {window}, but the schedule was made for {schedule.window}")
    if implementation == "xla":
        return xla.paged_attention(q, pool, schedule, scale=scale, soft_cap=soft_cap, sinks=sinks)
    raise ValueError(f"implementation is {implementation!r}; paged_attention has only 'xla'")
