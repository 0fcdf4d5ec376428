"""The query tiles of a step for the TPU prefill kernel: plain integers, made once a step, read as scalars.

A tile is tile_q neighbouring flat tokens that start at a multiple of ALIGNMENT; it serves one row, its other lanes
belong to neighbours or to nobody.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu.prefill.config import ALIGNMENT, LANES, PrefillConfig
from pallas_kernels.ragged import static
from pallas_kernels.ragged_batch import RaggedBatch, StepShape
from pallas_kernels.table_lines import LINE, in_lines, num_lines, row_lines

_FIELDS = (
    "row",
    "first_token",
    "first_lane",
    "end_lane",
    "position",
    "end_position",
    "first_kv",
    "end_kv",
    "sees_ahead",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSchedule:
    """Scalars of the kernel. Entries of `tiles` from num_tiles on are not run. Tables stay in HBM but for `lines`."""

    num_tiles: jax.Array  # [1] int32
    tiles: jax.Array  # [tiles * 9] int32, the fields of Tile
    lines: jax.Array  # [2 * words of a KV tile's lines] int32: those of the first KV tile, and room for the next one's
    tables: jax.Array  # [lines, 128] int32: the rows' block tables
    ends: jax.Array | None  # [tokens, 128] int32, lanes alike: what RaggedBatch.seen_ends has
    row_lines: int = static()
    config: PrefillConfig = dataclasses.field(metadata={"static": True})
    step: StepShape = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One query tile as the kernel reads it; every field is an int32 scalar."""

    row: jax.Array
    first_token: jax.Array  # flat index of lane 0, a multiple of ALIGNMENT
    first_lane: jax.Array  # lanes first .. end - 1 are the row's
    end_lane: jax.Array
    position: jax.Array  # of lane 0; lanes before first_lane may have negative ones
    end_position: jax.Array  # no query of the tile sees it or what follows
    first_kv: jax.Array  # KV tiles first .. end - 1 hold what the tile may see
    end_kv: jax.Array
    sees_ahead: jax.Array  # 1 where a query sees a key behind its own

    @classmethod
    def read(cls, ref: jax.Array, t: jax.Array) -> Tile:
        """Tile t of PrefillSchedule.tiles."""
        return cls(**{name: ref[t * len(_FIELDS) + i] for i, name in enumerate(_FIELDS)})

    @property
    def low(self) -> jax.Array:
        """Position of the first query."""
        return self.position + self.first_lane

    @property
    def high(self) -> jax.Array:
        """Position of the last query."""
        return self.position + self.end_lane - 1


def make_prefill_schedule(batch: RaggedBatch, step: StepShape, config: PrefillConfig) -> PrefillSchedule:
    """The query tiles of all rows, rows in order."""
    (R, M), counts, tile_q, num_tokens = batch.block_tables.shape, batch.counts, config.tile_q, step.num_tokens
    padded = -(-max(num_tokens, tile_q) // ALIGNMENT) * ALIGNMENT
    aligned = batch.query_offsets // ALIGNMENT * ALIGNMENT
    num_of_row = jnp.where(counts > 0, -(-(batch.query_offsets - aligned + counts) // tile_q), 0)  # [R]
    ends = jnp.cumsum(num_of_row)
    i = jnp.arange(config.max_tiles(num_tokens, R), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all"), R - 1).astype(jnp.int32)
    begin = aligned[row] + (i - (ends - num_of_row)[row]) * tile_q  # flat, before the tile is moved back to fit
    first = jnp.maximum(batch.query_offsets[row], begin)
    end = jnp.minimum((batch.query_offsets + counts)[row], begin + tile_q)
    first_token = jnp.minimum(begin, padded - tile_q)
    position = batch.starts[row] + first_token - batch.query_offsets[row]
    lanes = first - first_token, end - first_token
    seen_ends = None if batch.seen_ends is None else jnp.pad(batch.seen_ends, (0, padded - num_tokens))
    if not step.causal:
        end_position, sees_ahead = (batch.starts + counts)[row], jnp.zeros_like(row)
    else:
        end_position, sees_ahead = _furthest_seen(seen_ends, first_token, lanes, position, tile_q)
    oldest = step.oldest_seen(position + lanes[0])
    fields = {
        "row": row,
        "first_token": first_token,
        "first_lane": lanes[0],
        "end_lane": lanes[1],
        "position": position,
        "end_position": end_position,
        "first_kv": oldest // config.tile_kv,
        "end_kv": -(-end_position // config.tile_kv),
        "sees_ahead": sees_ahead,
    }
    blocks = config.tile_kv // step.block_size
    tables, first = in_lines(batch.block_tables, blocks), row[0] * row_lines(M) + fields["first_kv"][0] * blocks // LINE
    first_lines = tables[first + jnp.arange(num_lines(blocks))].reshape(-1)
    return PrefillSchedule(
        num_tiles=ends[-1:].astype(jnp.int32),
        tiles=jnp.stack([fields[name] for name in _FIELDS], axis=1).reshape(-1).astype(jnp.int32),
        lines=jnp.concatenate([first_lines, jnp.zeros_like(first_lines)]),
        tables=tables,
        ends=None if seen_ends is None else jnp.broadcast_to(seen_ends[:, None], (padded, LANES)),
        row_lines=row_lines(M),
        config=config,
        step=step,
    )


def _furthest_seen(
    seen_ends: jax.Array | None,  # [tokens]
    first_token: jax.Array,  # [tiles]
    lanes: tuple[jax.Array, jax.Array],  # [tiles] each: the row's first, and the end of its own
    position: jax.Array,  # [tiles], of lane 0
    tile_q: int,
) -> tuple[jax.Array, jax.Array]:
    """[tiles] each: from which position on no query of a tile sees; 1 where one sees behind its own key."""
    first, end = lanes
    if seen_ends is None:
        return position + end, jnp.zeros_like(end)
    lane = jnp.arange(tile_q)
    own = (lane >= first[:, None]) & (lane < end[:, None])
    ends = jnp.where(own, seen_ends.at[first_token[:, None] + lane].get(mode="clip"), 0)
    sees_ahead = jnp.any(ends > position[:, None] + lane + 1, axis=1)
    return jnp.maximum(position + end, jnp.max(ends, axis=1)), sees_ahead.astype(jnp.int32)
