"""The work of a step over latents for the TPU; made once and shared by layers."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.paged_attention.tpu.decode.schedule import DecodeSchedule, decode_schedule
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.ragged import static
from pallas_kernels.ragged_batch import RaggedBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSchedule:
    """The schedule that the kernel for latents needs of a step in which no row has more than one query."""

    decode: DecodeSchedule
    num_tokens: int = static()
    block_size: int = static()
    config: LatentConfig = dataclasses.field(metadata={"static": True})
    window: int | None = static()
    causal: bool = static()
    num_items: int = static()  # of the largest step, idle ones too
    max_tiles: int = static()  # of a row


def make_latent_schedule(
    batch: RaggedBatch, *, num_tokens: int, block_size: int, config: LatentConfig, window: int | None, causal: bool
) -> LatentSchedule:
    """See the package's make_schedule. Raises ValueError for a window and for what is not causal."""
    if window is not None or not causal:
        raise ValueError(
            f"window is {window} and causal {causal}; the latents' kernel for TPUs attends to all before a token: "
            "take implementation 'xla'"
        )
    if config.block_size != block_size:
        raise ValueError(f"block_size is {block_size}; the config was chosen for {config.block_size}")
    decode = decode_schedule(batch, num_tokens=num_tokens, block_size=block_size, config=config.decode, window=window)
    num_rows, max_blocks = batch.block_tables.shape
    return LatentSchedule(
        decode=decode,
        num_tokens=num_tokens,
        block_size=block_size,
        config=config,
        window=window,
        causal=causal,
        num_items=config.decode.num_steps(num_rows, max_blocks * block_size) * config.decode.items,
        max_tiles=-(-max_blocks * block_size // config.decode.tile_kv),
    )
