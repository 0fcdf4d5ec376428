"""The work of one step's attention for the GPU's kernels, computed once and shared by all layers.

An item is one query tile of a row and the KV tiles that it visits; the kernels run each item for each KV head. A
decoding row is one tile whose context is cut at multiples of `split` tokens, so that neither the other rows of a step
nor the number of programs decides how a row's softmax is summed.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu.config import Form, GpuConfig
from pallas_kernels.ragged import static
from pallas_kernels.ragged_batch import RaggedBatch, StepShape, rows_of_tokens, write_places


class Field(enum.IntEnum):
    """Columns of an item."""

    ROW = 0
    TILE = 1  # where its queries stand; of a decoding row, the row
    SPLIT = 2  # where its result stands among the row's
    LOW = 3  # position of the tile's first query
    HIGH = 4  # last position that one of its queries sees
    OLDEST = 5  # first position that one of its queries sees
    FIRST_KV = 6  # KV tiles first .. end - 1
    END_KV = 7
    FIRST_FULL = 8  # those in which every query sees every token
    END_FULL = 9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkItems:
    """Items of one kernel; entries from num_items on must not be run."""

    num_items: jax.Array  # [1] int32
    items: jax.Array  # [items, fields] int32
    num_splits: jax.Array  # [R] int32, items of each decoding row; 0 elsewhere
    tokens: jax.Array  # [tiles, tile_q] int32, flat index of each query of a tile
    tiles: jax.Array  # [T] int32, the tile that holds each token
    places: jax.Array  # [T] int32, and where in it
    is_mine: jax.Array  # [T] bool, tokens that this kernel serves
    last_seen: jax.Array | None  # [tiles, tile_q] int32, position; None where a query sees what is before it alone
    max_splits: int = static()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuSchedule:
    """The schedule that paged_attention needs of a step, for all layers of one window."""

    block_tables: jax.Array  # [R, M] int32
    write_blocks: jax.Array  # [T] int32
    write_offsets: jax.Array  # [T] int32
    decode: WorkItems
    prefill: WorkItems | None
    config: GpuConfig = dataclasses.field(metadata={"static": True})
    step: StepShape = dataclasses.field(metadata={"static": True})


def make_schedule(batch: RaggedBatch, step: StepShape, config: GpuConfig) -> GpuSchedule:
    """See the package's make_schedule."""
    is_decode = batch.counts == 1
    parts = [(jnp.where(is_decode, 1, 0), config.decode)]
    if config.prefill is not None:
        parts.append((jnp.where(is_decode, 0, batch.counts), config.prefill))
    works = [_make_work(batch, counts, form, step) for counts, form in parts]
    write_blocks, write_offsets = write_places(batch, num_tokens=step.num_tokens, block_size=step.block_size)
    return GpuSchedule(
        block_tables=jnp.maximum(batch.block_tables, 0),  # a copy, for kernels refuse parts of other arrays
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        decode=works[0],
        prefill=works[1] if len(works) > 1 else None,
        config=config,
        step=step,
    )


def _make_work(
    batch: RaggedBatch,
    counts: jax.Array,  # [R] int32, queries of each row that this kernel serves
    form: Form,
    step: StepShape,
) -> WorkItems:
    R, tile, is_decode = len(counts), form.tile_q, form.split is not None
    num_tokens, causal = step.num_tokens, step.causal
    limits = batch.block_tables.shape[1] * step.block_size, step.window
    num_tiles = -(-counts // tile)
    tile_ends = jnp.cumsum(num_tiles)
    capacity = R if is_decode else num_tokens // tile + R
    rows, done = _which(tile_ends, num_tiles, capacity)
    if is_decode:
        rows, done = jnp.arange(R, dtype=jnp.int32), jnp.zeros(R, jnp.int32)  # so that a row's tile is the row
    done *= tile
    low = batch.starts[rows] + done
    last = low + jnp.clip(counts[rows] - done, 1, tile) - 1
    high, last_seen = last if causal else (batch.starts + batch.counts)[rows] - 1, None
    of = jnp.clip(batch.query_offsets[rows] + done, 0, num_tokens - 1)
    tokens = jnp.minimum(of[:, None] + jnp.arange(tile)[None], num_tokens - 1).astype(jnp.int32)
    if batch.seen_ends is not None and not is_decode:  # a row computes all that it sees: one query, itself at most
        positions = low[:, None] + jnp.arange(tile)[None]
        ends = jnp.where(positions <= last[:, None], batch.seen_ends[tokens], 0)
        last_seen = jnp.maximum(positions, ends - 1).astype(jnp.int32)
        high = jnp.maximum(high, ends.max(axis=1) - 1)
    # what the first query sees, and what all do
    oldest, within = map(step.oldest_seen, (low, last))
    first_kv, end_kv = oldest // form.tile_kv, high // form.tile_kv + 1
    full = jnp.stack([-(-within // form.tile_kv), ((low if causal else high) + 1) // form.tile_kv])
    per_tile = jnp.stack([rows, jnp.arange(capacity), jnp.zeros_like(low), low, high, oldest, first_kv, end_kv, *full])
    per_tile = per_tile.astype(jnp.int32).T
    token_rows, token_done, is_mine = _tokens(batch, counts, num_tokens)
    tiles = token_rows if is_decode else (tile_ends - num_tiles)[token_rows] + token_done // tile
    is_used, max_splits = counts[rows] > 0, 1
    if form.split is None:
        items, num_items = per_tile, tile_ends[-1]
        num_splits = jnp.zeros_like(counts)
    else:
        items, num_items, num_splits = _split(per_tile, is_used, form, *limits)
        max_splits = _max_splits(form.split, *limits)
    return WorkItems(
        num_items=num_items.astype(jnp.int32).reshape(1),
        items=items,
        num_splits=num_splits.astype(jnp.int32),
        tokens=tokens,
        tiles=jnp.clip(tiles, 0, capacity - 1).astype(jnp.int32),
        places=(token_done % tile).astype(jnp.int32),
        is_mine=is_mine,
        last_seen=last_seen,
        max_splits=max_splits,
    )


def _split(
    tiles: jax.Array,  # [R, fields]
    is_used: jax.Array,  # [R] bool
    form: Form,
    max_tokens: int,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # items, their number, [R] the items of each tile
    """Tiles whose KV tiles are cut at multiples of the split."""
    assert form.split is not None
    width = form.split // form.tile_kv
    first = tiles[:, Field.FIRST_KV] // width
    num_splits = jnp.where(is_used, -(-tiles[:, Field.END_KV] // width) - first, 0)
    ends = jnp.cumsum(num_splits)
    of, split = _which(ends, num_splits, len(tiles) * _max_splits(form.split, max_tokens, window))
    items, begin = tiles[of], (first[of] + split) * width
    columns = {
        Field.SPLIT: split,
        Field.FIRST_KV: jnp.maximum(items[:, Field.FIRST_KV], begin),
        Field.END_KV: jnp.minimum(items[:, Field.END_KV], begin + width),
    }
    for field, values in columns.items():  # selected, not written: XLA makes one launch of it instead of nine
        items = jnp.where(jnp.arange(len(Field))[None] == field, values[:, None], items)
    return items, ends[-1], num_splits


def _max_splits(split: int, max_tokens: int, window: int | None) -> int:
    most = -(-max_tokens // split)
    return most if window is None else min(most, -(-window // split) + 1)


def _which(ends: jax.Array, counts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The run of each of `capacity` neighbours, and its place in that run; runs end at `ends`."""
    i = jnp.arange(capacity, dtype=jnp.int32)
    runs = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all"), len(ends) - 1).astype(jnp.int32)
    return runs, (i - (ends - counts)[runs]).astype(jnp.int32)


def _tokens(batch: RaggedBatch, counts: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row of each flat token, its place among the row's queries, and whether it is one of `counts`."""
    rows, done = rows_of_tokens(batch, num_tokens)
    return rows, jnp.maximum(done, 0), (done >= 0) & (done < counts[rows])
