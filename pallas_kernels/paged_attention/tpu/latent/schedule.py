"""The work of a step over latents for the TPU; made once and shared by layers."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu.decode.schedule import DecodeSchedule, decode_schedule
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.ragged import static
from pallas_kernels.ragged_batch import RaggedBatch, StepShape, is_real, write_places


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralQueries:
    """The query tiles of rows of several queries: neighbouring tokens of one row, whose heads are queries of an item.

    A tile is tile_q flat tokens; lanes first .. last of them are its row's, the others belong to nobody.
    """

    singles: jax.Array  # [R] int32, flat tokens of the rows of one query, one behind the other; T behind the last
    is_served: jax.Array  # [T] bool, tokens of rows of several queries
    write_blocks: jax.Array  # [T] int32, where each of these is written; others to block 0
    write_offsets: jax.Array  # [T] int32
    tiles: jax.Array  # [3 * tiles] int32: first token, first and last lane
    items: DecodeSchedule  # with a query tile in place of a row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSchedule:
    """The schedule that the kernel for latents needs of a step.

    several: None where no row has more than one query; else the tokens of `decode` stand one behind the other.
    """

    decode: DecodeSchedule
    several: SeveralQueries | None
    step: StepShape = dataclasses.field(metadata={"static": True})
    config: LatentConfig = dataclasses.field(metadata={"static": True})
    num_items: int = static()  # of the largest step, idle ones too
    max_tiles: int = static()  # of a row


def make_latent_schedule(batch: RaggedBatch, step: StepShape, config: LatentConfig) -> LatentSchedule:
    """See the package's make_schedule. Raises ValueError for a window and for what is not causal."""
    if step.window is not None or not step.causal:
        raise ValueError(
            f"window is {step.window} and causal {step.causal}; the latents' kernel for TPUs attends to all before a "
            "token: take implementation 'xla'"
        )
    block_size = step.block_size
    if config.block_size != block_size:
        raise ValueError(f"block_size is {block_size}; the config was chosen for {config.block_size}")
    num_rows, max_blocks = batch.block_tables.shape
    several, of_decode = None, step
    if config.several is not None:
        is_single = batch.counts == 1
        several = _several_queries(batch, step, config.several)
        places = jnp.cumsum(is_single, dtype=jnp.int32) - 1
        counts = is_single.astype(jnp.int32)
        batch = dataclasses.replace(batch, counts=counts, query_offsets=places)
        of_decode = dataclasses.replace(step, num_tokens=num_rows)
    return LatentSchedule(
        decode=decode_schedule(batch, of_decode, config.decode),
        several=several,
        step=step,
        config=config,
        num_items=config.decode.num_steps(num_rows, max_blocks * block_size) * config.decode.items,
        max_tiles=-(-max_blocks * block_size // config.decode.tile_kv),
    )


def _several_queries(batch: RaggedBatch, step: StepShape, config: LatentConfig) -> SeveralQueries:
    R, tile_q, num_tokens = len(batch.counts), config.tile_q, step.num_tokens
    is_several = batch.counts > 1
    rows = dataclasses.replace(batch, counts=jnp.where(is_several, batch.counts, 0))
    blocks, offsets = write_places(rows, num_tokens=num_tokens, block_size=step.block_size)
    singles = jnp.sort(jnp.where(batch.counts == 1, batch.query_offsets, num_tokens))
    num_of_row = -(-rows.counts // tile_q)
    ends = jnp.cumsum(num_of_row, dtype=jnp.int32)
    i = jnp.arange(config.max_query_tiles(num_tokens, R) + 1, dtype=jnp.int32)  # one that idle items may name
    owner = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32), R - 1)
    done = (i - (ends - num_of_row)[owner]) * tile_q  # tokens of the row before the tile
    begin = batch.query_offsets[owner] + done
    end = batch.query_offsets[owner] + jnp.minimum(done + tile_q, rows.counts[owner])
    first = jnp.minimum(begin, num_tokens - tile_q)
    is_live = i < ends[-1]
    fields = [jnp.where(is_live, field, 0) for field in (first, begin - first, end - 1 - first)]
    tiles = RaggedBatch(
        block_tables=batch.block_tables,
        starts=batch.starts[owner] + end - 1 - batch.query_offsets[owner],
        counts=is_live.astype(jnp.int32),
        query_offsets=i,
    )
    return SeveralQueries(
        singles=singles,
        is_served=is_real(rows, num_tokens=num_tokens),
        write_blocks=blocks,
        write_offsets=offsets,
        tiles=jnp.stack(fields, axis=1).reshape(-1).astype(jnp.int32),
        items=decode_schedule(
            jax.tree.map(lambda x: x if x.ndim > 1 else x[:-1], tiles),
            dataclasses.replace(step, num_tokens=len(i) - 1),
            config.decode,
            owners=owner[:-1],
        ),
    )
