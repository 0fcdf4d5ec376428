"""Tiles of the TPU's kernel for latents and the memory they take: pure functions of shapes, dtypes and the target."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.tpu.decode.config import LANES, RING, DecodeConfig
from pallas_kernels.paged_attention.tpu.prefill.config import COMPILER_BYTES, tiled_bytes
from pallas_kernels.target import Target

GROUP_BYTES = 32  # of one lane: tokens that a transfer of new ones has, as many as fill a tile of the pool's dtype
_TILE = 1024  # tokens of an item
_ITEMS_OF_FEW = 2  # of a step: independent work that hides each stage's latency
_MANY_HEADS = 64  # whose item is enough of it
_QUERIES = 512  # heads of all tokens of a query tile: each load of a latent then serves as many as a matrix unit wants
_VMEM_SHARE = 0.75  # the rest is the compiler's
_PACKED_ROWS = 16  # of a tile of 16-bit values: heads of two tokens then lie one behind the other
QUERY_TILE_WORDS = 3  # of scalar memory for each
_SCALARS_OF_V7X = 4096  # bytes that libtpu 0.0.42 takes there for two bfloat16 items, beside what it takes always


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The specialisation of one step's kernel. A latent has `lanes` values, the first `value_dim` of them V.

    num_heads: padded to a multiple of 8. decode: tiles, as the other decode kernel has them. compiler_scalars: bytes
    of scalar memory that the target's compiler takes beside. tile_q: tokens of a row whose heads are an item's queries.
    several: of the launch for rows of several queries; None where no row has more than one.
    """

    num_heads: int
    lanes: int
    value_dim: int
    block_size: int
    pool_dtype: jnp.dtype
    compute_dtype: jnp.dtype
    decode: DecodeConfig
    compiler_scalars: int = 0
    tile_q: int = 1
    several: LatentConfig | None = None

    @classmethod
    def choose(
        cls,
        *,
        num_rows: int,
        max_blocks: int,
        num_heads: int,
        dtype: jnp.dtype,
        pool: KVPool,
        target: Target,
        mixed_tokens: int | None = None,
    ) -> LatentConfig:
        """The tiles of a bucket of num_rows rows of up to max_blocks blocks; rows of one model always get the same.

        num_heads, pool: of one device; pool may be shapes. mixed_tokens: of a bucket whose rows may have several.
        """
        assert target.vmem_bytes is not None, "a TPU target has it"
        tile = max(_TILE, pool.block_size)
        compute_dtype = jnp.dtype(dtype if pool.dtype.itemsize == 1 or pool.dtype == dtype else jnp.float32)
        items = 1 if num_heads >= _MANY_HEADS else _ITEMS_OF_FEW
        takes_more = target.generation == "v7x" and compute_dtype == jnp.bfloat16 and items > 1
        one = cls(
            num_heads=-(-num_heads // 8) * 8,
            lanes=pool.key_dim,
            value_dim=pool.value_dim,
            block_size=pool.block_size,
            pool_dtype=pool.dtype,
            compute_dtype=compute_dtype,
            decode=DecodeConfig(
                tile_kv=tile,
                chunk=tile,  # in one dot: a sum of several is a chain of them
                items=items,
                vmem_limit_bytes=int(target.vmem_bytes * _VMEM_SHARE),
            ).for_tables(num_rows, max_blocks, pool.block_size, target),
            compiler_scalars=_SCALARS_OF_V7X if takes_more else 0,
        )
        return one if mixed_tokens is None else dataclasses.replace(one, several=one.for_several(mixed_tokens))

    def for_several(self, num_tokens: int) -> LatentConfig:
        """The config of the launch that serves rows of several queries, in a step of so many tokens."""
        heads = -(-self.num_heads // _PACKED_ROWS) * _PACKED_ROWS
        most = max(1, min(_QUERIES // heads, num_tokens))
        tiles = dataclasses.replace(self.decode, items=1, is_resident=False)
        tile_q = 1 << (most.bit_length() - 1)
        return dataclasses.replace(self, num_heads=heads, decode=tiles, tile_q=tile_q, compiler_scalars=0)

    def max_query_tiles(self, num_tokens: int, num_rows: int) -> int:
        """The most query tiles of a step: each row may have one that is not full."""
        return num_tokens // self.tile_q + max(1, min(num_rows, num_tokens // 2))

    def scalar_bytes(self, num_tokens: int, num_rows: int, max_blocks: int) -> int:
        """Scalar memory that a step of so many rows takes, as `TpuConfig` has it."""
        own = self.decode.smem_bytes(num_rows, max_blocks, self.block_size) + self.compiler_scalars
        if self.several is None:
            return own
        tiles = self.several.max_query_tiles(num_tokens, num_rows)
        listed = 4 * QUERY_TILE_WORDS * (tiles + 1)
        return max(own, self.several.decode.smem_bytes(tiles, max_blocks, self.block_size) + listed)

    @property
    def group(self) -> int:
        """Tokens of one transfer to the pool."""
        return GROUP_BYTES // self.pool_dtype.itemsize

    @property
    def queries(self) -> int:
        """Query rows of an item: the heads of each of its tokens."""
        return self.tile_q * self.num_heads

    @property
    def slots(self) -> int:
        """Rows whose queries, and results, are in VMEM at once: those of the steps that are fetched and scored."""
        return 1 << ((self.decode.ahead + 1) * self.decode.items - 1).bit_length()

    def vmem_bytes(self, num_tokens: int) -> int:
        """Vector memory of a launch: num_tokens new latents, queries and results, buffers and what stages hand on."""
        N, S, X, V = self.queries, self.decode.items, self.decode.tile_kv, self.value_dim
        tokens = tiled_bytes(X, self.lanes, self.pool_dtype.itemsize)
        rows = self.slots * sum(tiled_bytes(N, lanes, self.compute_dtype.itemsize) for lanes in (self.lanes, V))
        stages = S * N * (X * (4 + self.compute_dtype.itemsize) + 4 * (2 * V + (RING + 3) * LANES))
        new = tiled_bytes(num_tokens, self.lanes, 4)
        return COMPILER_BYTES + self.decode.buffers * S * tokens + rows + stages + new
