"""Tile sizes of paged attention, a pure function of shapes."""

from __future__ import annotations

import dataclasses

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.shapes import check_counts

_TILE_KV = 64  # on the CPU a tile of 64 x 8 heads x 128 x f32 is 256 KB of K, which the second read finds in L2
_TILE_Q = 64
_INVARIANT_TILE_Q = 8  # a decode row fills one lane of it, and costs as much as all
# On a GPU each step of a loop is a dozen launches: tiles are large there, and as many at once as make scores of 65,536
# queries and heads by 512 keys, or read 128 MiB of K and V.
_GPU_TILE_KV = 512
_GPU_TILE_Q = 128
_GPU_QUERIES = 2**16
_GPU_KV_BYTES = 2**27


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How a step's queries and contexts are cut.

    tile_q: query tokens of one row that share a read of K and V. tile_kv: tokens of a row's context, cut at
    absolute positions. decode_tile_q: tile_q of the rows that have one query, or None where they are tiled
    like all others. has_prefill: False where no row has more than one query. together: query tiles of tile_q, and
    decode_together of decode_tile_q, that are computed side by side; 1 is one after the other. keeps_dtype: bfloat16
    is multiplied as it is and summed in float32; else all is float32.
    """

    tile_q: int
    tile_kv: int
    decode_tile_q: int | None
    has_prefill: bool
    together: int = 1
    decode_together: int = 1
    keeps_dtype: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a tile below 1."""
        check_counts(tile_q=self.tile_q, tile_kv=self.tile_kv, decode_tile_q=self.decode_tile_q)
        check_counts(together=self.together, decode_together=self.decode_together)

    @classmethod
    def choose(
        cls,
        *,
        num_tokens: int,
        block_size: int,
        decode_only: bool,
        invariant: bool,
        gpu_heads: tuple[int, KVPool] | None = None,
    ) -> AttentionConfig:
        """The tiles of a bucket of `num_tokens` tokens.

        decode_only: every row of the bucket has at most one query. invariant: one form for all rows, whose
        tiles depend on block_size alone, so that a token's bits do not depend on the bucket; num_tokens must
        then be at least 64. gpu_heads: on a GPU, query heads and their pool, or its shapes: tiles are computed side by
        side there. Raises ValueError where invariant buckets have fewer tokens.
        """
        check_counts(num_tokens=num_tokens, block_size=block_size)
        tile_kv = max(block_size, _TILE_KV)
        if invariant:
            if num_tokens < 64:
                raise ValueError(f"num_tokens is {num_tokens}; invariant attention needs buckets of at least 64 tokens")
            return cls(tile_q=_INVARIANT_TILE_Q, tile_kv=tile_kv, decode_tile_q=None, has_prefill=True)
        if gpu_heads is None:
            return cls(tile_q=min(_TILE_Q, num_tokens), tile_kv=tile_kv, decode_tile_q=1, has_prefill=not decode_only)
        (num_heads, pool), tile_kv, tile_q = gpu_heads, max(block_size, _GPU_TILE_KV), min(_GPU_TILE_Q, num_tokens)
        token_bytes = pool.values.shape[2] * pool.values.shape[3] * (2 if pool.scales is None else 4)  # as multiplied
        rows = min(_GPU_KV_BYTES // (tile_kv * token_bytes), num_tokens)
        return cls(
            tile_q=tile_q,
            tile_kv=tile_kv,
            decode_tile_q=1,
            has_prefill=not decode_only,
            together=max(1, min(_GPU_QUERIES // (num_heads * tile_q), -(-num_tokens // tile_q))),
            decode_together=max(1, rows),
            keeps_dtype=True,
        )
