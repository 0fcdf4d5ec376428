"""The work of a step for the TPU decode kernel: int32 arrays, the few that a launch begins with apart from the rest."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu.decode.config import DecodeConfig
from pallas_kernels.paged_attention.tpu.decode.records import LOOK_BACK, LOW_BITS
from pallas_kernels.ragged_batch import RaggedBatch, StepShape
from pallas_kernels.table_lines import LINE, in_lines, row_lines


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSchedule:
    """The items of a step's rows of one query: one item is one KV tile of one row. See `decode/kernel.py`.

    `sizes` and `ring` are in scalar memory when a launch begins; `records.py` says what follows them there.
    """

    sizes: jax.Array  # [2] int32: steps, rows
    ring: jax.Array  # [words] int32: records and tables that scalar memory has at first, all where they are resident
    records: jax.Array | None  # [words] int32: of each step, those of LOOK_BACK idle ones first
    tables: jax.Array | None  # [lines, 128] int32: the rows' block tables

    def in_hbm(self) -> tuple[jax.Array, ...]:
        """The arrays that stay there, in the order in which kernels take them."""
        return () if self.records is None or self.tables is None else (self.records, self.tables)


def decode_schedule(
    batch: RaggedBatch, step: StepShape, config: DecodeConfig, owners: jax.Array | None = None
) -> DecodeSchedule:
    """The items of all rows that have one query. An idle item fetches nothing and its result is dropped.

    owners: [R] int32, the row whose block table each row reads; None: each row reads its own table.
    """
    R, M = len(batch.counts), batch.block_tables.shape[1]
    C, S, tile = step.block_size, config.items, config.tile_kv
    shape, decodes = config.records(C), batch.counts == 1
    oldest = step.oldest_seen(batch.starts)
    first = oldest // tile
    counts = jnp.where(decodes, batch.starts // tile + 1 - first, 0)  # [R] items
    ends = jnp.cumsum(counts)
    num_steps = config.num_steps(R, M * C)
    i = jnp.arange(-LOOK_BACK * S, num_steps * S, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32), R - 1)
    done = i - (ends - counts)[rows]
    is_live = (i >= 0) & (i < ends[-1])
    tiles = first[rows] + done
    at = jnp.where(is_live, batch.starts[rows] - tiles * tile, -1)
    low = jnp.where(is_live & (done == 0), oldest[rows] % tile, 0)  # first token of the item that the query sees
    blocks = jnp.where(is_live, jnp.minimum(at, tile - 1) // C + 1 - low // C, 0)
    is_partial = is_live & ((at < tile - 1) | (low > 0))
    table = rows if owners is None else owners[rows]
    words = jnp.where(
        is_live, table * row_lines(M) * LINE + tiles * (tile // C), 0
    )  # where the tables have the first block
    lines, places = words // LINE, i % (shape.slots * S) * shape.item_words + shape.first_line + words % LINE
    if shape.is_resident:
        places = (LOOK_BACK + num_steps) * shape.words + words
    is_first = jnp.where(is_live, done == 0, True).astype(jnp.int32)
    bits, marks = (LOW_BITS, is_first * (1 + low)) if step.chunked else (1, is_first)  # see Stream.low_bits
    tokens = (jnp.where(is_live, batch.query_offsets[rows], step.num_tokens) << bits) + marks
    of_items = [field.reshape(-1, S) for field in (at, places, tokens, lines)[: 3 if shape.is_resident else 4]]
    fetches = 2 * jnp.sum(blocks.reshape(-1, S), axis=1) + jnp.max(is_partial.reshape(-1, S).astype(jnp.int32), axis=1)
    records = jnp.concatenate([fetches[:, None], *of_items], axis=1).astype(jnp.int32)
    records = jnp.pad(records, ((0, 0), (0, shape.words - records.shape[1])))
    sizes = jnp.stack([-(-ends[-1] // S), jnp.sum(decodes)]).astype(jnp.int32)
    tables = in_lines(batch.block_tables, tile // C)
    if shape.is_resident:
        ring = jnp.concatenate([records.reshape(-1), tables.reshape(-1)])
        return DecodeSchedule(sizes=sizes, ring=ring, records=None, tables=None)
    records, lines = shape.in_chunks(records), lines.reshape(-1, S)[LOOK_BACK : LOOK_BACK + config.ahead]
    return DecodeSchedule(sizes=sizes, ring=shape.ring(records, tables, lines), records=records, tables=tables)
