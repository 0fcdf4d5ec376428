"""Tile sizes of the TPU prefill kernel and the memory they take, a pure function of shapes and the Target."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.table_lines import LINE, num_lines

LANES = 128
ALIGNMENT = 16  # tokens: a tile of q in memory starts at a multiple of it, for every dtype
PIECE = 128  # tokens whose heads are taken apart at once
SMEM_FIXED = 4096  # bytes of scalar memory for the padding of arrays and for the compiler
_CHUNK_ROWS = 1024  # query rows of an item
_STRETCH_LANES = 4096 * LANES  # lanes of query rows in straight code, which fills and drains the units only once
_STRETCH_ITEMS = 16  # most items in straight code; they are small where a step has few tokens
_PART_ROWS = 512  # rows of a matrix product: K and V are loaded into the MXU once for this many
_STEP_KV = 512
_TILE_KV_BYTES = 2 * 2**20
_TILE_Q = 512
COMPILER_BYTES = 96 * 2**10  # vector memory left to the compiler, which was seen to take up to 72 KiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """The static shape of one call of the kernel.

    vectors: per token in the pool; 2K, or K if packed. key_lanes, value_lanes: see `DecodeShape`; values have no more.
    """

    num_kv_heads: int  # K
    group: int  # G, query heads of a KV head
    lanes: int  # of a vector in the pool
    key_lanes: int
    value_lanes: int
    vectors: int
    block_size: int  # C
    pool_dtype: str
    dtype: str  # of queries and results

    @classmethod
    def of(cls, *, num_heads: int, dtype: jnp.dtype, pool: KVPool) -> PrefillShape:
        """The shape for queries of `dtype`; pool may be shapes."""
        return cls(
            num_kv_heads=pool.num_kv_heads,
            group=num_heads // pool.num_kv_heads,
            lanes=pool.values.shape[3],
            key_lanes=pool.key_lanes,
            value_lanes=pool.value_lanes,
            vectors=pool.values.shape[2],
            block_size=pool.block_size,
            pool_dtype=pool.dtype.name,
            dtype=jnp.dtype(dtype).name,
        )

    @property
    def is_packed(self) -> bool:
        """Whether K and V of a head share a vector."""
        return self.vectors == self.num_kv_heads

    @property
    def num_heads(self) -> int:
        """N."""
        return self.num_kv_heads * self.group

    @property
    def is_dense(self) -> bool:
        """Whether [C, vectors, lanes] and [C * vectors, lanes] of a block are the same bytes in memory.

        So it is where one token's vectors fill whole memory tiles, or where tiles shrink to them, which happens only
        with a single column of lanes.
        """
        packing = 4 // _itemsize(self.pool_dtype)
        small = self.vectors in (1, 2, 4) and self.vectors >= packing
        return self.vectors % 8 == 0 or (small and self.lanes == LANES)

    @property
    def has_pairs(self) -> bool:
        """Whether heads are taken apart as the halves of 32-bit words."""
        return self.pool_dtype != "float32" and self.vectors % 2 == 0 and self.is_dense


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """How queries and contexts are cut.

    tile_q: tokens of a row that share each load of K and V from HBM, a multiple of chunk_q. chunk_q: of these, the
    tokens whose G heads are one item of the kernel's pipeline. part_q: of these, the tokens of one matrix product.
    tile_kv: tokens of the context that are fetched together, cut at absolute positions, a multiple of step_kv.
    step_kv: of these, the keys of one item. stretch: items in straight code where nothing is masked. sums_by_product:
    V has columns of ones, whose products are the sums of the weights; they are free where V leaves columns of the
    matrix unit idle.
    """

    tile_q: int
    chunk_q: int
    part_q: int
    tile_kv: int
    step_kv: int
    stretch: int = 1
    sums_by_product: bool = False

    @property
    def parts(self) -> int:
        """Matrix products that a chunk is cut into."""
        return self.chunk_q // self.part_q

    @property
    def chunks(self) -> int:
        """Chunks of a query tile."""
        return self.tile_q // self.chunk_q

    @property
    def steps(self) -> int:
        """Steps of a KV tile."""
        return self.tile_kv // self.step_kv

    @classmethod
    def choose(
        cls, shape: PrefillShape, *, num_tokens: int, max_context: int, vmem_bytes: int, mxu_columns: int
    ) -> PrefillConfig:
        """The tiles of a bucket: as large as is useful within three quarters of vmem_bytes.

        mxu_columns: columns of a matrix unit. Raises ValueError where not even the smallest tiles fit.
        """
        step_kv = max(shape.block_size, min(_STEP_KV, _round_up(max_context, LANES)))
        token_bytes = shape.vectors * shape.lanes * _itemsize(shape.pool_dtype)
        steps = max(1, min(4, _TILE_KV_BYTES // (step_kv * token_bytes), -(-max_context // step_kv)))
        tokens = min(_TILE_Q, _round_up(num_tokens, ALIGNMENT))
        chunks = -(-tokens // max(ALIGNMENT, _CHUNK_ROWS // shape.group // ALIGNMENT * ALIGNMENT))
        chunk_q = _round_up(-(-tokens // chunks), ALIGNMENT)
        while True:
            config = cls(
                tile_q=chunks * chunk_q,
                chunk_q=chunk_q,
                part_q=_part_q(chunk_q, shape.group),
                tile_kv=steps * step_kv,
                step_kv=step_kv,
                sums_by_product=shape.value_lanes % mxu_columns > 0
                and shape.pool_dtype != "int8",  # weights have V's scales
                stretch=_stretch(shape.num_kv_heads * chunks, chunk_q * shape.group * shape.key_lanes),
            )
            if config.vmem_bytes(shape) <= vmem_bytes * 3 // 4:
                return config
            if chunks > 1:
                chunks = -(-chunks // 2)
            elif steps > 1:
                steps = -(-steps // 2)
            elif chunk_q > ALIGNMENT:
                chunk_q = max(ALIGNMENT, chunk_q // 2 // ALIGNMENT * ALIGNMENT)
            elif step_kv > max(LANES, shape.block_size):
                step_kv = max(LANES, shape.block_size)
            else:
                raise ValueError(
                    f"prefill of {shape} needs {config.vmem_bytes(shape)} bytes of vector memory and may use three "
                    f"quarters of {vmem_bytes}; shard the heads over more devices"
                )

    def check(self, shape: PrefillShape) -> None:
        """Raises ValueError where the tiles do not fit each other or the blocks."""
        if self.tile_q % self.chunk_q or self.chunk_q % self.part_q or self.part_q % ALIGNMENT:
            raise ValueError(
                f"{self}: tile_q must be a multiple of chunk_q, chunk_q of part_q, and part_q of {ALIGNMENT}"
            )
        if self.tile_kv % self.step_kv or self.step_kv % LANES or self.step_kv % shape.block_size:
            raise ValueError(
                f"{self}: tile_kv must be a multiple of step_kv, and step_kv of {LANES} and of the block size, "
                f"{shape.block_size}"
            )

    def max_tiles(self, num_tokens: int, num_rows: int) -> int:
        """The most query tiles of a step. A row may add two: it begins and ends within groups of ALIGNMENT tokens."""
        return num_tokens // self.tile_q + 2 * min(num_rows, num_tokens)

    def smem_bytes(self, num_tokens: int, num_rows: int, block_size: int) -> int:
        """Scalar memory of a launch: tiles, and lines of the block tables of two KV tiles."""
        lines = 2 * num_lines(self.tile_kv // block_size) * LINE
        return SMEM_FIXED + 4 * (9 * self.max_tiles(num_tokens, num_rows) + lines)

    def vmem_bytes(self, shape: PrefillShape, *, has_ends: bool = False) -> int:
        """Bytes of vector memory that the kernel takes. has_ends: see `buffers`."""
        buffers = self.buffers(shape, has_ends=has_ends).values()
        return COMPILER_BYTES + sum(
            math.prod(outer) * tiled_bytes(rows, lanes, _itemsize(dtype)) for (*outer, rows, lanes), dtype in buffers
        )

    def buffers(self, shape: PrefillShape, *, has_ends: bool = False) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each scratch buffer. has_ends: tokens may see keys behind their own."""
        K, N, C, Vn = shape.num_kv_heads, shape.num_heads, shape.block_size, shape.vectors
        Hp, H, V = shape.lanes, shape.key_lanes, shape.value_lanes
        rows, keys = shape.group * self.chunk_q, self.step_kv
        pair = shape.group * self.part_q * min(2, self.parts)  # two parts take turns
        slots = K * self.chunks
        blocks = self.tile_kv // C
        sizes = {
            "q": ((2, N, self.tile_q, H), shape.dtype),  # later the results
            "border": ((N, ALIGNMENT, H), shape.dtype),
            "blocks": ((self.tile_kv * Vn, Hp) if shape.is_dense else (blocks, C, Vn, Hp), shape.pool_dtype),
            "words": (
                (Hp // LANES, PIECE * Vn // (2 if shape.has_pairs else 1), LANES),  # strided loads take 128 lanes only
                "uint32" if shape.has_pairs else "float32",
            ),
            "keys": ((2, self.steps, K, keys, H), shape.dtype),
            "values": ((4, self.steps, K, keys, V), shape.dtype),
            "logits": ((rows, keys), "float32"),
            "tops": ((pair, LANES), "float32"),
            "weights": ((pair, keys), shape.dtype),
            "kept": ((pair, LANES), "float32"),
            "highest": ((slots, rows, LANES), "float32"),
            "total": ((slots, rows, LANES), "float32"),
            "sums": ((slots, rows, V), "float32"),
        }
        if has_ends:
            sizes["ends"] = ((2, self.tile_q, LANES), "int32")
        if shape.pool_dtype == "int8":
            sizes["block_scales"] = ((blocks, 2 * K, C), "float32")
            sizes["scales"] = ((2, self.steps, K, 2, keys), "float32")
        return sizes


def _part_q(chunk_q: int, group: int) -> int:
    """Tokens of a part: at least two parts where they can be cut, so that stages of one hide those of another."""
    wanted = max(2, -(-chunk_q * group // _PART_ROWS))
    return chunk_q // next(parts for parts in range(wanted, 0, -1) if chunk_q % (parts * ALIGNMENT) == 0)


def _stretch(items: int, lanes: int) -> int:
    """The largest useful stretch that divides a step's items evenly; each item has `lanes` lanes of rows."""
    most = min(_STRETCH_ITEMS, max(1, _STRETCH_LANES // lanes))
    return next(size for size in range(most, 0, -1) if items % size == 0)


def tiled_bytes(rows: int, lanes: int, itemsize: int) -> int:
    """Bytes of the two minor dims [rows, lanes]. Tiles have 8 rows, fewer if `rows` is less, but fill a 32-bit word."""
    tile = max(4 // itemsize, min(8, 1 << (rows - 1).bit_length()))
    return _round_up(rows, tile) * _round_up(lanes, LANES) * itemsize


def _itemsize(dtype: str) -> int:
    """Bytes of an element; knows bfloat16 and fp8 too."""
    return jnp.dtype(dtype).itemsize


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
