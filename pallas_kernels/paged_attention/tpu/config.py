"""The specialisation of one step's Mosaic TPU kernels, and whether it fits the target's memories."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write.runs import RUN_WORDS
from pallas_kernels.paged_attention.tpu.decode.config import SMEM_SHARE, DecodeConfig, DecodeShape
from pallas_kernels.paged_attention.tpu.prefill.config import SMEM_FIXED, PrefillConfig, PrefillShape
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuConfig:
    """The specialisation of one step's kernels.

    prefill: None where the decode kernel serves all rows; else rows of prefill_from queries or more are for that one.
    """

    shape: DecodeShape
    decode: DecodeConfig
    prefill: PrefillConfig | None
    prefill_from: int = 2

    @classmethod
    def choose(
        cls,
        *,
        num_tokens: int,
        num_rows: int,
        max_blocks: int,
        num_heads: int,
        dtype: jnp.dtype,
        pool: KVPool,
        decode_only: bool,
        target: Target,
        tiles: Mapping[str, int] | None = None,
    ) -> TpuConfig:
        """The tiles of a bucket of num_tokens tokens and num_rows rows of up to max_blocks blocks.

        num_heads, pool: of one device; pool may be shapes. decode_only: no row has more than one query. tiles: of
        decode, in place of its own choice. Raises ValueError where the pool or the step does not fit the kernels or the
        target's memories.
        """
        shape = DecodeShape.of(num_heads=num_heads, num_kv_heads=pool.num_kv_heads, dtype=dtype, pool=pool)
        decode = DecodeConfig.choose(shape, target, tiles).for_tables(num_rows, max_blocks, pool.block_size, target)
        assert target.vmem_bytes is not None and target.smem_bytes is not None, "a TPU target has both"
        assert target.mxu_columns is not None, "a TPU target has matrix units"
        prefill = None
        if shape.is_unloadable or not decode_only:
            prefill = PrefillConfig.choose(
                PrefillShape.of(num_heads=num_heads, dtype=dtype, pool=pool),
                num_tokens=num_tokens,
                max_context=max_blocks * pool.block_size,
                vmem_bytes=target.vmem_bytes,
                mxu_columns=target.mxu_columns,
            )
        config = cls(shape=shape, decode=decode, prefill=prefill, prefill_from=1 if shape.is_unloadable else 2)
        scalars = config.scalar_bytes(num_tokens, num_rows, max_blocks)
        if scalars > target.smem_bytes * SMEM_SHARE:
            raise ValueError(
                f"schedules of {num_tokens} tokens and {num_rows} rows take {scalars} bytes of scalar memory; "
                f"{target.generation} has {target.smem_bytes} and {SMEM_SHARE:.0%} of that may be used: take fewer "
                f"tokens or rows a step"
            )
        vectors = decode.vmem_bytes(shape, num_tokens if prefill is None else num_rows)
        if config.prefill_from > 1 and vectors > decode.vmem_limit_bytes:  # else its kernel is not launched
            raise ValueError(
                f"attention of {num_tokens} tokens, {num_heads} heads and {pool.num_kv_heads} KV heads takes {vectors} "
                f"bytes of vector memory; of {target.generation}'s {target.vmem_bytes} it may use "
                f"{decode.vmem_limit_bytes}: take fewer tokens a step, or spread heads over more devices"
            )
        return config

    def scalar_bytes(self, num_tokens: int, num_rows: int, max_blocks: int) -> int:
        """Scalar memory that a step of so many tokens and rows takes, of the kernel that takes most."""
        C = self.shape.block_size
        kernels = [0 if self.shape.is_unloadable else self.decode.smem_bytes(num_rows, max_blocks, C)]
        if self.prefill is not None:
            kernels.append(self.prefill.smem_bytes(num_tokens, num_rows, C))
        has_scales = self.shape.pool_dtype == jnp.int8
        if self.prefill is not None or has_scales:
            kernels.append(SMEM_FIXED + 4 * (RUN_WORDS if has_scales else RUN_WORDS - 1) * num_tokens)
        return max(kernels)
