"""How a step is shared out between the Mosaic TPU kernels; made once and shared by layers."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.runs import Runs, find_runs
from pallas_kernels.paged_attention.tpu.config import TpuConfig
from pallas_kernels.paged_attention.tpu.decode.schedule import DecodeSchedule, decode_schedule
from pallas_kernels.paged_attention.tpu.prefill.schedule import PrefillSchedule, make_prefill_schedule
from pallas_kernels.ragged_batch import RaggedBatch, StepShape, is_real, write_places


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
    """The schedule that the Mosaic TPU kernels need of a step, for all layers of one window.

    mixed: None where no row has more than one query; else the decode kernel's tokens stand by row, R of them.
    """

    decode: DecodeSchedule
    mixed: MixedSchedule | None
    scale_runs: Runs | None  # where scales of all tokens are written, of an int8 pool
    step: StepShape = dataclasses.field(metadata={"static": True})
    config: TpuConfig = dataclasses.field(metadata={"static": True})


def make_schedule(batch: RaggedBatch, step: StepShape, config: TpuConfig) -> TpuSchedule:
    """See the package's make_schedule."""
    num_tokens, block_size = step.num_tokens, step.block_size
    if config.shape.block_size != block_size:
        raise ValueError(f"block_size is {block_size}; the config was chosen for {config.shape.block_size}")
    mixed, scale_runs, of_decode = None, None, step
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
            tiles=make_prefill_schedule(several, step, config.prefill),
        )
        batch = dataclasses.replace(batch, query_offsets=jnp.arange(len(batch.counts), dtype=jnp.int32))
        of_decode = dataclasses.replace(step, num_tokens=len(batch.counts))
    decode = decode_schedule(batch, of_decode, config.decode)
    return TpuSchedule(decode=decode, mixed=mixed, scale_runs=scale_runs, step=step, config=config)
