"""The work of a step for the TPU decode kernel: int32 arrays for scalar memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu.decode.config import LOOK_BACK, DecodeConfig
from pallas_kernels.ragged_batch import RaggedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSchedule:
    """The items of a step's rows of one query: one item is one KV tile of one row. See `decode/kernel.py`.

    Items of LOOK_BACK idle steps come first; an idle item fetches nothing and its result is dropped.
    """

    sizes: jax.Array  # [2] int32: steps, rows
    fetches: jax.Array  # [steps] int32: 2 * blocks to fetch + whether an item has tokens that are not visible
    places: jax.Array  # [items] int32: the row's position less the item's first; negative where idle
    first_blocks: jax.Array  # [items] int32: index of the item's first block in tables
    tokens: jax.Array  # [items] int32: 2 * the row's flat token + whether this is its first item
    tables: jax.Array  # [R * M + blocks of a tile] int32

    def arrays(self) -> tuple[jax.Array, ...]:
        """In the order in which the kernel takes them."""
        return self.sizes, self.fetches, self.places, self.first_blocks, self.tokens, self.tables


def decode_schedule(
    batch: RaggedBatch,
    *,
    num_tokens: int,
    block_size: int,
    config: DecodeConfig,
    window: int | None,
) -> DecodeSchedule:
    """The items of all rows that have one query."""
    R, M = batch.block_tables.shape
    C, S, tile = block_size, config.items, config.tile_kv
    decodes = batch.counts == 1
    first = jnp.zeros_like(batch.starts) if window is None else jnp.maximum(batch.starts - window + 1, 0) // tile
    counts = jnp.where(decodes, batch.starts // tile + 1 - first, 0)  # [R] items
    ends = jnp.cumsum(counts)
    i = jnp.arange(-LOOK_BACK * S, (config.max_steps(R, M * C) + config.ahead) * S, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32), R - 1)
    done = i - (ends - counts)[rows]
    is_live = (i >= 0) & (i < ends[-1])
    tiles = first[rows] + done
    at = jnp.where(is_live, batch.starts[rows] - tiles * tile, -1)
    low = jnp.zeros_like(at) if window is None else jnp.maximum(at - window + 1, 0)
    blocks = jnp.where(is_live, jnp.minimum(at, tile - 1) // C + 1 - low // C, 0)
    is_partial = is_live & ((at < tile - 1) | (low > 0))
    steps = slice(LOOK_BACK * S, None)
    return DecodeSchedule(
        sizes=jnp.stack([-(-ends[-1] // S), jnp.sum(decodes)]).astype(jnp.int32),
        fetches=(
            2 * jnp.sum(blocks[steps].reshape(-1, S), axis=1)
            + jnp.any(is_partial[steps].reshape(-1, S), axis=1).astype(jnp.int32)
        ).astype(jnp.int32),
        places=at,
        first_blocks=jnp.where(is_live, rows * M + tiles * (tile // C), 0).astype(jnp.int32),
        tokens=jnp.where(
            is_live, 2 * batch.query_offsets[rows] + (done == 0).astype(jnp.int32), 2 * num_tokens + 1
        ).astype(jnp.int32),
        tables=jnp.pad(batch.block_tables.reshape(-1), (0, tile // C)),
    )
