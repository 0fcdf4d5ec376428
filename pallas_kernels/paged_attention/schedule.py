"""The work of one step's attention, computed once and shared by all layers.

A query tile is up to tile_q neighbouring queries of one row (see `ragged`); it visits the KV tiles
first_kv .. end_kv - 1 of its row's context and no others. Loops run over the number of tiles and over those
ranges, which are data, so padding costs no iteration; where tiles are computed side by side, a group costs its longest.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.ragged import Tiles, cut, static
from pallas_kernels.ragged_batch import RaggedBatch, StepShape, write_places
from pallas_kernels.shapes import check_counts

_TILE_KV = 64  # on the CPU a tile of 64 x 8 heads x 128 x f32 is 256 KB of K, which the second read finds in L2
_TILE_Q = 64
_INVARIANT_TILE_Q = 8  # a decode row fills one lane of it, and costs as much as all
# On a GPU each step of a loop is a dozen launches: tiles are large there, and as many at once as make scores of 65,536
# queries and heads by 512 keys, or read 128 MiB of K and V.
_GPU_TILE_KV = 512
_GPU_TILE_Q = 128
_GPU_QUERIES = 2**16
_GPU_KV_BYTES = 2**27


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How a step's queries and contexts are cut.

    tile_q: query tokens of one row that share a read of K and V. tile_kv: tokens of a row's context, cut at
    absolute positions. decode_tile_q: tile_q of the rows that have one query, or None where they are tiled
    like all others. has_prefill: False where no row has more than one query. together: query tiles of tile_q, and
    decode_together of decode_tile_q, that are computed side by side; 1 is one after the other. keeps_dtype: bfloat16
    is multiplied as it is and summed in float32; else all is float32.
    """

    tile_q: int
    tile_kv: int
    decode_tile_q: int | None
    has_prefill: bool
    together: int = 1
    decode_together: int = 1
    keeps_dtype: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a tile below 1."""
        check_counts(tile_q=self.tile_q, tile_kv=self.tile_kv, decode_tile_q=self.decode_tile_q)
        check_counts(together=self.together, decode_together=self.decode_together)

    @classmethod
    def choose(
        cls,
        *,
        num_tokens: int,
        block_size: int,
        decode_only: bool,
        invariant: bool,
        gpu_heads: tuple[int, KVPool] | None = None,
    ) -> AttentionConfig:
        """The tiles of a bucket of `num_tokens` tokens.

        decode_only: every row of the bucket has at most one query. invariant: one form for all rows, whose
        tiles depend on block_size alone, so that a token's bits do not depend on the bucket; num_tokens must
        then be at least 64. gpu_heads: on a GPU, query heads and their pool, or its shapes: tiles are computed side by
        side there. Raises ValueError where invariant buckets have fewer tokens.
        """
        check_counts(num_tokens=num_tokens, block_size=block_size)
        tile_kv = max(block_size, _TILE_KV)
        if invariant:
            if num_tokens < 64:
                raise ValueError(f"num_tokens is {num_tokens}; invariant attention needs buckets of at least 64 tokens")
            return cls(tile_q=_INVARIANT_TILE_Q, tile_kv=tile_kv, decode_tile_q=None, has_prefill=True)
        if gpu_heads is None:
            return cls(tile_q=min(_TILE_Q, num_tokens), tile_kv=tile_kv, decode_tile_q=1, has_prefill=not decode_only)
        (num_heads, pool), tile_kv, tile_q = gpu_heads, max(block_size, _GPU_TILE_KV), min(_GPU_TILE_Q, num_tokens)
        token_bytes = pool.values.shape[2] * pool.values.shape[3] * (2 if pool.scales is None else 4)  # as multiplied
        rows = min(_GPU_KV_BYTES // (tile_kv * token_bytes), num_tokens)
        return cls(
            tile_q=tile_q,
            tile_kv=tile_kv,
            decode_tile_q=1,
            has_prefill=not decode_only,
            together=max(1, min(_GPU_QUERIES // (num_heads * tile_q), -(-num_tokens // tile_q))),
            decode_together=max(1, rows),
            keeps_dtype=True,
        )


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
    step: StepShape = dataclasses.field(metadata={"static": True})
    tile_kv: int = static()
    keeps_dtype: bool = static()  # see AttentionConfig
    invariant: bool = static()  # all rows are tiled alike, for bits that do not depend on a step's other tokens

    def chooses(self, queries: QueryTiles, i: jax.Array, top_k: int) -> jax.Array:  # [] bool
        """Whether the queries of tile i attend to chosen keys; else each sees top_k keys at most, and so all of them.

        Invariant: they always do, for which of them share a tile depends on the step.
        """
        return jnp.asarray(True) if self.invariant else queries.high[i] >= top_k


def make_schedule(batch: RaggedBatch, step: StepShape, config: AttentionConfig) -> Schedule:
    """Where a step writes, its query tiles, and the KV tiles that each visits.

    See the package's make_schedule. Raises ValueError where the tiles do not fit the step or the blocks.
    """
    if config.tile_kv % step.block_size:
        raise ValueError(f"tile_kv is {config.tile_kv}; it must be a multiple of block_size, {step.block_size}")
    if config.decode_tile_q is None:
        parts = [(batch.counts, config.tile_q, config.together)]
    else:
        parts = [(jnp.where(batch.counts == 1, 1, 0), config.decode_tile_q, config.decode_together)]
        if config.has_prefill:
            parts.append((jnp.where(batch.counts == 1, 0, batch.counts), config.tile_q, config.together))
    write_blocks, write_offsets = write_places(batch, num_tokens=step.num_tokens, block_size=step.block_size)
    return Schedule(
        block_tables=batch.block_tables,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        passes=tuple(
            _tile_queries(batch, counts, tile, together, step, config.tile_kv) for counts, tile, together in parts
        ),
        seen_ends=batch.seen_ends,
        step=step,
        tile_kv=config.tile_kv,
        keeps_dtype=config.keeps_dtype,
        invariant=config.decode_tile_q is None,
    )


def _tile_queries(
    batch: RaggedBatch,
    counts: jax.Array,
    tile_q: int,
    together: int,
    step: StepShape,
    tile_kv: int,
) -> QueryTiles:
    """Cuts `counts` queries of each row into tiles of tile_q, rows in order."""
    tiles = cut(counts, batch.query_offsets, tile=tile_q, num_items=step.num_tokens)
    low = batch.starts[tiles.runs] + tiles.done
    high = low + tiles.end_lanes - tiles.first_lanes - 1
    if not step.causal:
        high = (batch.starts + batch.counts)[tiles.runs] - 1
    if batch.seen_ends is not None:
        high = jnp.maximum(high, _last_seen(tiles, batch.seen_ends))
    return QueryTiles(
        tiles=tiles,
        low=low,
        high=high,
        first_kv=step.oldest_seen(low) // tile_kv,
        end_kv=high // tile_kv + 1,
        together=together,
    )


def _last_seen(tiles: Tiles, seen_ends: jax.Array) -> jax.Array:  # [tiles] int32
    """The last position that a query of each tile sees beyond those before it."""
    lane = jnp.arange(tiles.tile)[None]
    own = (lane >= tiles.first_lanes[:, None]) & (lane < tiles.end_lanes[:, None])
    ends = seen_ends.at[tiles.first_items[:, None] + lane].get(mode="clip")
    return jnp.max(jnp.where(own, ends, 0), axis=1) - 1
