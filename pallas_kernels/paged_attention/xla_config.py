"""Tile sizes of paged attention, a pure function of shapes."""

from __future__ import annotations

import dataclasses

from pallas_kernels.shapes import check_counts

_TILE_KV = 64  # on the CPU a tile of 64 x 8 heads x 128 x f32 is 256 KB of K, which the second read finds in L2
_TILE_Q = 64
_INVARIANT_TILE_Q = 8  # a decode row fills one lane of it, and costs as much as all


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How a step's queries and contexts are cut.

    tile_q: query tokens of one row that share a read of K and V. tile_kv: tokens of a row's context, cut at
    absolute positions. decode_tile_q: tile_q of the rows that have one query, or None where they are tiled
    like all others. has_prefill: False where no row has more than one query.
    """

    tile_q: int
    tile_kv: int
    decode_tile_q: int | None
    has_prefill: bool

    def __post_init__(self) -> None:
        """Raises ValueError for a tile below 1."""
        check_counts(tile_q=self.tile_q, tile_kv=self.tile_kv, decode_tile_q=self.decode_tile_q)

    @classmethod
    def choose(cls, *, num_tokens: int, block_size: int, decode_only: bool, invariant: bool) -> AttentionConfig:
        """The tiles of a bucket of `num_tokens` tokens.

        decode_only: every row of the bucket has at most one query. invariant: one form for all rows, whose
        tiles depend on block_size alone, so that a token's bits do not depend on the bucket; num_tokens must
        then be at least 64. Raises ValueError where it is not.
        """
        check_counts(num_tokens=num_tokens, block_size=block_size)
        tile_kv = max(block_size, _TILE_KV)
        if invariant:
            if num_tokens < 64:
                raise ValueError(f"num_tokens is {num_tokens}; invariant attention needs buckets of at least 64 tokens")
            return cls(tile_q=_INVARIANT_TILE_Q, tile_kv=tile_kv, decode_tile_q=None, has_prefill=True)
        return cls(tile_q=min(_TILE_Q, num_tokens), tile_kv=tile_kv, decode_tile_q=1, has_prefill=not decode_only)
