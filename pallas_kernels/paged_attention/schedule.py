"""The work of one step's attention, computed once and shared by all layers.

A query tile is up to tile_q neighbouring queries of one row (see `ragged`); it visits the KV tiles
first_kv .. end_kv - 1 of its row's context and no others. Loops run over the number of tiles and over those
ranges, which are data, so padding costs no iteration; where tiles are computed side by side, a group costs its longest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.xla_config import AttentionConfig
from pallas_kernels.ragged import Tiles, cut, static
from pallas_kernels.ragged_batch import RaggedBatch, oldest_seen, write_places


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTiles:
    """Query tiles of one size and what each attends to."""

    tiles: Tiles  # runs are rows, items are flat tokens
    low: jax.Array  # [tiles] int32, position of the tile's first query
    high: jax.Array  # [tiles] int32, last position that one of its queries sees
    first_kv: jax.Array  # [tiles] int32, KV tiles first .. end - 1 hold what these queries attend to
    end_kv: jax.Array  # [tiles] int32
    together: int = static()  # tiles that are computed side by side


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule that paged_attention needs of a step, for all layers of one window."""

    block_tables: jax.Array  # [R, M] int32
    write_blocks: jax.Array  # [T] int32, where each token's K and V go; padding tokens go to block 0
    write_offsets: jax.Array  # [T] int32
    passes: tuple[QueryTiles, ...]  # one after the other
    seen_ends: jax.Array | None  # [T] int32, see RaggedBatch
    num_tokens: int = static()
    block_size: int = static()
    tile_kv: int = static()
    window: int | None = static()
    chunked: bool = static()
    causal: bool = static()
    keeps_dtype: bool = static()  # see AttentionConfig
    invariant: bool = static()  # all rows are tiled alike, for bits that do not depend on a step's other tokens

    def chooses(self, queries: QueryTiles, i: jax.Array, top_k: int) -> jax.Array:  # [] bool
        """Whether the queries of tile i attend to chosen keys; else each sees top_k keys at most, and so all of them.

        Invariant: they always do, for which of them share a tile depends on the step.
        """
        return jnp.asarray(True) if self.invariant else queries.high[i] >= top_k


def make_schedule(
    batch: RaggedBatch,
    *,
    num_tokens: int,
    block_size: int,
    config: AttentionConfig,
    window: int | None = None,
    chunked: bool = False,
    causal: bool = True,
) -> Schedule:
    """Where a step of `num_tokens` flat tokens writes, its query tiles, and the KV tiles that each visits.

    See the package's make_schedule. Raises ValueError where the tiles do not fit the step or the blocks.
    """
    if config.tile_kv % block_size:
        raise ValueError(f"tile_kv is {config.tile_kv}; it must be a multiple of block_size, {block_size}")
    if config.decode_tile_q is None:
        parts = [(batch.counts, config.tile_q, config.together)]
    else:
        parts = [(jnp.where(batch.counts == 1, 1, 0), config.decode_tile_q, config.decode_together)]
        if config.has_prefill:
            parts.append((jnp.where(batch.counts == 1, 0, batch.counts), config.tile_q, config.together))
    oldest = functools.partial(oldest_seen, window=window, chunked=chunked)
    write_blocks, write_offsets = write_places(batch, num_tokens=num_tokens, block_size=block_size)
    return Schedule(
        block_tables=batch.block_tables,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        passes=tuple(
            _tile_queries(batch, counts, tile, together, num_tokens, config.tile_kv, oldest, causal)
            for counts, tile, together in parts
        ),
        seen_ends=batch.seen_ends,
        num_tokens=num_tokens,
        block_size=block_size,
        tile_kv=config.tile_kv,
        window=window,
        chunked=chunked,
        causal=causal,
        keeps_dtype=config.keeps_dtype,
        invariant=config.decode_tile_q is None,
    )


def _tile_queries(
    batch: RaggedBatch,
    counts: jax.Array,
    tile_q: int,
    together: int,
    num_tokens: int,
    tile_kv: int,
    oldest: Callable[[jax.Array], jax.Array],
    causal: bool,
) -> QueryTiles:
    """Cuts `counts` queries of each row into tiles of tile_q, rows in order."""
    tiles = cut(counts, batch.query_offsets, tile=tile_q, num_items=num_tokens)
    low = batch.starts[tiles.runs] + tiles.done
    high = low + tiles.end_lanes - tiles.first_lanes - 1
    if not causal:
        high = (batch.starts + batch.counts)[tiles.runs] - 1
    if batch.seen_ends is not None:
        high = jnp.maximum(high, _last_seen(tiles, batch.seen_ends))
    return QueryTiles(
        tiles=tiles,
        low=low,
        high=high,
        first_kv=oldest(low) // tile_kv,
        end_kv=high // tile_kv + 1,
        together=together,
    )


def _last_seen(tiles: Tiles, seen_ends: jax.Array) -> jax.Array:  # [tiles] int32
    """The last position that a query of each tile sees beyond those before it."""
    lane = jnp.arange(tiles.tile)
    own = (lane >= tiles.first_lanes[:, None]) & (lane < tiles.end_lanes[:, None])
    ends = seen_ends.at[tiles.first_items[:, None] + lane].get(mode="clip")
    return jnp.max(jnp.where(own, ends, 0), axis=1) - 1
