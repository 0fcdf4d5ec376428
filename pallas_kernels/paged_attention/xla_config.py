"""Tile sizes of paged attention, a pure function of shapes."""

from __future__ import annotations

import dataclasses

from pallas_kernels.shapes import check_counts

_TILE_KV = 64  # on the CPU a tile of 64 x 8 heads x 128 x f32 is 256 KB of K, which the second read finds in L2
_TILE_Q = 64
_INVARIANT_TILE_Q = 8  # a decode row fills one lane of it, and costs as much as all
# On a GPU each step of a loop is a dozen launches: tiles are large there, and as many at once as make a product of
# 65,536 queries and heads by 512 keys, 134 MB of scores, or read 64 rows' keys, 134 MB with 8 heads of 128.
_GPU_TILE_KV = 512
_GPU_TILE_Q = 128
_GPU_QUERIES = 2**16
_GPU_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How a step's queries and contexts are cut.

    tile_q: query tokens of one row that share a read of K and V. tile_kv: tokens of a row's context, cut at
    absolute positions. decode_tile_q: tile_q of the rows that have one query, or None where they are tiled
    like all others. has_prefill: False where no row has more than one query. together: query tiles of tile_q, and
    decode_together of decode_tile_q, that are computed side by side; 1 is one after the other.
    """

    tile_q: int
    tile_kv: int
    decode_tile_q: int | None
    has_prefill: bool
    together: int = 1
    decode_together: int = 1

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
        platform: str = "cpu",
        num_heads: int = 1,
    ) -> AttentionConfig:
        """The tiles of a bucket of `num_tokens` tokens.

        decode_only: every row of the bucket has at most one query. invariant: one form for all rows, whose
        tiles depend on block_size alone, so that a token's bits do not depend on the bucket; num_tokens must
        then be at least 64. Raises ValueError where it is not. platform: "gpu" computes tiles side
        by side, as many as num_heads, those of the queries, leave room for.
        """
        check_counts(num_tokens=num_tokens, block_size=block_size, num_heads=num_heads)
        if invariant and num_tokens < 64:
            raise ValueError(f"num_tokens is {num_tokens}; invariant attention needs buckets of at least 64 tokens")
        is_gpu = platform == "gpu"
        tile_kv = max(block_size, _GPU_TILE_KV if is_gpu else _TILE_KV)
        at_once = max(1, _GPU_QUERIES // num_heads) if is_gpu else 1  # queries

        def together(tile: int, most: int) -> int:
            return max(1, min(at_once // tile, most))

        if invariant:  # as many side by side in every bucket, for a product's bits depend on its shape
            tile_q = _INVARIANT_TILE_Q
            return cls(
                tile_q=tile_q,
                tile_kv=tile_kv,
                decode_tile_q=None,
                has_prefill=True,
                together=together(tile_q, at_once),
            )
        tile_q = min(_GPU_TILE_Q if is_gpu else _TILE_Q, num_tokens)
        return cls(
            tile_q=tile_q,
            tile_kv=tile_kv,
            decode_tile_q=1,
            has_prefill=not decode_only,
            together=together(tile_q, -(-num_tokens // tile_q)),
            decode_together=together(1, min(num_tokens, _GPU_ROWS)),
        )
