"""Vector memory of one launch of the TPU's kernel for latents."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.decode.config import LANES, RING
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentScratch:
    """References of one launch. S: items of a step. X: tokens of an item. L: lanes of a latent. V: of its value.

    Q: tokens of a query tile. N: heads; but for queries and outs, those of all of its tokens.
    """

    tiles: Any  # [buffers, S * X / C, C, L] of the pool's dtype
    queries: Any  # [slots, Q, N, L]
    outs: Any  # [slots, Q, N, V]
    scores: Any  # [S, N, X] float32, hidden where the query may not see
    weights: Any  # [S, N, X] of the dtype that products have
    sums: Any  # [S, N, V] float32: weights times values
    states: Any  # [RING, S, N, 128] float32, of the last steps: the row's highest score up to the item
    added: Any  # [2, S, N, 128] float32, of even and odd steps: sums of weights
    results: Any  # [S, N, V] float32: the row's sums up to the item of weights times values
    totals: Any  # [S, N, 128] float32: and of weights
    fetched: Any  # DMA semaphore of each buffer
    written: Any  # DMA semaphore of each buffer
    asked: Any  # DMA semaphore of each slot
    stored: Any  # DMA semaphore of each slot
    scalars: Any  # DMA semaphores of `Stream`


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitScratch:
    """Further scratch where keys are chosen."""

    limits: Any  # [buffers, S, X / 128, 128] float32, of `TileLimits`
    arrived: Any  # DMA semaphore of each buffer


def limit_scratch_shapes(config: LatentConfig) -> tuple[Any, ...]:
    """In the order of LimitScratch."""
    tiles = config.decode
    return (
        pltpu.VMEM((tiles.buffers, tiles.items, tiles.tile_kv // LANES, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA((tiles.buffers,)),
    )


def latent_scratch_shapes(dtype: jnp.dtype, pool_dtype: jnp.dtype, config: LatentConfig) -> tuple[Any, ...]:
    """In the order of LatentScratch. dtype: of queries. pool_dtype: of the pool's array."""
    tiles, N, V, f32 = config.decode, config.queries, config.value_dim, jnp.float32
    S, X, C = tiles.items, tiles.tile_kv, config.block_size
    return (
        pltpu.VMEM((tiles.buffers, S * (X // C), C, config.lanes), pool_dtype),
        pltpu.VMEM((config.slots, config.tile_q, config.num_heads, config.lanes), dtype),
        pltpu.VMEM((config.slots, config.tile_q, config.num_heads, V), dtype),
        pltpu.VMEM((S, N, X), f32),
        pltpu.VMEM((S, N, X), config.compute_dtype),
        pltpu.VMEM((S, N, V), f32),
        pltpu.VMEM((RING, S, N, LANES), f32),
        pltpu.VMEM((2, S, N, LANES), f32),
        pltpu.VMEM((S, N, V), f32),
        pltpu.VMEM((S, N, LANES), f32),
        pltpu.SemaphoreType.DMA((tiles.buffers,)),
        pltpu.SemaphoreType.DMA((tiles.buffers,)),
        pltpu.SemaphoreType.DMA((config.slots,)),
        pltpu.SemaphoreType.DMA((config.slots,)),
        pltpu.SemaphoreType.DMA((tiles.records(C).buffers,)),
    )
