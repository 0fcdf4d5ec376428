"""The work of one step's attention, computed once and shared by all layers.

A query tile is up to tile_q neighbouring queries of one row (see `ragged`); it visits the KV tiles
first_kv .. end_kv - 1 of its row's context and no others. Loops run over the number of tiles and over those
ranges, which are data: what does not exist costs nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.config import AttentionConfig
from pallas_kernels.ragged import Tiles, cut, static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """The rows of a step. Tokens of a row are neighbours, rows stand in order; padding rows have count 0.

    Row r computes positions starts[r] .. starts[r] + counts[r] - 1; what came before them is in the pool.
    """

    block_tables: jax.Array  # [R, M] int32
    starts: jax.Array  # [R] int32, position of the first query
    counts: jax.Array  # [R] int32, queries of the row
    query_offsets: jax.Array  # [R] int32, flat index of the row's first query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTiles:
    """Query tiles of one size and what each attends to."""

    tiles: Tiles  # runs are rows, items are flat tokens
    low: jax.Array  # [tiles] int32, position of the tile's first query
    high: jax.Array  # [tiles] int32, last position that one of its queries sees
    first_kv: jax.Array  # [tiles] int32, KV tiles first .. end - 1 hold what these queries attend to
    end_kv: jax.Array  # [tiles] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """What paged_attention needs to know of a step, for all layers of one window."""

    block_tables: jax.Array  # [R, M] int32
    write_blocks: jax.Array  # [T] int32, where each token's K and V go; padding tokens go to block 0
    write_offsets: jax.Array  # [T] int32
    passes: tuple[QueryTiles, ...]  # one after the other
    num_tokens: int = static()
    block_size: int = static()
    tile_kv: int = static()
    window: int | None = static()
    causal: bool = static()


def make_schedule(
    batch: RaggedBatch,
    *,
    num_tokens: int,
    block_size: int,
    config: AttentionConfig,
    window: int | None = None,
    causal: bool = True,
) -> Schedule:
    """Where a step of `num_tokens` flat tokens writes, its query tiles, and the KV tiles that each visits.

    See the package's make_schedule. Raises ValueError where the tiles do not fit the step or the blocks.
    """
    if config.tile_kv % block_size:
        raise ValueError(f"tile_kv is {config.tile_kv}; it must be a multiple of block_size, {block_size}")
    if config.decode_tile_q is None:
        parts = [(batch.counts, config.tile_q)]
    else:
        parts = [(jnp.where(batch.counts == 1, 1, 0), config.decode_tile_q)]
        if config.has_prefill:
            parts.append((jnp.where(batch.counts == 1, 0, batch.counts), config.tile_q))
    write_blocks, write_offsets = write_places(batch, num_tokens=num_tokens, block_size=block_size)
    return Schedule(
        block_tables=batch.block_tables,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        passes=tuple(
            _tile_queries(batch, counts, tile, num_tokens, config.tile_kv, window, causal) for counts, tile in parts
        ),
        num_tokens=num_tokens,
        block_size=block_size,
        tile_kv=config.tile_kv,
        window=window,
        causal=causal,
    )


def write_places(batch: RaggedBatch, *, num_tokens: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Block and offset, [T] int32 each, at which each token's K and V are written; block 0 for padding tokens."""
    rows, done = _rows_of_tokens(batch, num_tokens)
    real = (done >= 0) & (done < batch.counts[rows])
    positions = jnp.where(real, batch.starts[rows] + done, 0)
    return jnp.where(real, batch.block_tables[rows, positions // block_size], 0), positions % block_size


def is_real(batch: RaggedBatch, *, num_tokens: int) -> jax.Array:  # [T] bool
    """Which tokens belong to a row."""
    rows, done = _rows_of_tokens(batch, num_tokens)
    return (done >= 0) & (done < batch.counts[rows])


def _rows_of_tokens(batch: RaggedBatch, num_tokens: int) -> tuple[jax.Array, jax.Array]:  # [T] int32 each
    """The row of each token, and how many tokens of it come before; of padding the latter is out of range."""
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = jax.lax.cummax(jnp.where(batch.counts > 0, batch.query_offsets + batch.counts, 0))
    rows = jnp.minimum(jnp.searchsorted(ends, t, side="right").astype(jnp.int32), len(ends) - 1)
    return rows, t - batch.query_offsets[rows]


def _tile_queries(
    batch: RaggedBatch,
    counts: jax.Array,
    tile_q: int,
    num_tokens: int,
    tile_kv: int,
    window: int | None,
    causal: bool,
) -> QueryTiles:
    """Cuts `counts` queries of each row into tiles of tile_q, rows in order."""
    tiles = cut(counts, batch.query_offsets, tile=tile_q, num_items=num_tokens)
    low = batch.starts[tiles.runs] + tiles.done
    high = low + tiles.end_lanes - tiles.first_lanes - 1
    if not causal:
        high = (batch.starts + batch.counts)[tiles.runs] - 1
    oldest = jnp.zeros_like(low) if window is None else jnp.maximum(low - window + 1, 0)
    return QueryTiles(tiles=tiles, low=low, high=high, first_kv=oldest // tile_kv, end_kv=high // tile_kv + 1)
