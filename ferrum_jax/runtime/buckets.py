"""The ladder: every compiled shape of the step, enumerated before the first step.

A bucket is (T tokens, R rows, M blocks per row). Decode buckets hold at most one token a row (T == R). Mixed
buckets hold any counts; their R is the most rows there are, because logits are computed in tiles of
rows that exist, so spare rows cost nothing. Token buckets and row buckets therefore add, not multiply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ferrum_jax.ints import round_up

INVARIANT_ROWS = 64  # below it XLA:CPU picks other loops, so a row's bits would depend on its bucket
SMALLEST_MIXED_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """One compiled shape. decode_only: no row computes more than one token, and T == R."""

    num_tokens: int  # T
    num_rows: int  # R
    table_width: int  # M
    decode_only: bool

    def __str__(self) -> str:
        return f"{'decode' if self.decode_only else 'mixed'} T={self.num_tokens} R={self.num_rows} M={self.table_width}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The buckets of an engine, smallest first."""

    buckets: tuple[Bucket, ...]

    def find(self, *, num_tokens: int, num_rows: int, longest: int) -> Bucket:
        """The smallest bucket that holds a step; a decode bucket only where no row computes more than one token.

        longest: tokens of the row that computes most.
        """
        decode = longest <= 1
        for bucket in self.buckets:
            if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows and (decode or not bucket.decode_only):
                return bucket
        raise AssertionError(f"no bucket holds {num_tokens} tokens in {num_rows} rows: {self.buckets}")


def make_ladder(*, max_num_seqs: int, max_num_batched_tokens: int, table_width: int, invariant: bool) -> Ladder:
    """Powers of two up to the limits; with `invariant` mixed buckets alone, none under 64 tokens or rows."""
    if invariant:
        rows = max(max_num_seqs, INVARIANT_ROWS)
        tokens = _powers(INVARIANT_ROWS, max(max_num_batched_tokens, INVARIANT_ROWS))
        decode: Sequence[int] = ()
    else:
        rows = max_num_seqs
        tokens = _powers(SMALLEST_MIXED_TOKENS, max(max_num_batched_tokens, SMALLEST_MIXED_TOKENS))
        decode = _powers(1, max_num_seqs)
    buckets = [Bucket(num_tokens=r, num_rows=r, table_width=table_width, decode_only=True) for r in decode]
    buckets += [Bucket(num_tokens=t, num_rows=rows, table_width=table_width, decode_only=False) for t in tokens]
    return Ladder(buckets=tuple(sorted(buckets, key=lambda b: (b.num_tokens, not b.decode_only))))


def _powers(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... and `high` itself, rounded up to a multiple of low."""
    values = []
    while low < high:
        values.append(low)
        low *= 2
    return [*values, round_up(high, values[0]) if values else low]
