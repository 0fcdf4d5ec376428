"""Scratch memory of the TPU's decode kernel: its references by name, and their shapes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.decode.config import LANES, RING, DecodeConfig, DecodeShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """References of one launch. S: items of a step. X: columns of an item's scores.

    Hp: lanes of a vector. Vp: lanes of a value.
    """

    tiles: Any  # [buffers, S * tile_kv + 1, vectors, Hp] of the pool's dtype; the last token takes what has no place
    scores: Any  # [S, N, X] float32, masked; then exp2 of them less the row's highest
    weights: Any  # [S, N or 2N, X or X / 2], those for PV, halves of the columns stacked; 16 bits: words of two rows
    sums: Any  # [S, N, Vp] float32, weights times values
    states: Any  # [RING, S, N, 128] float32, of the last steps: the row's highest score up to the item
    added: Any  # [2, S, N, 128] float32, of even and odd steps: sums of weights, with one item of each lane's
    columns: Any  # [parts, N, period] int32, token of a column, or a large number where its head is not the query's
    outs: Any  # [T + 1, N, Vp]; the last token takes what has no place
    sum: Any  # [N, Vp] float32: of the row in work, weights times values
    total: Any  # [N, 128] float32: and weights
    fetched: Any  # DMA semaphore of each buffer
    written: Any  # DMA semaphore
    stored: Any  # DMA semaphore
    scalars: Any  # DMA semaphores of `Stream`


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleScratch:
    """Further scratch for an int8 pool."""

    blocks: Any  # [buffers, S * blocks of a tile, 2K, C] float32
    tile: Any  # [2K, tile_kv + 128] float32: an item's, tokens side by side
    values: Any  # [S, 1, X] float32, V's of each column, zero for tokens that are not visible
    fetched: Any  # DMA semaphore of each buffer


def scratch_shapes(
    num_tokens: int, dtype: jnp.dtype, pool_dtype: jnp.dtype, shape: DecodeShape, config: DecodeConfig
) -> tuple[Any, ...]:
    """In the order of Scratch."""
    S, N, X, V, f32 = config.items, shape.num_heads, shape.columns(config.tile_kv), shape.value_lanes, jnp.float32
    stacked = 2 if shape.halves else 1
    if shape.compute_dtype == f32:
        weights = pltpu.VMEM((S, stacked * N, X // stacked), f32)
    else:
        weights = pltpu.VMEM((S, stacked * N // 2, X // stacked), jnp.uint32)
    return (
        pltpu.VMEM((config.buffers, S * config.tile_kv + 1, shape.vectors, shape.lanes), pool_dtype),
        pltpu.VMEM((S, N, X), f32),
        weights,
        pltpu.VMEM((S, N, V), f32),
        pltpu.VMEM((RING, S, N, LANES), f32),
        pltpu.VMEM((2, S, N, LANES), f32),
        pltpu.VMEM((shape.parts, N, shape.period), jnp.int32),
        pltpu.VMEM((num_tokens + 1, N, V), dtype),
        pltpu.VMEM((N, V), f32),
        pltpu.VMEM((N, LANES), f32),
        pltpu.SemaphoreType.DMA((config.buffers,)),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((config.records(shape.block_size).buffers,)),
    )


def scale_scratch_shapes(shape: DecodeShape, config: DecodeConfig) -> tuple[Any, ...]:
    """In the order of ScaleScratch."""
    pairs, S, tile = 2 * shape.num_kv_heads, config.items, config.tile_kv
    return (
        pltpu.VMEM((config.buffers, S * (tile // shape.block_size), pairs, shape.block_size), jnp.float32),
        pltpu.VMEM((pairs, tile + LANES), jnp.float32),
        pltpu.VMEM((S, 1, shape.columns(tile)), jnp.float32),
        pltpu.SemaphoreType.DMA((config.buffers,)),
    )


def named(kind: Any, refs: list[Any]) -> Any:
    """Scratch or ScaleScratch of its references in order."""
    return kind(**{f.name: r for f, r in zip(dataclasses.fields(kind), refs, strict=True)})
