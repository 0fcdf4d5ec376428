"""Tiles of the Mosaic TPU kernels and the memory they take: pure functions of shapes, dtypes and the target."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.tpu_prefill_config import (
    COMPILER_BYTES,
    SMEM_FIXED,
    PrefillConfig,
    PrefillShape,
    tiled_bytes,
)
from pallas_kernels.target import Target

LANES = 128
_CHUNK = 256  # columns of one dot: the width of the largest matrix unit
_STEP_COLUMNS = 4096  # of all items of a step: enough independent work to hide each stage's latency
_MAX_TILE, _MIN_TILE = 512, 128
_AHEAD = 2  # steps whose blocks are on their way while one is computed, so that HBM never waits for the core
_VMEM_SHARE = 0.75  # the rest is the compiler's
_SMEM_SHARE = 0.75
_INT_BYTES = 4
LOOK_BACK = 2  # idle steps before the first, which the kernel's later stages see
RING = 4  # steps whose highest scores decode keeps, of which three are needed; a power of two is a cheap divisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Columns of one dot: `column` counts in the part; key and value say which vector of a word is read."""

    part: int
    column: int
    token: int
    key: int
    value: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """What the decode kernel is specialised to. A word is 32 bits; vectors of a token lie in words one by one.

    num_heads: N, padded to a multiple of 8. group: query heads of a KV head. vectors: of a token in the pool.
    """

    num_heads: int
    num_kv_heads: int
    group: int
    block_size: int
    vectors: int
    lanes: int  # of a vector
    is_packed: bool  # K and V of a head share a vector
    pool_dtype: jnp.dtype
    compute_dtype: jnp.dtype

    @classmethod
    def of(cls, *, num_heads: int, num_kv_heads: int, dtype: jnp.dtype, pool: KVPool) -> DecodeShape:
        """The shape for queries of `dtype`; pool may be shapes."""
        return cls(
            num_heads=-(-num_heads // 8) * 8,
            num_kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            block_size=pool.block_size,
            vectors=pool.values.shape[2],
            lanes=pool.values.shape[3],
            is_packed=pool.is_packed,
            pool_dtype=pool.dtype,
            compute_dtype=jnp.dtype(dtype) if pool.dtype.itemsize == 1 else jnp.promote_types(dtype, pool.dtype),
        )

    @property
    def itemsize(self) -> int:
        return self.pool_dtype.itemsize

    @property
    def stride(self) -> int:
        """Vectors from a key to the next head's in the same place of a word, for words of one vector."""
        return 1 if self.is_packed else 2

    @property
    def words(self) -> int:
        """Words of a token in which heads have their keys: columns of a token in one part."""
        return max(1, self.vectors // self.stride if self.itemsize == 4 else self.vectors * self.itemsize // 4)

    @property
    def is_unloadable(self) -> bool:
        """Whether the decode kernel cannot load a token's vectors.

        They fill no word, their words fill no tile of 4 rows, or strides are over 128 lanes.
        """
        fills_tiles = self.words <= 2 or self.words % 4 == 0
        return self.vectors * self.itemsize < 4 or not fills_tiles or (self.itemsize == 4 and self.lanes > LANES)

    @property
    def parts(self) -> int:
        """Heads whose keys share a word."""
        return self.num_kv_heads // self.words

    @property
    def period(self) -> int:
        """Columns after which lanes hold the same heads again."""
        period = LANES
        while period % self.words:
            period += LANES
        return period

    @property
    def halves(self) -> bool:
        """Whether values of two chunks stand side by side in a dot, which fills a matrix unit of 256 columns."""
        return self.lanes == LANES

    def columns(self, tile_kv: int) -> int:
        return tile_kv * self.num_kv_heads

    def chunks(self, tile_kv: int, width: int) -> list[Chunk]:
        """The columns of a tile's scores, `width` at a time."""
        vectors = [(b, b) if self.is_packed else (2 * b, 2 * b + 1) for b in range(self.parts)]
        return [
            Chunk(part=part, column=column, token=column // self.words, key=key, value=value)
            for part, (key, value) in enumerate(vectors)
            for column in range(0, tile_kv * self.words, width)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """tile_kv: tokens of an item, cut at absolute positions. items: of a step. chunk: columns of one dot.

    ahead: steps whose blocks are fetched while one is computed. buffers: steps held in VMEM.
    """

    tile_kv: int
    items: int
    vmem_limit_bytes: int
    chunk: int = _CHUNK
    ahead: int = _AHEAD

    @property
    def buffers(self) -> int:
        return self.ahead + 2  # the step in work and the one before it

    @classmethod
    def choose(cls, shape: DecodeShape, target: Target) -> DecodeConfig:
        """The tiles for a shape; rows of one model always get the same, whatever the step holds."""
        wanted = min(_MAX_TILE, max(_MIN_TILE, _STEP_COLUMNS // shape.num_kv_heads))
        tile = max(shape.block_size, 1 << (wanted.bit_length() - 1))  # of whole blocks, for any number of heads
        while tile * shape.words % (2 * _CHUNK):
            tile *= 2
        items = max(1, _STEP_COLUMNS // (tile * shape.num_kv_heads))
        assert target.vmem_bytes is not None, "a TPU target has VMEM"
        return cls(tile_kv=tile, items=items, vmem_limit_bytes=int(target.vmem_bytes * _VMEM_SHARE))

    def max_steps(self, num_rows: int, max_context: int) -> int:
        """Steps of num_rows rows of max_context tokens."""
        return -(-num_rows * -(-max_context // self.tile_kv) // self.items)

    def smem_bytes(self, num_rows: int, max_blocks: int, block_size: int) -> int:
        """Scalar memory of a schedule: the block tables, three numbers an item and one a step."""
        steps = self.max_steps(num_rows, max_blocks * block_size) + self.ahead + LOOK_BACK
        tables = num_rows * max_blocks + self.tile_kv // block_size
        return SMEM_FIXED + _INT_BYTES * (tables + (3 * self.items + 1) * steps)

    def vmem_bytes(self, shape: DecodeShape, num_tokens: int) -> int:
        """Vector memory of a launch: queries, tokens' vectors, results, buffers and what stages hand on."""
        N, H, S, X = shape.num_heads, shape.lanes, self.items, shape.columns(self.tile_kv)
        token = tiled_bytes(shape.vectors, H, shape.itemsize)
        heads = tiled_bytes(N, H, shape.compute_dtype.itemsize)
        buffers = self.buffers * (S * self.tile_kv + 1) * token
        stages = S * (N * X * (4 + shape.compute_dtype.itemsize) + N * 4 * (H + (RING + 2) * LANES))
        state = N * 4 * (H + LANES + shape.parts * shape.period + LANES)
        scales = 0
        if shape.pool_dtype == jnp.int8:
            pairs, blocks = 2 * shape.num_kv_heads, S * (self.tile_kv // shape.block_size)
            scales = self.buffers * blocks * tiled_bytes(pairs, shape.block_size, 4) + S * 8 * X * 4
            scales += tiled_bytes(pairs, self.tile_kv + LANES, 4)
        return COMPILER_BYTES + buffers + stages + state + scales + num_tokens * token + (2 * num_tokens + 1) * heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuConfig:
    """What the kernels of one step are specialised to.

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
    ) -> TpuConfig:
        """The tiles of a bucket of num_tokens tokens and num_rows rows of up to max_blocks blocks.

        num_heads, pool: of one device; pool may be shapes. decode_only: no row has more than one query. Raises
        ValueError where the pool or the step does not fit the kernels or the target's memories.
        """
        shape = DecodeShape.of(num_heads=num_heads, num_kv_heads=pool.num_kv_heads, dtype=dtype, pool=pool)
        decode = DecodeConfig.choose(shape, target)
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
        scalars = config.scalar_bytes(num_tokens, num_rows, max_blocks, pool.block_size)
        if scalars > target.smem_bytes * _SMEM_SHARE:
            raise ValueError(
                f"block tables of {num_rows} rows of {max_blocks} blocks take {scalars} bytes of scalar memory; "
                f"{target.generation} has {target.smem_bytes}, of which {_SMEM_SHARE:.0%} may be used: take fewer "
                f"rows, shorter contexts, or blocks of more than {pool.block_size} tokens"
            )
        vectors = decode.vmem_bytes(shape, num_tokens if prefill is None else num_rows)
        if vectors > decode.vmem_limit_bytes:
            raise ValueError(
                f"attention of {num_tokens} tokens, {num_heads} heads and {pool.num_kv_heads} KV heads takes {vectors} "
                f"bytes of vector memory; of {target.generation}'s {target.vmem_bytes} it may use "
                f"{decode.vmem_limit_bytes}: take fewer tokens a step, or spread heads over more devices"
            )
        return config

    def scalar_bytes(self, num_tokens: int, num_rows: int, max_blocks: int, block_size: int) -> int:
        """Scalar memory that tables and schedules of such a step take, of the kernel that takes most."""
        decode = self.decode.smem_bytes(num_rows, max_blocks, block_size)
        return max(decode, 0 if self.prefill is None else self.prefill.smem_bytes(num_tokens, num_rows, max_blocks))
