"""Tiles of the TPU decode kernel and the memory they take: pure functions of shapes, dtypes and the target."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.tpu.decode.records import Records
from pallas_kernels.paged_attention.tpu.prefill.config import COMPILER_BYTES, SMEM_FIXED, tiled_bytes
from pallas_kernels.target import Target

LANES = 128
_CHUNK = 256  # columns of one dot: the width of the largest matrix unit
_STEP_COLUMNS = 4096  # of all items of a step: enough independent work to hide each stage's latency
_MAX_TILE, _MIN_TILE = 512, 128
_AHEAD = 2  # steps whose blocks are on their way while one is computed, so that HBM never waits for the core
_VMEM_SHARE = 0.75  # the rest is the compiler's
SMEM_SHARE = 0.75
_INT_BYTES = 4
_USUAL_ROWS = 256  # of a decode step, for which tiles are tuned
_TUNED = ("tile_kv", "items")
_TILES = pathlib.Path(__file__).with_name("tiles.json")
RING = 4  # steps whose highest scores decode keeps: three are needed, and a power of two is a cheap divisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotColumns:
    """Columns of one dot: `column` counts in the part; key and value say which vector of a word is read."""

    part: int
    column: int
    token: int
    key: int
    value: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """The specialisation of the decode kernel. A word is 32 bits; vectors of a token lie in words one by one.

    num_heads: N, padded to a multiple of 8. group: query heads of a KV head. vectors: of a token in the pool.
    key_lanes: of a vector the first, with which queries are multiplied. value_lanes: the last, which are summed; both
    are all of them but where V has another size than K.
    """

    num_heads: int
    num_kv_heads: int
    group: int
    block_size: int
    vectors: int
    lanes: int  # of a vector
    key_lanes: int
    value_lanes: int
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
            key_lanes=pool.key_lanes,
            value_lanes=pool.value_lanes,
            is_packed=pool.is_packed,
            pool_dtype=pool.dtype,
            compute_dtype=jnp.dtype(dtype if pool.dtype.itemsize == 1 or pool.dtype == dtype else jnp.float32),
        )

    @property
    def name(self) -> str:
        """The shape that tiles are tuned for, as a key of `tiles.json`."""
        lanes = f"{self.lanes}{' packed' if self.is_packed else ''}"
        return f"N={self.num_heads} K={self.num_kv_heads} H={lanes} C={self.block_size} {self.pool_dtype.name}"

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
        return self.value_lanes == LANES

    def columns(self, tile_kv: int) -> int:
        return tile_kv * self.num_kv_heads

    def chunks(self, tile_kv: int, width: int) -> list[DotColumns]:
        """The columns of a tile's scores, `width` at a time."""
        vectors = [(b, b) if self.is_packed else (2 * b, 2 * b + 1) for b in range(self.parts)]
        return [
            DotColumns(part=part, column=column, token=column // self.words, key=key, value=value)
            for part, (key, value) in enumerate(vectors)
            for column in range(0, tile_kv * self.words, width)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """tile_kv: tokens of an item, cut at absolute positions. items: of a step. chunk: columns of one dot.

    ahead: steps whose blocks are fetched while one is computed. buffers: steps held in VMEM. is_resident: see
    `records.py`. widens_words: int8 becomes float32 in words of 32 bits, not by way of 8-bit tiles.
    """

    tile_kv: int
    items: int
    vmem_limit_bytes: int
    chunk: int = _CHUNK
    ahead: int = _AHEAD
    is_resident: bool = False
    widens_words: bool = False

    @property
    def buffers(self) -> int:
        return self.ahead + 2  # the step in work and the one before it

    @classmethod
    def choose(cls, shape: DecodeShape, target: Target, tiles: Mapping[str, int] | None = None) -> DecodeConfig:
        """The tiles for a shape; rows of one model always get the same, whatever the step holds.

        tiles: what was found to be faster, in place of the formula's and of what `tiles.json` has of the shape. Raises
        ValueError for tiles that the kernel does not take.
        """
        by_formula = cls.by_formula(shape, target)
        tiles = tiles or _counted(target.generation).get(shape.name, {})
        unknown = tiles.keys() - set(_TUNED)
        if unknown:
            raise ValueError(f"attention tiles name {sorted(unknown)}; decode has {list(_TUNED)}")
        config = dataclasses.replace(by_formula, **tiles)
        if tiles and not config.fits(shape):
            raise ValueError(
                f"attention tiles {dict(tiles)} do not fit {shape.name}: tile_kv must be a multiple of the block's "
                f"{shape.block_size} tokens and of {-(-2 * config.chunk // shape.words)}, and all of a step must fit "
                f"{config.vmem_limit_bytes} bytes; `ferrum-jax check --tune` finds some that do"
            )
        return config

    @classmethod
    def by_formula(cls, shape: DecodeShape, target: Target) -> DecodeConfig:
        """Steps of 4,096 columns."""
        wanted = min(_MAX_TILE, max(_MIN_TILE, _STEP_COLUMNS // shape.num_kv_heads))
        tile = max(shape.block_size, 1 << (wanted.bit_length() - 1))  # of whole blocks, for any number of heads
        while tile * shape.words % (2 * _CHUNK):
            tile *= 2
        items = max(1, _STEP_COLUMNS // (tile * shape.num_kv_heads))
        assert target.vmem_bytes is not None, "a TPU target has VMEM"
        return cls(
            tile_kv=tile,
            items=items,
            vmem_limit_bytes=int(target.vmem_bytes * _VMEM_SHARE),
            widens_words=target.mxu_columns == LANES,  # v5e and v5p compute with 32 bits alone
        )

    @property
    def tiles(self) -> dict[str, int]:
        """The tiles that `choose` takes."""
        return {name: getattr(self, name) for name in _TUNED}

    def neighbours(self, shape: DecodeShape) -> list[DecodeConfig]:
        """Other tiles that the kernel takes: half or twice the tokens of an item, the items of a step, or both."""
        around = [(2, 1), (1, 2), (0.5, 2), (0.5, 1), (2, 0.5), (1, 0.5)]
        tried = (
            dataclasses.replace(self, tile_kv=int(self.tile_kv * tile), items=int(self.items * items))
            for tile, items in around
            if self.items * items >= 1
        )
        return [other for other in tried if other.fits(shape)]

    def fits(self, shape: DecodeShape) -> bool:
        """Whether the tiles are whole blocks and whole pairs of dots, and leave a step of the usual rows its memory."""
        is_whole = self.tile_kv % shape.block_size == 0 and self.tile_kv * shape.words % (2 * self.chunk) == 0
        return is_whole and self.vmem_bytes(shape, _USUAL_ROWS) <= self.vmem_limit_bytes

    def max_steps(self, num_rows: int, max_context: int) -> int:
        """Steps of num_rows rows of max_context tokens."""
        return -(-num_rows * -(-max_context // self.tile_kv) // self.items)

    def records(self, block_size: int) -> Records:
        """Where the scalars of a step are."""
        blocks = self.tile_kv // block_size
        return Records(items=self.items, blocks=blocks, ahead=self.ahead, is_resident=self.is_resident)

    def num_steps(self, num_rows: int, max_context: int) -> int:
        """Steps that have records, those before the first left out."""
        return self.max_steps(num_rows, max_context) + 2 * self.ahead

    def smem_bytes(self, num_rows: int, max_blocks: int, block_size: int) -> int:
        """Scalar memory of a launch: all of its scalars, or those of the steps around one."""
        steps = self.num_steps(num_rows, max_blocks * block_size)
        return SMEM_FIXED + _INT_BYTES * self.records(block_size).all_words(steps, num_rows, max_blocks)

    def for_tables(self, num_rows: int, max_blocks: int, block_size: int, target: Target) -> DecodeConfig:
        """The config for a step of these tables: they are resident where they fit, which saves their transfers."""
        assert target.smem_bytes is not None, "a TPU target has scalar memory"
        resident = dataclasses.replace(self, is_resident=True)
        fits = resident.smem_bytes(num_rows, max_blocks, block_size) <= target.smem_bytes * SMEM_SHARE
        return resident if fits else self

    def vmem_bytes(self, shape: DecodeShape, num_tokens: int) -> int:
        """Vector memory of a launch: queries, tokens' vectors, results, buffers and what stages hand on."""
        N, V, S, X = shape.num_heads, shape.value_lanes, self.items, shape.columns(self.tile_kv)
        token = tiled_bytes(shape.vectors, shape.lanes, shape.itemsize)
        queries, results = (tiled_bytes(N, n, shape.compute_dtype.itemsize) for n in (shape.key_lanes, V))
        buffers = self.buffers * (S * self.tile_kv + 1) * token
        stages = S * (N * X * (4 + shape.compute_dtype.itemsize) + N * 4 * (V + (RING + 2) * LANES))
        state = N * 4 * (V + LANES + shape.parts * shape.period + LANES)
        scales = 0
        if shape.pool_dtype == jnp.int8:
            pairs, blocks = 2 * shape.num_kv_heads, S * (self.tile_kv // shape.block_size)
            scales = self.buffers * blocks * tiled_bytes(pairs, shape.block_size, 4) + S * 8 * X * 4
            scales += tiled_bytes(pairs, self.tile_kv + LANES, 4)
        rows = num_tokens * (token + queries) + (num_tokens + 1) * results
        return COMPILER_BYTES + buffers + stages + state + scales + rows


@functools.cache
def _counted(generation: str) -> dict[str, dict[str, int]]:
    """By shape the tiles that a static count found faster than the formula's; see `scripts/tune_static.py`."""
    found = json.loads(_TILES.read_text()).get(generation, {}) if _TILES.is_file() else {}
    return {shape: entry["tiles"] for shape, entry in found.items() if entry["tiles"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Specialisation:
    """All that is static in a launch. scale, soft_cap: of logits. interpret: as pallas_call has it."""

    shape: DecodeShape
    config: DecodeConfig
    scale: float
    soft_cap: float | None
    window: int | None
    chunked: bool
    interpret: Any
