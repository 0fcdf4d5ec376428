"""Tiles of the GPU's attention kernels: a pure function of shapes, dtypes and Target.

A program holds one multiprocessor for the whole launch. It has one warpgroup that fetches and `consumers` that
compute, on 64 lanes; a lane is one query of one head. Items of work go round the programs.
"""

from __future__ import annotations

import dataclasses
import enum

import jax.numpy as jnp

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.target import Target

LANES = 64  # rows of a wgmma
HEAD_DIMS = (64, 96, 128, 192, 256, 512)  # of keys; values have one of them that is no larger
BLOCK_SIZES = (16, 32, 64, 128, 256)
_TILE_KV = 64
_PREFILL_TILE_KV = 128  # where two stages of it and a state fit
_WIDEST = 256  # values whose sums one consumer has registers for
_SPLIT_TOKENS = (1024, 4096)  # decode: fewer heads need more splits to fill a chip, more heads make them for nothing
_SPLIT_PER_HEAD = 256  # 8 heads and 128k tokens: 512 items
_MAX_STAGES = 5
LATENT_DIMS = (128, 256, 512)  # kv_lora_rank
LATENT_ROPE_DIMS = (32, 64)
_LATENT_SPLIT = 2048  # for each group of heads: 64 rows of 4k tokens fill the chip
_LATENT_TILE = 128  # tokens of a stage, half of them scored by each warpgroup
_FEW_HEADS = 32
_FEW_SPARE = 4096
_LATENT_SPARE = 2048 + 256  # what warpgroups tell each other of lanes, the compiler's own, and barriers


class Divided(enum.Enum):
    """How consumers share an item: by its lanes, 64 each; or, with the same 64 lanes, by columns of V or by tiles.

    Where they divide V, a stage comes in halves, K and then V, because two whole ones do not fit. Where they divide
    tiles, one consumer has the even tiles and one the odd, each with its own stages, and results are splits.
    """

    LANES = enum.auto()
    VALUES = enum.auto()
    TILES = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How one of the two kernels is cut.

    tile_q: queries of an item. tile_kv: tokens of a stage, at absolute positions. split: tokens of an item's context,
    at absolute positions; None is all of it. loaded: lanes of 64 that are fetched and, of partial results, stored.
    part: lanes of a head dim that are multiplied at once.
    """

    consumers: int
    tile_q: int
    tile_kv: int
    split: int | None
    loaded: int
    part: int
    stages: int
    query_slots: int
    smem_bytes: int
    divided: Divided = Divided.LANES

    @property
    def halves(self) -> int:
        """Parts of a stage that come and go apart."""
        return 2 if self.divided is Divided.VALUES else 1

    @property
    def rings(self) -> int:
        """Consumers that have stages, and splits, of their own."""
        return self.consumers if self.divided is Divided.TILES else 1

    @property
    def lane_groups(self) -> int:
        """Groups of 64 lanes that an item has."""
        return self.consumers if self.divided is Divided.LANES else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """decode: of rows of one query. prefill: of rows of several, None where there are none. programs: of a launch."""

    decode: Form
    prefill: Form | None
    programs: int

    @classmethod
    def choose(cls, *, num_heads: int, pool: KVPool, decode_only: bool, target: Target, dtype: jnp.dtype) -> GpuConfig:
        """The tiles for these heads on this target.

        num_heads: of queries, N. dtype: of activations. Raises ValueError for a dtype that is not bfloat16, for a
        target without its multiprocessors' number and memory, for more heads of a KV head than there are lanes, for
        rows of several queries over latents, and for what shared memory does not hold.
        """
        if dtype != jnp.bfloat16:
            raise ValueError(
                f"activations are {jnp.dtype(dtype).name}; 'mosaic_gpu' multiplies bfloat16; take dtype 'bfloat16'"
            )
        if target.num_cores is None or target.smem_bytes is None:
            raise ValueError(f"target is {target.generation!r}, which states no multiprocessors; take a Hopper GPU")
        if pool.is_latent:
            if not decode_only:
                raise ValueError("rows have several queries, and the cache latents; take implementation 'xla'")
            return cls(decode=_latent_form(pool, num_heads, target), prefill=None, programs=target.num_cores)
        group = num_heads // pool.num_kv_heads
        if group > LANES:
            raise ValueError(f"{group} query heads share a KV head; 'mosaic_gpu' has at most {LANES}")
        return cls(
            decode=_form(pool, group, is_decode=True, target=target),
            prefill=None if decode_only else _form(pool, group, is_decode=False, target=target),
            programs=target.num_cores,
        )


def takes_new(pool: KVPool, divided: Divided) -> bool:
    """Whether a decoding row's kernel can write K and V: as they are, of one width, in one consumer's lanes."""
    return pool.dtype == jnp.bfloat16 and pool.head_dim == pool.v_head_dim and divided is Divided.LANES


def _form(pool: KVPool, group: int, *, is_decode: bool, target: Target) -> Form:
    H, V, is_small = pool.head_dim, pool.v_head_dim, pool.dtype.itemsize == 1
    divided = Divided.VALUES if V > _WIDEST else Divided.LANES
    divided = Divided.TILES if is_decode and is_small and H <= 128 else divided  # one would take longer than HBM
    consumers = 1 if is_decode and divided is Divided.LANES else 2
    rings = consumers if divided is Divided.TILES else 1
    groups = consumers if divided is Divided.LANES else 1
    tile_kv = _TILE_KV if is_decode or H > 192 or V > 128 or is_small else _PREFILL_TILE_KV
    part = V if V <= 128 else 64  # what results leave of the registers
    query_slots = 2 if is_decode and H <= 192 else 1
    queries = query_slots * groups * LANES * H * 2
    part = 64 if divided is Divided.TILES and V % 64 == 0 else part
    outputs = LANES * (consumers * part + rings) * 4 if is_decode else 0  # prefill writes them where the queries were
    outputs += query_slots * 2 * H * 2 if is_decode and takes_new(pool, divided) else 0
    is_apart = divided is Divided.VALUES
    copies = (
        rings * tile_kv * (H if is_apart else H + V) * 2 if is_small else 0
    )  # K and V in bfloat16, one place for halves
    scales = 2 * tile_kv * 4 * (2 if is_apart else 1) if pool.dtype == jnp.int8 else 0
    stage = tile_kv * (H + V) * pool.dtype.itemsize + scales
    spare = 4096 if is_decode else 3072  # barriers, alignment and the compiler's own scratch
    spare = 1792 if is_apart else spare
    fixed = queries + outputs + copies + spare
    assert target.smem_bytes is not None
    least, most = _SPLIT_TOKENS
    stages = min(-(-_MAX_STAGES // rings), (target.smem_bytes - fixed) // (stage * rings))
    if stages < (needed := 1 if is_apart else 2):
        raise ValueError(
            f"{needed * rings * tile_kv} tokens take {fixed + needed * rings * stage} bytes of shared memory; "
            f"{target.generation} has {target.smem_bytes}; take implementation 'xla'"
        )
    return Form(
        consumers=consumers,
        tile_q=1 if is_decode else groups * LANES // group,
        tile_kv=tile_kv,
        split=min(max(_SPLIT_PER_HEAD * pool.num_kv_heads, least), most) // tile_kv * tile_kv if is_decode else None,
        loaded=-(-group // 8) * 8 if is_decode else LANES,
        part=part,
        stages=stages,
        query_slots=query_slots,
        smem_bytes=fixed + rings * stages * stage,
        divided=divided,
    )


def _latent_form(pool: KVPool, num_heads: int, target: Target) -> Form:
    """Decode over latents: up to 32 heads are columns of a product, more are its rows, in groups of up to 64."""
    groups, vector = -(-num_heads // LANES), pool.key_dim * pool.dtype.itemsize
    is_few = num_heads <= _FEW_HEADS
    loaded, tile_kv = -(-num_heads // (8 * groups)) * 8, _TILE_KV if is_few else _LATENT_TILE
    slots, lanes = (2, loaded) if is_few else (1, LANES)
    weighs_in_ropes = not is_few and pool.v_head_dim * 2 == tile_kv == 2 * LANES
    weights = 0 if weighs_in_ropes else lanes * tile_kv * 2
    stage, fixed = tile_kv * vector, slots * lanes * vector + weights + (_FEW_SPARE if is_few else _LATENT_SPARE)
    assert target.smem_bytes is not None
    stages = min(_MAX_STAGES, (target.smem_bytes - fixed) // stage)
    if stages < (least := 2 if is_few else 1):
        raise ValueError(
            f"{least * tile_kv} latents take {fixed + least * stage} bytes of shared memory; {target.generation} has "
            f"{target.smem_bytes}; take implementation 'xla'"
        )
    return Form(
        consumers=1 if is_few else 2,
        tile_q=1,
        tile_kv=tile_kv,
        split=min(_LATENT_SPLIT * groups, max(_SPLIT_TOKENS)),
        loaded=loaded,
        part=pool.value_dim if is_few else pool.value_dim // 2,
        stages=stages,
        query_slots=slots,
        smem_bytes=fixed + stages * stage,
    )
