"""The work of a step for the Mosaic TPU kernels: int32 arrays for scalar memory, made once and shared by layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.runs import Runs, find_runs
from pallas_kernels.paged_attention.schedule import RaggedBatch, is_real, write_places
from pallas_kernels.paged_attention.tpu_config import LOOK_BACK, DecodeConfig, TpuConfig
from pallas_kernels.paged_attention.tpu_prefill_schedule import PrefillSchedule, make_prefill_schedule
from pallas_kernels.ragged import static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSchedule:
    """The items of a step's rows of one query: one item is one KV tile of one row. See tpu_decode.

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedSchedule:
    """How a step in which rows may have several queries is shared out between the two kernels."""

    singles: jax.Array  # [R] int32, flat token of each row of one query; T for other rows
    is_served: jax.Array  # [T] bool, tokens of rows of several queries
    runs: Runs  # where K and V of these are written
    tiles: PrefillSchedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuSchedule:
    """What the Mosaic TPU kernels need to know of a step, for all layers of one window.

    mixed: None where no row has more than one query; else the decode kernel's tokens stand by row, R of them.
    """

    decode: DecodeSchedule
    mixed: MixedSchedule | None
    scale_runs: Runs | None  # where scales of all tokens are written, of an int8 pool
    num_tokens: int = static()
    block_size: int = static()
    config: TpuConfig = dataclasses.field(metadata={"static": True})
    window: int | None = static()
    causal: bool = static()


def make_schedule(
    batch: RaggedBatch, *, num_tokens: int, block_size: int, config: TpuConfig, window: int | None, causal: bool
) -> TpuSchedule:
    """See the package's make_schedule."""
    if config.shape.block_size != block_size:
        raise ValueError(f"block_size is {block_size}; the config was chosen for {config.shape.block_size}")
    mixed = scale_runs = None
    if config.shape.pool_dtype == jnp.int8:
        scale_runs = find_runs(*write_places(batch, num_tokens=num_tokens, block_size=block_size))
    if config.prefill is not None:
        is_several = batch.counts >= config.prefill_from
        several = dataclasses.replace(batch, counts=jnp.where(is_several, batch.counts, 0))
        batch = dataclasses.replace(batch, counts=jnp.where(is_several, 0, batch.counts))
        blocks, offsets = write_places(several, num_tokens=num_tokens, block_size=block_size)
        mixed = MixedSchedule(
            singles=jnp.where(batch.counts == 1, batch.query_offsets, num_tokens),
            is_served=is_real(several, num_tokens=num_tokens),
            runs=find_runs(blocks, offsets),
            tiles=make_prefill_schedule(
                several, num_tokens=num_tokens, config=config.prefill, window=window, causal=causal
            ),
        )
        batch = dataclasses.replace(batch, query_offsets=jnp.arange(len(batch.counts), dtype=jnp.int32))
    decode = decode_schedule(
        batch,
        num_tokens=num_tokens if mixed is None else len(batch.counts),
        block_size=block_size,
        config=config.decode,
        window=window,
    )
    return TpuSchedule(
        decode=decode,
        mixed=mixed,
        scale_runs=scale_runs,
        num_tokens=num_tokens,
        block_size=block_size,
        config=config,
        window=window,
        causal=causal,
    )


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
            2 * jnp.sum(blocks[steps].reshape(-1, S), axis=1) + jnp.any(is_partial[steps].reshape(-1, S), axis=1)
        ).astype(jnp.int32),
        places=at,
        first_blocks=jnp.where(is_live, rows * M + tiles * (tile // C), 0).astype(jnp.int32),
        tokens=jnp.where(is_live, 2 * batch.query_offsets[rows] + (done == 0), 2 * num_tokens + 1).astype(jnp.int32),
        tables=jnp.pad(batch.block_tables.reshape(-1), (0, tile // C)),
    )
